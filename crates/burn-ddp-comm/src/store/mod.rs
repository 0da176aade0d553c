//! The store: where the ranks of a job meet, and from which each learns what
//! became of the others.
//!
//! A TCP server in the launcher or in rank 0, and one connection to it from each
//! rank for as long as that is in the group. The connection carries requests on
//! keys and values, and it is the rank's presence: when it ends without a
//! farewell, the rank has died, and the server says so to all others at once.

mod client;
mod connect;
mod connection;
mod frame;
mod group;
mod missing;
mod presence;
mod protocol;
mod server;
mod session;
mod state;

#[cfg(test)]
mod tests;

pub(crate) use client::StoreClient;
pub(crate) use connect::StoreConfig;
pub use server::StoreServer;
pub use state::RankFailure;
