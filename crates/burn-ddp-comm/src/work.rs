//! The handle of an asynchronous operation.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::{Error, Result};

/// An asynchronous operation in flight, holding its buffers until
/// [`wait`](Self::wait) hands them back.
///
/// Dropping it lets the operation finish; its buffers are dropped then.
#[must_use = "an operation's result and its buffers come back from `wait`"]
pub struct Work<B> {
    slot: Arc<Slot<B>>,
}

struct Slot<B> {
    done: AtomicBool,
    result: Mutex<Option<Result<B>>>,
    completed: Condvar,
}

impl<B> Work<B> {
    /// Waits until the operation has finished and returns its buffers.
    ///
    /// The wait ends within the group's deadline, since the operation does.
    ///
    /// # Errors
    ///
    /// The operation's error. Its buffers are lost then.
    pub fn wait(self) -> Result<B> {
        let mut result = lock(&self.slot.result);
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            result = self
                .slot
                .completed
                .wait(result)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.slot.done.load(Ordering::Acquire)
    }
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("done", &self.is_done())
            .finish()
    }
}

/// The side of a [`Work`] that completes it, exactly once: dropped without a
/// result, as by a panic of the operation, it completes with an error.
pub(crate) struct Completion<B> {
    slot: Option<Arc<Slot<B>>>,
}

/// A handle and the side that completes it.
pub(crate) fn work<B>() -> (Work<B>, Completion<B>) {
    let slot = Arc::new(Slot {
        done: AtomicBool::new(false),
        result: Mutex::new(None),
        completed: Condvar::new(),
    });
    let completion = Completion {
        slot: Some(Arc::clone(&slot)),
    };
    (Work { slot }, completion)
}

impl<B> Completion<B> {
    /// Completes the operation with `result`.
    pub(crate) fn complete(mut self, result: Result<B>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<B>) {
        if let Some(slot) = self.slot.take() {
            *lock(&slot.result) = Some(result);
            slot.done.store(true, Ordering::Release);
            slot.completed.notify_all();
        }
    }
}

impl<B> Drop for Completion<B> {
    fn drop(&mut self) {
        self.finish(Err(Error::usage(
            "an asynchronous operation was abandoned: the buffer given to it panicked in `as_ref` \
             or `as_mut`, or its group's thread had ended",
        )));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_another_thread_completes() {
        for _ in 0..200 {
            let (work, completion) = work();
            let waiter = std::thread::spawn(move || work.wait());
            completion.complete(Ok(5));
            assert_eq!(waiter.join().unwrap().unwrap(), 5);
        }
    }

    #[test]
    fn an_abandoned_operation_is_an_error_not_a_hang() {
        let (work, completion) = work::<Vec<f32>>();
        assert!(!work.is_done());
        drop(completion);
        assert!(work.is_done());
        assert!(work.wait().unwrap_err().to_string().contains("abandoned"));
    }
}
