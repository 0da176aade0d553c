//! What a communicator does at a time: a collective, or messages to and from
//! single ranks.

use crate::call::{Call, name_ranks};
use crate::pair_call::PairCall;
use crate::scope::Scope;

/// The messages between this rank and one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    /// The peer's rank in the group.
    pub(crate) peer: usize,
    pub(crate) call: PairCall,
    pub(crate) sequence: u64,
}

/// One operation and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Collective(Call, u64),
    Pairs(Vec<Pair>),
}

impl Operation {
    /// `all_reduce #12 (f32 sum, 1048576)`, or `send #3 to rank 1 (f32, 1024)`:
    /// what rank `rank` of the group calls it.
    pub(crate) fn describe(&self, scope: &Scope, rank: usize) -> String {
        let describe = |pair: &Pair| {
            let peer = scope.job_ranks[pair.peer];
            pair.call.describe(pair.sequence, rank < pair.peer, peer)
        };
        match self {
            Self::Collective(call, sequence) => call.describe(*sequence),
            Self::Pairs(pairs) => match pairs.as_slice() {
                [pair] => describe(pair),
                // Each is told apart from others like it by its own number.
                [first, ..] => {
                    let peers: Vec<usize> = pairs.iter().map(|pair| pair.peer).collect();
                    let peers = name_ranks(&scope.in_job(&peers));
                    format!("an exchange with {peers}, first {}", describe(first))
                }
                [] => "an exchange with nobody".to_owned(),
            },
        }
    }
}
