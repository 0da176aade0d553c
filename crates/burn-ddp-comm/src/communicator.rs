//! What runs a group's collectives, one at a time: the links to the peers, and
//! what becomes of a collective that fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::{Call, Header, describe_difference, name_ranks};
use crate::collective::{Exchange, Peers, Topology};
use crate::membership::Membership;
use crate::peer::{Peer, Stop};
use crate::scope::Scope;
use crate::transport::Link;
use crate::waiter::Waiter;
use crate::{Error, Result};

/// How long a broken link waits for the store's explanation, which is better
/// than "connection reset".
const EXPLANATION_LIMIT: Duration = Duration::from_millis(500);
/// How long a rank that met a different call waits for the others' headers, so
/// that its error names every rank's.
const HEADERS_LIMIT: Duration = Duration::from_millis(300);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

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
    timeout: Duration,
    topology: Topology,
    scratch: Vec<u128>,
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
            timeout: Duration::MAX,
            topology: Topology::new(&[0]),
            scratch: Vec::new(),
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
        timeout: Duration,
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
            timeout,
            topology,
            scratch: Vec::new(),
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
        self.scope.name(call, self.sequence + 1)
    }

    /// Which ranks share a host.
    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Memory that collectives reuse from call to call.
    pub(crate) fn scratch(&mut self) -> &mut Vec<u128> {
        &mut self.scratch
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
            peer.begin(outgoing, incoming);
        }
        let result = self.drive(&header, exchange);
        if let Some(waiter) = &mut self.waiter {
            waiter.moved();
        }
        result.map_err(|stop| self.explain(call, &header, stop))
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
            let mut done = true;
            for peer in peers.iter_mut().flatten() {
                done &= peer.end_pass()?;
            }
            if done {
                return Ok(());
            }
            if let Some(waiter) = &mut self.waiter {
                if moved {
                    waiter.moved();
                } else {
                    let (membership, scope) = (&self.membership, &self.scope);
                    waiter.idle(peers, |peer| {
                        peer.link.is_closed() || membership.has_left(scope.job_ranks[peer.rank])
                    })?;
                }
            }
        }
    }

    /// The error that a stopped collective returns, recorded on all ranks.
    fn explain(&mut self, call: &Call, header: &Header, stop: Stop) -> Error {
        let name = self.scope.describe(call, self.sequence);
        let error = match stop {
            Stop::Fault => {
                if let Some(error) = self.membership.error() {
                    return error;
                }
                Error::environment(format!("{name}: the group has failed"))
            }
            Stop::Failed(error) => error,
            Stop::Left(ranks) => left(&name, &self.scope.in_job(&ranks)),
            Stop::Deadline => self.missed_deadline(&name),
            Stop::Mismatch => self.different_calls(call, header),
            Stop::Broken { rank, reason } => {
                self.broken_link(&name, self.scope.job_ranks[rank], &reason)
            }
        };
        self.fail(error)
    }

    fn missed_deadline(&self, name: &str) -> Error {
        let ranks = |awaited: fn(&Peer) -> bool| -> Vec<usize> {
            let peers = self.peers.iter().flatten();
            let ranks: Vec<usize> = peers.filter(|p| awaited(p)).map(|p| p.rank).collect();
            self.scope.in_job(&ranks)
        };
        let limit = self.timeout.as_secs_f64();
        // Those that did not even begin are to blame, if there are any: the
        // others may wait for them as this rank does.
        let absent = ranks(|peer| peer.receiving() == 0);
        let slow = ranks(Peer::is_awaited);
        let (ranks, what) = if !absent.is_empty() {
            (absent, "no data from")
        } else if !slow.is_empty() {
            (slow, "no more data from")
        } else {
            (ranks(|peer| !peer.is_done()), "no data taken by")
        };
        let text = format!(
            "{name}: {what} {} for {limit} s (deadline)",
            name_ranks(&ranks)
        );
        Error::peer(ranks, text)
    }

    fn broken_link(&self, name: &str, rank: usize, reason: &str) -> Error {
        let deadline = Instant::now() + EXPLANATION_LIMIT;
        while Instant::now() < deadline {
            if let Some(error) = self.membership.error() {
                return error;
            }
            if self.membership.has_left(rank) {
                return left(name, &[rank]);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Error::peer(
            [rank],
            format!("{name}: the connection to rank {rank} is of no more use: {reason}"),
        )
    }

    /// The error for ranks that made different calls. Waits a moment for the
    /// other ranks' headers.
    fn different_calls(&mut self, call: &Call, header: &Header) -> Error {
        let deadline = Instant::now() + HEADERS_LIMIT;
        loop {
            let mut complete = true;
            for peer in self.peers.iter_mut().flatten() {
                // A peer whose link breaks has no more to say.
                let broken = peer.exchange_headers(header).is_err() || peer.end_pass().is_err();
                complete &= broken || peer.header().is_some();
            }
            if let Some(error) = self.membership.error() {
                return error;
            }
            if complete || Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        let mut calls = vec![(self.scope.job_ranks[self.rank], *call, self.sequence)];
        for peer in self.peers.iter().flatten() {
            let Some(header) = peer.header() else {
                continue;
            };
            let rank = self.scope.job_ranks[peer.rank];
            let Some((call, sequence)) = Call::decode(header, self.scope.id) else {
                return Error::environment(format!(
                    "{}: what arrived from rank {rank} is no message of this group",
                    self.scope.name(call, self.sequence)
                ));
            };
            calls.push((rank, call, sequence));
        }
        calls.sort_by_key(|&(rank, ..)| rank);
        Error::usage(self.scope.locate(describe_difference(&calls)))
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

fn left(name: &str, ranks: &[usize]) -> Error {
    let verb = if ranks.len() == 1 { "it" } else { "they" };
    Error::peer(
        ranks.iter().copied(),
        format!(
            "{name}: {} left the group: {verb} finished while this rank was waiting",
            name_ranks(ranks)
        ),
    )
}
