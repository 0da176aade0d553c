//! The one place where a group's failure is recorded, and from which every wait
//! is woken.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Error;

type Waker = Box<dyn Fn() + Send + Sync>;

/// Tells wakers apart, so that one can be [forgotten](Fault::forget).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WakerId(u64);

#[derive(Default)]
struct Wakers {
    next: u64,
    list: Vec<(u64, Waker)>,
}

/// The first error of a group, which poisons it.
///
/// A wait checks [`is_set`](Self::is_set) and registers a waker that ends its
/// sleep; whoever notices a failure calls [`set`](Self::set). Only the first
/// error is kept: it is the cause, the others are its consequences.
#[derive(Default)]
pub(crate) struct Fault {
    set: AtomicBool,
    error: OnceLock<Error>,
    wakers: Mutex<Wakers>,
}

impl Fault {
    /// A fault that has not happened.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Whether the group has failed: one relaxed load, for polling loops.
    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Relaxed)
    }

    /// The error that poisoned the group.
    pub(crate) fn error(&self) -> Option<Error> {
        self.error.get().cloned()
    }

    /// `Err` with the error that poisoned the group, if it has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Records `error` unless one is recorded, wakes every wait, and returns
    /// the recorded one.
    pub(crate) fn set(&self, error: Error) -> Error {
        let first = self.error.get_or_init(|| error).clone();
        if !self.set.swap(true, Ordering::SeqCst) {
            for (_, waker) in &self.wakers().list {
                waker();
            }
        }
        first
    }

    /// Calls `waker` when the group fails; at once if it already has.
    pub(crate) fn on_set(&self, waker: impl Fn() + Send + Sync + 'static) -> WakerId {
        let mut wakers = self.wakers();
        // Checked under the lock that `set` takes to call the wakers, so that
        // none is missed.
        if self.set.load(Ordering::SeqCst) {
            waker();
        }
        let id = wakers.next;
        wakers.next += 1;
        wakers.list.push((id, Box::new(waker)));
        WakerId(id)
    }

    /// Drops a waker: the wait that it was for is over for good.
    pub(crate) fn forget(&self, WakerId(id): WakerId) {
        self.wakers().list.retain(|&(other, _)| other != id);
    }

    fn wakers(&self) -> MutexGuard<'_, Wakers> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fault").field(&self.error.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn the_first_error_is_kept_and_wakes_everyone_once() {
        let fault = Fault::new();
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        fault.on_set(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        assert!(fault.check().is_ok());

        fault.set(Error::peer([1], "rank 1 died"));
        let returned = fault.set(Error::usage("a consequence"));

        assert_eq!(returned.to_string(), "rank 1 died");
        assert_eq!(fault.error().map(|e| e.ranks().to_vec()), Some(vec![1]));
        assert_eq!(woken.load(Ordering::SeqCst), 1);

        let count = Arc::clone(&woken);
        fault.on_set(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(woken.load(Ordering::SeqCst), 2, "a late waker runs at once");
    }

    #[test]
    fn a_forgotten_waker_is_dropped_and_not_called() {
        let fault = Fault::new();
        let kept = Arc::new(AtomicUsize::new(0));
        let forgotten = Arc::new(AtomicUsize::new(0));
        let [count, other] = [Arc::clone(&kept), Arc::clone(&forgotten)];
        fault.on_set(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        let id = fault.on_set(move || {
            other.fetch_add(1, Ordering::SeqCst);
        });
        fault.forget(id);
        assert_eq!(Arc::strong_count(&forgotten), 1, "what it held is free");
        fault.set(Error::peer([1], "rank 1 died"));
        assert_eq!(kept.load(Ordering::SeqCst), 1);
        assert_eq!(forgotten.load(Ordering::SeqCst), 0);
    }
}
