//! Which rank failed first, told from what the launcher and the store saw.

use std::time::{Duration, Instant};

use crate::panic_message::PanicMessage;
use crate::report::ExitStatus;

/// How much later than the end of a process the store may notice the same.
///
/// Less than the time after which the launcher begins to end the other ranks,
/// whose connections the store sees closing then.
const NOTICE: Duration = Duration::from_millis(150);

/// The first rank to fail: the others failed because of it, or were ended.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RootCause {
    /// The rank.
    pub rank: usize,
    /// How its process ended; `None` if it ran on another machine.
    pub status: Option<ExitStatus>,
    /// When, in seconds after the job's start.
    pub after_seconds: f64,
    /// Its panic, if its stderr showed one.
    pub panic: Option<PanicMessage>,
    /// What the job's store says of it: its last words, or how it was lost.
    pub store_message: Option<String>,
    /// The last lines of its stderr; empty if that was not captured.
    pub stderr_tail: Vec<String>,
}

/// A failed process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failed {
    pub(crate) rank: usize,
    /// When its end was noticed.
    pub(crate) at: Instant,
}

/// What the store knows of the first failure.
#[derive(Clone, Debug)]
pub(crate) struct Reported {
    /// The rank that was lost, or that reported a panic or an abort.
    pub(crate) rank: usize,
    pub(crate) message: String,
    /// When the store noticed.
    pub(crate) at: Instant,
}

/// The rank that failed first, if one did.
///
/// A process's end is a certain sign, but a late one: a rank that panics tells
/// the store while it unwinds, and the others may notice, fail and be gone
/// before it is. The store sees causes in their order. So its word counts,
/// unless a process had failed well before the store noticed anything (it never
/// joined, or took its leave and failed afterwards), or the rank in question
/// exited with code 0 in the end.
pub(crate) fn first_to_fail(
    failed: &[Failed],
    succeeded: &[usize],
    reported: Option<&Reported>,
) -> Option<usize> {
    let first = failed.iter().min_by_key(|failed| failed.at)?;
    let believed = reported
        .filter(|reported| !succeeded.contains(&reported.rank) && reported.at <= first.at + NOTICE);
    Some(believed.map_or(first.rank, |reported| reported.rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds after some start.
    struct Clock(Instant);

    impl Clock {
        fn failed(&self, list: &[(usize, u64)]) -> Vec<Failed> {
            let at = |after| self.0 + Duration::from_millis(after);
            list.iter()
                .map(|&(rank, after)| Failed {
                    rank,
                    at: at(after),
                })
                .collect()
        }

        fn reported(&self, rank: usize, after: u64) -> Reported {
            let message = "its connection closed".to_owned();
            let at = self.0 + Duration::from_millis(after);
            Reported { rank, message, at }
        }
    }

    #[test]
    fn nothing_failed() {
        let clock = Clock(Instant::now());
        assert_eq!(first_to_fail(&[], &[0, 1], None), None);
        let reported = clock.reported(1, 5);
        assert_eq!(first_to_fail(&[], &[0, 1], Some(&reported)), None);
    }

    #[test]
    fn without_a_store_the_first_end_counts() {
        let clock = Clock(Instant::now());
        let failed = clock.failed(&[(2, 30), (1, 20), (0, 40)]);
        assert_eq!(first_to_fail(&failed, &[], None), Some(1));
    }

    #[test]
    fn a_rank_that_unwinds_longer_than_its_peers_take_to_fail() {
        let clock = Clock(Instant::now());
        let failed = clock.failed(&[(0, 20), (1, 900)]);
        let reported = clock.reported(1, 10);
        assert_eq!(first_to_fail(&failed, &[], Some(&reported)), Some(1));
    }

    #[test]
    fn a_store_that_notices_a_little_late() {
        let clock = Clock(Instant::now());
        let failed = clock.failed(&[(0, 20), (1, 21)]);
        let reported = clock.reported(1, 60);
        assert_eq!(first_to_fail(&failed, &[], Some(&reported)), Some(1));
    }

    #[test]
    fn a_rank_that_never_joined() {
        // The launcher ends the others 200 ms later, and the store sees those.
        let clock = Clock(Instant::now());
        let failed = clock.failed(&[(1, 20), (0, 225)]);
        let reported = clock.reported(0, 224);
        assert_eq!(first_to_fail(&failed, &[], Some(&reported)), Some(1));
    }

    #[test]
    fn a_rank_that_succeeded_is_no_cause() {
        let clock = Clock(Instant::now());
        let failed = clock.failed(&[(0, 20)]);
        let reported = clock.reported(1, 10);
        assert_eq!(first_to_fail(&failed, &[1], Some(&reported)), Some(0));
    }
}
