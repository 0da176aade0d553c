//! Process groups and collectives for distributed training.

mod call;
mod collective;
mod communicator;
mod dtype;
mod engine;
mod env;
mod error;
mod fault;
mod group_config;
mod handshake;
mod host;
mod membership;
mod operation;
mod pair_call;
mod panic_message;
mod peer;
mod process_group;
mod reception;
mod reduce;
mod reduce_op;
mod scope;
mod secret;
mod socket;
mod store;
mod transport;
mod waiter;
mod work;

pub use dtype::{DType, Element};
pub use error::{Error, ErrorKind, Result};
pub use group_config::GroupConfig;
pub use process_group::{ProcessGroup, Transfer};
pub use reduce_op::ReduceOp;
pub use secret::Secret;
pub use store::{RankFailure, StoreServer};
pub use work::Work;
