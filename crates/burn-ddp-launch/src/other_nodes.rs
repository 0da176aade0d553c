//! The machines whose ranks are still running when this one's have succeeded,
//! and need the store that this machine hosts.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use burn_ddp_comm::{Error, RankFailure, Result, StoreServer};

use crate::supervisor::{Event, Reason};

/// They take what they take; a signal ends the wait.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Keeps the store until every rank has left it, or a signal arrives.
///
/// Gives that signal, and the first failure that the store has seen.
pub(crate) fn await_leave(
    mut store: StoreServer,
    sender: Sender<Event>,
    events: &Receiver<Event>,
) -> Result<(Option<Reason>, Option<RankFailure>)> {
    std::thread::Builder::new()
        .name("launch-store".into())
        .spawn(move || {
            store.finish(NO_LIMIT);
            // Nobody listens any more after a signal.
            let _ = sender.send(Event::StoreDone(store));
        })
        .map_err(|error| Error::environment_from("can't start a thread", error))?;
    loop {
        match events.recv() {
            Ok(Event::StoreDone(store)) => return Ok((None, store.first_failure())),
            Ok(Event::Signal(signal)) => return Ok((Some(Reason::Signal(signal)), None)),
            Err(_) => return Ok((None, None)),
            Ok(Event::Exited { .. } | Event::OutputFailed(_) | Event::OutputDone(_)) => {}
        }
    }
}
