//! The collectives, one algorithm a file. `docs/algorithms.md` has their steps
//! and the bytes that each puts on the wire.

mod all_gather;
mod all_gather_variable;
mod all_reduce;
mod all_to_all;
mod arguments;
mod barrier;
mod broadcast;
mod coalesced;
mod direct;
mod gather;
mod hierarchical;
mod object;
mod point_to_point;
mod reduce;
mod reduce_scatter;
mod scatter;
mod slice_fold;
mod variable;

pub(crate) use hierarchical::Topology;

use crate::peer::{Moved, Peer};

/// The peers of a group by rank; `None` at this rank's own place.
pub(crate) type Peers = [Option<Peer>];

/// The data movement of one collective on one rank.
pub(crate) trait Exchange {
    /// How many segments this rank's message to `rank` has, and how many the
    /// one from it.
    fn segments(&self, rank: usize) -> (usize, usize);

    /// Moves whatever can be moved without waiting. The headers are not its
    /// business: a peer whose header has not arrived is
    /// [`receiving`](Peer::receiving) segment 0.
    fn advance(&mut self, peers: &mut Peers) -> Moved;
}

#[cfg(all(test, not(loom)))]
mod tests;
