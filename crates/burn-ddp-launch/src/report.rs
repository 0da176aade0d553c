//! What became of a job.

use std::fmt;

use crate::root_cause::RootCause;
use crate::signals;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal with this number killed it.
    Signal(i32),
    /// It is gone, and something else in the launching process took its status.
    Unknown,
}

impl ExitStatus {
    /// Whether it exited with code 0.
    pub fn success(self) -> bool {
        self == Self::Code(0)
    }

    /// The exit code that a shell gives it: 128 plus a signal's number.
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::Unknown => 1,
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => write!(f, "was killed by {}", signals::describe(*signal)),
            Self::Unknown => f.write_str("ended, its status is unknown"),
        }
    }
}

/// What ended a job.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every rank exited with code 0.
    Success,
    /// A rank failed, and the others were ended or failed because of it.
    RankFailed(RootCause),
    /// The launcher was told to end by a signal.
    Interrupted {
        /// The signal's number.
        signal: i32,
    },
    /// The launcher could not pass on what the ranks printed.
    OutputFailed {
        /// `stdout` or `stderr`.
        stream: String,
        /// Whether its reader closed it, as `| head` does.
        closed: bool,
        /// The error's text.
        message: String,
    },
}

/// What became of one rank of this machine.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct RankReport {
    /// Its rank in the job.
    pub rank: usize,
    /// How its process ended.
    pub status: ExitStatus,
    /// How long it ran.
    pub seconds: f64,
    /// When it ended, in seconds after the job's start.
    pub ended_after_seconds: f64,
    /// The last signal that the launcher sent it while it ran.
    pub signal_sent: Option<i32>,
}

/// What became of a job; its [`Display`](fmt::Display) text is a report for the
/// user, several lines long.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct JobReport {
    /// The exit code for the launcher: 0 if every rank exited with 0; that of
    /// the first rank to fail; 128 plus its number for a signal, to that rank
    /// or to the launcher; 141 where a reader closed the output early.
    pub exit_code: i32,
    /// What ended the job.
    pub outcome: Outcome,
    /// This machine's ranks, ascending.
    pub ranks: Vec<RankReport>,
    /// Ranks of the whole job.
    pub world_size: usize,
    /// From the call that started the job to the end of its last rank.
    pub seconds: f64,
    /// From the call that started the job until all its ranks were running.
    pub start_seconds: f64,
}

impl JobReport {
    /// Whether every rank exited with code 0.
    pub fn success(&self) -> bool {
        self.outcome == Outcome::Success
    }

    /// The first rank to fail, if one did.
    pub fn root_cause(&self) -> Option<&RootCause> {
        match &self.outcome {
            Outcome::RankFailed(cause) => Some(cause),
            _ => None,
        }
    }
}

impl fmt::Display for JobReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Outcome::Success => {
                let ranks = self.world_size;
                write!(f, "all {ranks} ranks succeeded after {:.2} s", self.seconds)
            }
            Outcome::RankFailed(cause) => {
                write_cause(f, cause)?;
                write_others(f, &self.ranks, Some(cause))
            }
            Outcome::Interrupted { signal } => {
                let signal = signals::describe(*signal);
                let seconds = self.seconds;
                write!(
                    f,
                    "the job was interrupted by {signal}, and ended after {seconds:.2} s"
                )?;
                write_others(f, &self.ranks, None)
            }
            Outcome::OutputFailed {
                stream,
                closed: true,
                ..
            } => write!(f, "the job was ended: the reader of its {stream} is gone"),
            Outcome::OutputFailed {
                stream, message, ..
            } => write!(f, "the job was ended: can't write to {stream}: {message}"),
        }
    }
}

fn write_cause(f: &mut fmt::Formatter<'_>, cause: &RootCause) -> fmt::Result {
    let (rank, after) = (cause.rank, cause.after_seconds);
    write!(f, "the job failed: rank {rank} ")?;
    match cause.status {
        Some(status) => write!(f, "{status}, {after:.2} s after the start")?,
        None => write!(
            f,
            "(on another machine) was lost, {after:.2} s after the start"
        )?,
    }
    match (&cause.panic, &cause.store_message) {
        (Some(panic), _) => write!(f, "\n  it {}", indented(&panic.to_string()))?,
        (None, Some(message)) => write!(f, "\n  {}", indented(message))?,
        (None, None) => {}
    }
    if cause.status == Some(ExitStatus::Signal(9)) {
        f.write_str(
            "\n  if nobody sent it, the kernel did for lack of memory: `dmesg | tail` would say so",
        )?;
    }
    if !cause.stderr_tail.is_empty() {
        f.write_str("\n  the last lines of its stderr:")?;
        for line in &cause.stderr_tail {
            write!(f, "\n    | {line}")?;
        }
    }
    Ok(())
}

fn write_others(
    f: &mut fmt::Formatter<'_>,
    ranks: &[RankReport],
    cause: Option<&RootCause>,
) -> fmt::Result {
    for report in ranks {
        if cause.is_some_and(|cause| cause.rank == report.rank) {
            continue;
        }
        let RankReport { rank, status, .. } = report;
        write!(f, "\n  rank {rank} {status}")?;
        match report.signal_sent {
            Some(signal) => write!(f, " after the launcher sent {}", signals::name(signal))?,
            None => {
                let after = report.ended_after_seconds;
                match cause.map(|cause| after - cause.after_seconds) {
                    Some(later) if later >= 0.0 => write!(f, ", {later:.2} s later")?,
                    _ => write!(f, ", {after:.2} s after the start")?,
                }
            }
        }
    }
    Ok(())
}

/// The lines after the first moved right.
fn indented(text: &str) -> String {
    text.replace('\n', "\n    ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panic_message::PanicMessage;

    fn report(outcome: Outcome) -> JobReport {
        let rank = |rank, status, signal_sent| RankReport {
            rank,
            status,
            seconds: 2.0,
            ended_after_seconds: 2.01,
            signal_sent,
        };
        JobReport {
            exit_code: 101,
            outcome,
            ranks: vec![
                rank(0, ExitStatus::Code(1), None),
                rank(1, ExitStatus::Code(101), None),
                rank(2, ExitStatus::Signal(15), Some(15)),
            ],
            world_size: 3,
            seconds: 2.5,
            start_seconds: 0.01,
        }
    }

    #[test]
    fn a_failure_names_the_cause_first() {
        let cause = RootCause {
            rank: 1,
            status: Some(ExitStatus::Code(101)),
            after_seconds: 2.0,
            panic: Some(PanicMessage {
                thread: "main".into(),
                location: "src/x.rs:1:2".into(),
                message: "left\nright".into(),
            }),
            store_message: Some("unused".into()),
            stderr_tail: vec!["a".into(), "b".into()],
        };
        let text = report(Outcome::RankFailed(cause)).to_string();
        let expected = "the job failed: rank 1 exited with code 101, 2.00 s after the start
  it panicked at src/x.rs:1:2: left
    right
  the last lines of its stderr:
    | a
    | b
  rank 0 exited with code 1, 0.01 s later
  rank 2 was killed by signal 15 (SIGTERM) after the launcher sent SIGTERM";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_failure_elsewhere() {
        let cause = RootCause {
            rank: 7,
            status: None,
            after_seconds: 1.0,
            panic: None,
            store_message: Some("rank 7 panicked".into()),
            stderr_tail: vec![],
        };
        let text = report(Outcome::RankFailed(cause)).to_string();
        assert!(text.starts_with(
            "the job failed: rank 7 (on another machine) was lost, 1.00 s after the start\n  rank 7 panicked\n  rank 0"
        ), "{text}");
    }

    #[test]
    fn other_ends() {
        let text = |outcome| report(outcome).to_string();
        assert_eq!(text(Outcome::Success), "all 3 ranks succeeded after 2.50 s");
        assert!(
            text(Outcome::Interrupted { signal: 2 })
                .starts_with("the job was interrupted by signal 2 (SIGINT)")
        );
        let output = |closed| Outcome::OutputFailed {
            stream: "stdout".into(),
            closed,
            message: "No space left on device".into(),
        };
        assert!(text(output(true)).contains("reader of its stdout is gone"));
        assert!(text(output(false)).ends_with("can't write to stdout: No space left on device"));
    }

    #[test]
    fn shell_codes() {
        assert_eq!(ExitStatus::Code(3).shell_code(), 3);
        assert_eq!(ExitStatus::Signal(9).shell_code(), 137);
        assert_ne!(ExitStatus::Unknown.shell_code(), 0);
    }
}
