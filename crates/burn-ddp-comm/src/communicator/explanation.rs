//! Why an operation failed: the error that its caller gets, and that the other
//! ranks are told.

use std::time::{Duration, Instant};

use super::Communicator;
use crate::Error;
use crate::call::{describe_difference, name_ranks};
use crate::operation::Operation;
use crate::pair_call::describe_header;
use crate::peer::{Peer, Stop};

/// How long a broken link waits for the store's explanation, which is better
/// than "connection reset".
const EXPLANATION_LIMIT: Duration = Duration::from_millis(500);
/// How long a rank that met a different call waits for the others' headers, so
/// that its error names every rank's.
const HEADERS_LIMIT: Duration = Duration::from_millis(300);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

impl Communicator {
    /// The error that a stopped collective returns, recorded on all ranks.
    pub(super) fn explain(&mut self, operation: &Operation, stop: Stop) -> Error {
        let text = operation.describe(&self.scope, self.rank);
        let name = self.scope.located(&text);
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
            Stop::Mismatch => self.different_calls(text, &name),
            Stop::Broken { rank, reason } => {
                self.broken_link(&name, self.scope.job_ranks[rank], &reason)
            }
        };
        self.fail(error)
    }

    /// Who is waited for, and how.
    pub(super) fn awaited(&self) -> (Vec<usize>, &'static str) {
        let ranks = |awaited: fn(&Peer) -> bool| -> Vec<usize> {
            let peers = self.peers.iter().flatten();
            let ranks: Vec<usize> = peers.filter(|p| awaited(p)).map(|p| p.rank).collect();
            self.scope.in_job(&ranks)
        };
        // Those that did not even begin are to blame, if there are any: the
        // others may wait for them as this rank does.
        let absent = ranks(|peer| peer.receiving() == 0);
        let slow = ranks(Peer::is_awaited);
        if !absent.is_empty() {
            (absent, "no data from")
        } else if !slow.is_empty() {
            (slow, "no more data from")
        } else {
            (ranks(|peer| !peer.is_done()), "no data taken by")
        }
    }

    fn missed_deadline(&self, name: &str) -> Error {
        let (ranks, what) = self.awaited();
        let still = self.still().as_secs_f64();
        let text = format!(
            "{name}: {what} {} for {still:.1} s (deadline){}",
            name_ranks(&ranks),
            self.last_seen(&ranks)
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
    fn different_calls(&mut self, own: String, name: &str) -> Error {
        let deadline = Instant::now() + HEADERS_LIMIT;
        loop {
            let mut complete = true;
            for peer in self.peers.iter_mut().flatten() {
                // A peer whose link breaks has no more to say.
                let broken = peer.exchange_headers().is_err() || peer.end_pass().is_err();
                complete &= broken || peer.header().is_some() || !peer.takes_part();
            }
            if let Some(error) = self.membership.error() {
                return error;
            }
            if complete || Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        let own_rank = self.job_rank();
        let mut calls = vec![(own_rank, own)];
        for peer in self.peers.iter().flatten() {
            let Some(header) = peer.header() else {
                continue;
            };
            let rank = self.scope.job_ranks[peer.rank];
            let is_lower = peer.rank < self.rank;
            let Some(text) = describe_header(header, self.scope.id, is_lower, own_rank) else {
                return Error::environment(format!(
                    "{name}: what arrived from rank {rank} is no message of this group"
                ));
            };
            calls.push((rank, text));
        }
        calls.sort_by_key(|&(rank, _)| rank);
        Error::usage(self.scope.locate(describe_difference(&calls)))
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
