//! From what was seen of a job to the report on it.

use std::time::{Duration, Instant};

use burn_ddp_comm::RankFailure;
use rustix::process::Signal;

use crate::output::Captured;
use crate::rank_process::RankProcess;
use crate::report::{ExitStatus, JobReport, Outcome, RankReport};
use crate::root_cause::{Failed, Reported, RootCause, first_to_fail};
use crate::supervisor::Reason;

/// Everything that was seen of a job, all of whose ranks have ended.
pub(crate) struct Observed<'a, 'g> {
    /// When the job was asked for.
    pub(crate) begun: Instant,
    /// How long it took until all ranks were running.
    pub(crate) start: Duration,
    pub(crate) world_size: usize,
    pub(crate) ranks: &'a [RankProcess<'g>],
    pub(crate) captured: Vec<Captured>,
    pub(crate) reason: Option<Reason>,
    /// What the store saw.
    pub(crate) reported: Option<RankFailure>,
}

/// The process of one rank, as it ended.
struct Ended {
    report: RankReport,
    at: Instant,
}

/// Writes the report.
pub(crate) fn report(observed: Observed<'_, '_>) -> JobReport {
    let begun = observed.begun;
    let ended: Vec<Ended> = observed
        .ranks
        .iter()
        .map(|rank| ended(rank, begun))
        .collect();
    let last = ended.iter().map(|ended| ended.at).max().unwrap_or(begun);
    let outcome = match observed.reason {
        Some(Reason::Signal(signal)) => Outcome::Interrupted {
            signal: signal.as_raw(),
        },
        Some(Reason::Output(failure)) => Outcome::OutputFailed {
            stream: failure.stream,
            closed: failure.closed,
            message: failure.message,
        },
        Some(Reason::RankFailed) | None => {
            match root_cause(&ended, observed.captured, observed.reported, begun) {
                Some(cause) => Outcome::RankFailed(cause),
                None => Outcome::Success,
            }
        }
    };
    JobReport {
        exit_code: exit_code(&outcome, &ended),
        outcome,
        ranks: ended.into_iter().map(|ended| ended.report).collect(),
        world_size: observed.world_size,
        seconds: last.saturating_duration_since(begun).as_secs_f64(),
        start_seconds: observed.start.as_secs_f64(),
    }
}

fn ended(rank: &RankProcess<'_>, begun: Instant) -> Ended {
    // Every rank has ended; one that had not would be a failure.
    let (status, at) = rank.end.unwrap_or((ExitStatus::Unknown, Instant::now()));
    let sent = rank.sent.filter(|(_, sent_at)| *sent_at <= at);
    let since = |start| at.saturating_duration_since(start).as_secs_f64();
    Ended {
        report: RankReport {
            rank: rank.rank,
            status,
            seconds: since(rank.started),
            ended_after_seconds: since(begun),
            signal_sent: sent.map(|(signal, _)| signal.as_raw()),
        },
        at,
    }
}

/// The first rank to fail, and what is known of its failure.
fn root_cause(
    ended: &[Ended],
    mut captured: Vec<Captured>,
    reported: Option<RankFailure>,
    begun: Instant,
) -> Option<RootCause> {
    let reported = reported.map(|failure| Reported {
        rank: failure.rank,
        message: failure.message,
        at: failure.at,
    });
    let own = ended
        .iter()
        .filter(|ended| ended.report.signal_sent.is_none());
    let mut failed = Vec::new();
    let mut succeeded = Vec::new();
    for ended in own {
        let rank = ended.report.rank;
        match ended.report.status.success() {
            true => succeeded.push(rank),
            false => failed.push(Failed { rank, at: ended.at }),
        }
    }
    let is_here = |rank| ended.iter().any(|ended| ended.report.rank == rank);
    let elsewhere = || Some(reported.as_ref()?.rank).filter(|&rank| !is_here(rank));
    let rank = first_to_fail(&failed, &succeeded, reported.as_ref()).or_else(elsewhere)?;
    let index = ended.iter().position(|ended| ended.report.rank == rank);
    let captured = match index {
        Some(index) if index < captured.len() => captured.swap_remove(index),
        _ => Captured::default(),
    };
    let reported = reported.filter(|reported| reported.rank == rank);
    let at = match (index, &reported) {
        (Some(index), Some(reported)) => ended[index].at.min(reported.at),
        (Some(index), None) => ended[index].at,
        (None, Some(reported)) => reported.at,
        (None, None) => begun,
    };
    Some(RootCause {
        rank,
        status: index.map(|index| ended[index].report.status),
        after_seconds: at.saturating_duration_since(begun).as_secs_f64(),
        panic: captured.panic,
        store_message: reported.map(|reported| reported.message),
        stderr_tail: captured.tail,
    })
}

/// See [`JobReport::exit_code`].
fn exit_code(outcome: &Outcome, ended: &[Ended]) -> i32 {
    match outcome {
        Outcome::Success => 0,
        Outcome::Interrupted { signal } => 128 + signal,
        Outcome::OutputFailed { closed: true, .. } => 128 + Signal::PIPE.as_raw(),
        Outcome::OutputFailed { closed: false, .. } => 1,
        Outcome::RankFailed(cause) => {
            // That of a rank on another machine is not known here; the first
            // one here failed because of it.
            let status = cause.status.filter(|status| !status.success());
            let first_here = || {
                let failed = ended.iter().filter(|ended| !ended.report.status.success());
                failed
                    .min_by_key(|ended| ended.at)
                    .map(|ended| ended.report.status)
            };
            status.or_else(first_here).map_or(1, ExitStatus::shell_code)
        }
    }
}
