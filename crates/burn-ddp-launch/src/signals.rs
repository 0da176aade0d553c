//! Signals to the launcher, delivered to the jobs that run in it.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc::Sender};

use burn_ddp_comm::{Error, Result};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::supervisor::Event;

/// The jobs that want to hear of signals.
///
/// A handler can't be taken out again so that a signal's default action comes
/// back; so it stays, and acts as the default where no job is running.
#[derive(Default)]
struct Subscribers {
    next: u64,
    senders: Vec<(u64, Sender<Event>)>,
}

type Shared = Arc<Mutex<Subscribers>>;

static SUBSCRIBERS: OnceLock<Result<Shared>> = OnceLock::new();

/// Delivers signals to one job until it is dropped.
pub(crate) struct Subscription {
    shared: Shared,
    number: u64,
}

/// Sends an [`Event::Signal`] for every SIGINT, SIGTERM and SIGHUP from now on.
///
/// A SIGHUP that was ignored when the program started stays so: `nohup` works.
pub(crate) fn subscribe(sender: Sender<Event>) -> Result<Subscription> {
    let shared = SUBSCRIBERS
        .get_or_init(|| {
            start_thread().map_err(|error| Error::environment_from("can't handle signals", error))
        })
        .clone()?;
    let number = {
        let mut subscribers = lock(&shared);
        let number = subscribers.next;
        subscribers.next += 1;
        subscribers.senders.push((number, sender));
        number
    };
    Ok(Subscription { shared, number })
}

impl Drop for Subscription {
    fn drop(&mut self) {
        lock(&self.shared)
            .senders
            .retain(|(number, _)| *number != self.number);
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Subscribers> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers the handlers and starts the thread that hands signals on.
fn start_thread() -> io::Result<Shared> {
    let mut handled = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP) {
        handled.push(SIGHUP);
    }
    let mut signals = Signals::new(handled)?;
    let shared = Shared::default();
    let of_thread = Arc::clone(&shared);
    std::thread::Builder::new()
        .name("launch-signals".into())
        .spawn(move || {
            for number in signals.forever() {
                deliver(&of_thread, number);
            }
        })?;
    Ok(shared)
}

/// Hands a signal to all running jobs, or does what it does by default.
fn deliver(shared: &Shared, number: i32) {
    let subscribers = lock(shared);
    if subscribers.senders.is_empty() {
        drop(subscribers);
        // Only a signal that can't be emulated is an error; these can.
        let _ = signal_hook::low_level::emulate_default_handler(number);
        return;
    }
    let Some(signal) = Signal::from_named_raw(number) else {
        return;
    };
    for (_, sender) in &subscribers.senders {
        // A job that has just ended needs no signal.
        let _ = sender.send(Event::Signal(signal));
    }
}

/// Whether the signal's action is to ignore it.
fn is_ignored(signal: i32) -> bool {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| ignored_mask(&status))
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// The mask of ignored signals in a `/proc/<pid>/status`.
fn ignored_mask(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// `SIGKILL` for 9; the number where there is no name.
pub(crate) fn name(number: i32) -> String {
    signal_hook::low_level::signal_name(number)
        .map_or_else(|| format!("signal {number}"), str::to_owned)
}

/// `signal 9 (SIGKILL)`.
pub(crate) fn describe(number: i32) -> String {
    match signal_hook::low_level::signal_name(number) {
        Some(name) => format!("signal {number} ({name})"),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored_mask(status), Some(0x1001));
        assert_eq!(ignored_mask("Name:\tx\n"), None);
        assert!(!is_ignored(SIGTERM));
        // The standard library ignores it in every Rust program.
        assert!(is_ignored(signal_hook::consts::SIGPIPE));
    }

    #[test]
    fn names() {
        assert_eq!(name(9), "SIGKILL");
        assert_eq!(name(11), "SIGSEGV");
        assert_eq!(name(63), "signal 63");
        assert_eq!(describe(15), "signal 15 (SIGTERM)");
        assert_eq!(describe(63), "signal 63");
    }
}
