//! What runs a group's operations, one at a time: the links to the peers.

mod explanation;
mod patience;

use std::sync::Arc;
use std::time::Duration;

use crate::call::Call;
use crate::collective::{Exchange, Peers, Topology};
use crate::liveness::Limits;
use crate::membership::Membership;
use crate::operation::{Operation, Pair};
use crate::pair_call::PairCall;
use crate::peer::{Peer, Stop};
use crate::scope::Scope;
use crate::transport::Link;
use crate::waiter::Waiter;
use crate::{Error, Result};

/// The links of one rank and the state of its current collective.
pub(crate) struct Communicator {
    rank: usize,
    scope: Arc<Scope>,
    /// Number of the last collective begun; the first is 1.
    sequence: u64,
    /// By rank; `None` at this rank's own place.
    peers: Vec<Option<Peer>>,
    /// `None` in a group of one.
    waiter: Option<Waiter>,
    membership: Arc<Membership>,
    limits: Limits,
    topology: Topology,
    scratch: Vec<u128>,
    staging: Vec<u128>,
    /// The current operation's number in the flight recorder.
    flight: u64,
    /// For how long nothing had moved at the last look.
    still: Duration,
    /// When the log tells of a wait next.
    next_log: Duration,
}

impl Communicator {
    /// The communicator of a group of one.
    pub(crate) fn single(scope: Arc<Scope>, membership: Arc<Membership>) -> Self {
        Self {
            rank: 0,
            scope,
            sequence: 0,
            peers: vec![None],
            waiter: None,
            membership,
            limits: Limits {
                timeout: Duration::MAX,
                patience: Duration::MAX,
            },
            topology: Topology::new(&[0]),
            scratch: Vec::new(),
            staging: Vec::new(),
            flight: 0,
            still: Duration::ZERO,
            next_log: Duration::ZERO,
        }
    }

    /// The communicator of rank `rank` of a group on the hosts of `topology`. `links` by rank, `None` at
    /// the own place.
    pub(crate) fn new(
        rank: usize,
        scope: Arc<Scope>,
        links: Vec<Option<Link>>,
        waiter: Waiter,
        membership: Arc<Membership>,
        limits: Limits,
        topology: Topology,
    ) -> Self {
        let peers = links
            .into_iter()
            .enumerate()
            .map(|(rank, link)| link.map(|link| Peer::new(rank, link)))
            .collect();
        Self {
            rank,
            scope,
            sequence: 0,
            peers,
            waiter: Some(waiter),
            membership,
            limits,
            topology,
            scratch: Vec::new(),
            staging: Vec::new(),
            flight: 0,
            still: Duration::ZERO,
            next_log: Duration::ZERO,
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// This rank's number in the job.
    pub(crate) fn job_rank(&self) -> usize {
        self.scope.job_ranks[self.rank]
    }

    pub(crate) fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// What errors call the collective that `call` is to begin.
    pub(crate) fn next_name(&self, call: &Call) -> String {
        self.scope.located(&call.name(self.sequence + 1))
    }

    /// Which ranks share a host.
    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Memory that collectives reuse from call to call.
    pub(crate) fn scratch(&mut self) -> &mut Vec<u128> {
        &mut self.scratch
    }

    /// Memory in which several buffers are made one, reused likewise.
    pub(crate) fn staging(&mut self) -> &mut Vec<u128> {
        &mut self.staging
    }

    /// Says which number the next operation has in the flight recorder.
    pub(crate) fn set_flight(&mut self, flight: u64) {
        self.flight = flight;
    }

    /// Says whether operations run in the communication thread, beside a thread
    /// that computes, or in a thread that has nothing else to do.
    pub(crate) fn set_background(&mut self, background: bool) {
        if let Some(waiter) = &mut self.waiter {
            waiter.set_background(background);
        }
    }

    /// Records that the group has failed and tells the other ranks; returns the
    /// error that made it fail.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.membership.fail(error)
    }

    /// Runs the collective `call`, whose data movement is `exchange`.
    pub(crate) fn perform(&mut self, call: &Call, exchange: &mut impl Exchange) -> Result<()> {
        self.membership.check()?;
        self.sequence += 1;
        let header = call.encode(self.scope.id, self.sequence);
        for peer in self.peers.iter_mut().flatten() {
            let (outgoing, incoming) = exchange.segments(peer.rank);
            peer.begin(&header, outgoing, incoming);
        }
        self.complete(&Operation::Collective(*call, self.sequence), exchange)
    }

    /// Exchanges the messages of `calls`, by peer, with these peers alone. Every
    /// other rank goes on with what it does.
    pub(crate) fn perform_pairs(
        &mut self,
        calls: &[(usize, PairCall)],
        exchange: &mut impl Exchange,
    ) -> Result<()> {
        self.membership.check()?;
        let mut pairs = Vec::with_capacity(calls.len());
        for peer in self.peers.iter_mut().flatten() {
            peer.stand_by();
        }
        for &(rank, call) in calls {
            let Some(peer) = &mut self.peers[rank] else {
                continue;
            };
            peer.pair_sequence += 1;
            let sequence = peer.pair_sequence;
            pairs.push(Pair {
                peer: rank,
                call,
                sequence,
            });
            let header = call.encode(self.scope.id, sequence);
            let (outgoing, incoming) = exchange.segments(rank);
            peer.begin(&header, outgoing, incoming);
        }
        self.complete(&Operation::Pairs(pairs), exchange)
    }

    /// Drives an operation that has begun to its end.
    fn complete(&mut self, operation: &Operation, exchange: &mut impl Exchange) -> Result<()> {
        self.membership.recorder().begin(self.flight, operation);
        let result = self.drive(operation, exchange);
        if let Some(waiter) = &mut self.waiter {
            waiter.moved();
        }
        result.map_err(|stop| self.explain(operation, stop))
    }

    fn drive(&mut self, operation: &Operation, exchange: &mut impl Exchange) -> Result<(), Stop> {
        loop {
            let mut moved = false;
            let peers: &mut Peers = &mut self.peers;
            for peer in peers.iter_mut().flatten() {
                moved |= peer.exchange_headers()?;
                if peer.differs() {
                    return Err(Stop::Mismatch);
                }
            }
            moved |= exchange.advance(peers)?;
            let mut done = true;
            for peer in peers.iter_mut().flatten() {
                done &= peer.end_pass()?;
            }
            if done {
                return Ok(());
            }
            if let Some(waiter) = &mut self.waiter {
                if moved {
                    if waiter.moved() {
                        self.membership.recorder().moved(self.flight);
                    }
                } else {
                    let (membership, scope) = (&self.membership, &self.scope);
                    let still = waiter.idle(peers, |peer| {
                        peer.link.is_closed() || membership.has_left(scope.job_ranks[peer.rank])
                    })?;
                    if let Some(still) = still {
                        self.look_around(operation, still)?;
                    }
                }
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Where the group has failed the others know better reasons, and where
        // this rank panics they are about to.
        if self.membership.error().is_some() || std::thread::panicking() {
            return;
        }
        for peer in self.peers.iter().flatten() {
            peer.link.close();
        }
    }
}
