//! Watches over the running ranks, and ends them when one fails or the launcher
//! is told to.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use burn_ddp_comm::StoreServer;
use rustix::process::Signal;

use crate::output::Captured;
use crate::rank_process::RankProcess;
use crate::report::ExitStatus;

/// What happens while ranks run.
#[derive(Debug)]
pub(crate) enum Event {
    /// The process of the rank with this index on this machine ended.
    Exited {
        index: usize,
        status: ExitStatus,
        at: Instant,
    },
    /// The launcher got a signal.
    Signal(Signal),
    /// Output can't be passed on any more.
    OutputFailed(OutputFailure),
    /// All output has been passed on; one entry per rank.
    OutputDone(Vec<Captured>),
    /// No rank on any machine needs the store any more.
    StoreDone(StoreServer),
}

/// Why output can't be passed on.
#[derive(Clone, Debug)]
pub(crate) struct OutputFailure {
    pub(crate) stream: String,
    pub(crate) closed: bool,
    pub(crate) message: String,
}

/// How long ranks get to end by themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// After a rank's failure, until the others get SIGTERM: time to notice the
    /// failure and say so.
    pub(crate) notice: Duration,
    /// From SIGTERM to SIGKILL.
    pub(crate) grace: Duration,
    /// From a signal that was passed on to SIGKILL: time to save a checkpoint.
    pub(crate) signal_grace: Duration,
}

/// Why ranks were ended.
#[derive(Clone, Debug)]
pub(crate) enum Reason {
    RankFailed,
    Signal(Signal),
    Output(OutputFailure),
}

/// How a job is being ended.
struct Ending {
    reason: Reason,
    terminate_at: Option<Instant>,
    kill_at: Option<Instant>,
}

/// What was seen by the time all ranks had ended.
pub(crate) struct Supervised {
    /// Why ranks were ended, if they were.
    pub(crate) reason: Option<Reason>,
    /// What is kept of the ranks' stderr, if all pipes were closed before.
    captured: Option<Vec<Captured>>,
}

/// Waits until all ranks have ended, and ends them if one fails, a signal
/// arrives, or their output can't be written.
pub(crate) fn supervise(
    ranks: &mut [RankProcess<'_>],
    events: &Receiver<Event>,
    patience: Patience,
) -> Supervised {
    let mut supervisor = Supervisor {
        ranks,
        patience,
        ending: None,
        captured: None,
    };
    while !supervisor.all_ended() {
        match supervisor.next(events) {
            Some(event) => supervisor.handle(event),
            None => supervisor.deadline(Instant::now()),
        }
    }
    Supervised {
        reason: supervisor.ending.map(|ending| ending.reason),
        captured: supervisor.captured,
    }
}

impl Supervised {
    /// Waits until all output has been passed on, or until a signal tells that
    /// nobody waits for it any more: the launcher's own output may be a pipe
    /// that nobody reads.
    pub(crate) fn await_output(
        mut self,
        events: &Receiver<Event>,
    ) -> (Option<Reason>, Vec<Captured>) {
        while self.captured.is_none() {
            match events.recv() {
                Ok(Event::OutputDone(captured)) => self.captured = Some(captured),
                Ok(Event::OutputFailed(failure)) => {
                    self.reason.get_or_insert(Reason::Output(failure));
                }
                Ok(Event::Signal(_)) | Err(_) => break,
                Ok(Event::Exited { .. } | Event::StoreDone(_)) => {}
            }
        }
        (self.reason, self.captured.unwrap_or_default())
    }
}

struct Supervisor<'a, 'g> {
    ranks: &'a mut [RankProcess<'g>],
    patience: Patience,
    ending: Option<Ending>,
    captured: Option<Vec<Captured>>,
}

impl Supervisor<'_, '_> {
    fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.end.is_some())
    }

    /// The next event, or none when a deadline comes first.
    fn next(&self, events: &Receiver<Event>) -> Option<Event> {
        let deadlines = self
            .ending
            .as_ref()
            .map(|ending| (ending.terminate_at, ending.kill_at));
        let next = deadlines.and_then(|(terminate, kill)| terminate.or(kill));
        let result = match next {
            Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(RecvTimeoutError::from),
        };
        // The caller keeps a sender, so the channel is never closed.
        result.ok()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Exited { index, status, at } => {
                self.ranks[index].end = Some((status, at));
                if !status.success() && self.ending.is_none() {
                    let terminate_at = Instant::now() + self.patience.notice;
                    self.end(
                        Reason::RankFailed,
                        Some(terminate_at),
                        terminate_at + self.patience.grace,
                    );
                }
            }
            Event::Signal(signal) => self.pass_on(signal),
            Event::OutputFailed(failure) => {
                if self.ending.is_none() {
                    let now = Instant::now();
                    self.end(
                        Reason::Output(failure),
                        Some(now),
                        now + self.patience.grace,
                    );
                }
            }
            // All pipes are closed, though ranks may still run.
            Event::OutputDone(captured) => self.captured = Some(captured),
            // Asked for only when all ranks here have ended.
            Event::StoreDone(_) => {}
        }
    }

    fn end(&mut self, reason: Reason, terminate_at: Option<Instant>, kill_at: Instant) {
        self.ending = Some(Ending {
            reason,
            terminate_at,
            kill_at: Some(kill_at),
        });
    }

    /// A first signal is passed on; an interrupt while the job is ending means
    /// that the user does not want to wait.
    fn pass_on(&mut self, signal: Signal) {
        match &mut self.ending {
            None => {
                let kill_at = Instant::now() + self.patience.signal_grace;
                self.end(Reason::Signal(signal), None, kill_at);
                self.signal_all(signal);
            }
            Some(ending) if signal == Signal::INT => {
                ending.terminate_at = None;
                ending.kill_at = None;
                self.signal_all(Signal::KILL);
            }
            Some(_) => self.signal_all(signal),
        }
    }

    /// Does what is due.
    fn deadline(&mut self, now: Instant) {
        let Some(ending) = &mut self.ending else {
            return;
        };
        let due = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
        let signal = if due(&mut ending.terminate_at) {
            Signal::TERM
        } else if ending.terminate_at.is_none() && due(&mut ending.kill_at) {
            Signal::KILL
        } else {
            return;
        };
        self.signal_all(signal);
    }

    /// Signals every rank's process group, also those whose leader has ended.
    fn signal_all(&mut self, signal: Signal) {
        for rank in self.ranks.iter_mut() {
            rank.signal(signal);
        }
        if signal != Signal::KILL {
            // A stopped process handles no other signal before this one.
            for rank in self.ranks.iter_mut() {
                rank.resume();
            }
        }
    }
}
