//! What runs a group's collectives, one at a time: the links to the peers and
//! the waiting on them.

use std::sync::Arc;

use crate::call::{Call, Header};
use crate::collective::{Exchange, Peers};
use crate::fault::Fault;
use crate::peer::{Peer, Stop};
use crate::{Error, Result};

/// The links of one rank and the state of its current collective.
pub(crate) struct Communicator {
    rank: usize,
    /// Tells the groups of a job apart.
    group: u32,
    /// Number of the last collective begun; the first is 1.
    sequence: u64,
    /// By rank; `None` at this rank's own place.
    peers: Vec<Option<Peer>>,
    fault: Arc<Fault>,
    scratch: Vec<u128>,
}

impl Communicator {
    /// The communicator of a group of one.
    pub(crate) fn single(fault: Arc<Fault>) -> Self {
        Self {
            rank: 0,
            group: 0,
            sequence: 0,
            peers: vec![None],
            fault,
            scratch: Vec::new(),
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// Number of the last collective begun.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Memory that collectives reuse from call to call.
    pub(crate) fn scratch(&mut self) -> &mut Vec<u128> {
        &mut self.scratch
    }

    /// Says whether operations run in the communication thread, beside a thread
    /// that computes, or in a thread that has nothing else to do.
    pub(crate) fn set_background(&mut self, _background: bool) {}

    /// Records that the group has failed and tells the other ranks; returns the
    /// error that made it fail.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.fault.set(error)
    }

    /// Runs the collective `call`, whose data movement is `exchange`.
    pub(crate) fn perform(&mut self, call: &Call, exchange: &mut impl Exchange) -> Result<()> {
        self.fault.check()?;
        self.sequence += 1;
        let header = call.encode(self.group, self.sequence);
        for peer in self.peers.iter_mut().flatten() {
            let (outgoing, incoming) = exchange.segments(peer.rank);
            peer.begin(outgoing, incoming);
        }
        self.drive(&header, exchange)
            .map_err(|stop| self.fail(Error::usage(format!("{stop:?}"))))
    }

    fn drive(&mut self, header: &Header, exchange: &mut impl Exchange) -> Result<(), Stop> {
        loop {
            let mut moved = false;
            let peers: &mut Peers = &mut self.peers;
            for peer in peers.iter_mut().flatten() {
                moved |= peer.exchange_headers(header)?;
                if peer.differs() {
                    return Err(Stop::Mismatch);
                }
            }
            moved |= exchange.advance(peers)?;
            if peers.iter().flatten().all(Peer::is_done) {
                return Ok(());
            }
            let _ = moved;
        }
    }
}
