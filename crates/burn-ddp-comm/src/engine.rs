//! The order of a group's operations: one at a time, first come first served.
//!
//! An asynchronous operation is run by the group's communication thread, a
//! blocking one by its caller when its turn comes, so that it pays for no
//! hand-over.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::communicator::Communicator;
use crate::{Error, Result};

/// An operation to run on the communicator.
type Job = Box<dyn FnOnce(&mut Communicator) + Send>;

/// Runs operations on a [`Communicator`] in the order in which they were given.
pub(crate) struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when the turn passes on or a job or the end arrives.
    changed: Condvar,
    communicator: Mutex<Communicator>,
}

#[derive(Default)]
struct Queue {
    next_ticket: u64,
    /// The ticket whose operation runs or may start.
    turn: u64,
    jobs: VecDeque<(u64, Job)>,
    sleepers: usize,
    thread: Option<JoinHandle<()>>,
    closing: bool,
    thread_ended: bool,
}

impl Engine {
    pub(crate) fn new(communicator: Communicator) -> Self {
        Self {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                changed: Condvar::new(),
                communicator: Mutex::new(communicator),
            }),
        }
    }

    /// Runs `operation` in the calling thread once all earlier ones are done.
    pub(crate) fn run<R>(&self, operation: impl FnOnce(&mut Communicator) -> R) -> R {
        let mut queue = self.shared.lock();
        let ticket = queue.take_ticket();
        while queue.turn != ticket {
            queue = self.shared.sleep(queue);
        }
        drop(queue);
        let _turn = Turn(&self.shared);
        operation(&mut self.shared.communicator())
    }

    /// Queues `job` for the communication thread, which starts with the first.
    ///
    /// # Errors
    ///
    /// Environment: the thread could not be started.
    pub(crate) fn submit(&self, name: String, job: Job) -> Result<()> {
        let mut queue = self.shared.lock();
        if queue.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new()
                .name(name)
                .spawn(move || shared.serve())
                .map_err(|error| {
                    Error::environment_from("could not start a communication thread", error)
                })?;
            queue.thread = Some(thread);
        }
        let ticket = queue.take_ticket();
        queue.jobs.push_back((ticket, job));
        self.shared.wake(&queue);
        Ok(())
    }

    /// Lets the queued operations finish and ends the communication thread,
    /// within `limit`; says whether that succeeded.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut queue = self.shared.lock();
        queue.closing = true;
        self.shared.changed.notify_all();
        let Some(thread) = &queue.thread else {
            return true;
        };
        // The last handle was dropped by a job, which can't wait for itself.
        if thread.thread().id() == std::thread::current().id() {
            return true;
        }
        while !queue.thread_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue = self
                .shared
                .changed
                .wait_timeout(queue, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let thread = queue.thread.take();
        drop(queue);
        if let Some(thread) = thread {
            // A panic in a job was caught, and its operation has the error.
            let _ = thread.join();
        }
        true
    }
}

impl Shared {
    /// The communication thread: runs jobs when their turn comes, until closed
    /// and empty.
    fn serve(&self) {
        let mut queue = self.lock();
        loop {
            let turn = queue.turn;
            match queue.jobs.front() {
                Some((ticket, _)) if *ticket == turn => {}
                None if queue.closing => break,
                _ => {
                    queue = self.sleep(queue);
                    continue;
                }
            }
            let Some((_, job)) = queue.jobs.pop_front() else {
                continue;
            };
            drop(queue);
            {
                let _turn = Turn(self);
                let mut communicator = self.communicator();
                communicator.set_background(true);
                // A buffer's `as_mut` is the caller's code and may panic: that
                // completes the operation's handle with an error, and the
                // thread lives on for the others.
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(&mut communicator))) {
                    communicator.fail(Error::usage(format!(
                        "the buffer of an asynchronous operation panicked: {}",
                        panic_text(&*panic)
                    )));
                }
                communicator.set_background(false);
            }
            queue = self.lock();
        }
        queue.thread_ended = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn communicator(&self) -> MutexGuard<'_, Communicator> {
        self.communicator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'a>(&self, mut queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        queue.sleepers += 1;
        let mut queue = self
            .changed
            .wait(queue)
            .unwrap_or_else(PoisonError::into_inner);
        queue.sleepers -= 1;
        queue
    }

    fn wake(&self, queue: &Queue) {
        if queue.sleepers > 0 || queue.closing {
            self.changed.notify_all();
        }
    }
}

impl Queue {
    fn take_ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }
}

/// Passes the turn on when dropped, also by a panic.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.turn += 1;
        self.0.wake(&queue);
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
