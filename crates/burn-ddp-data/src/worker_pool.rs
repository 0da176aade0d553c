//! The threads that load batches.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that are kept from epoch to epoch, started when they are first needed,
/// and joined when the pool is dropped.
///
/// They are kept because CubeCL gives every thread a stream with a memory pool of
/// its own, and takes neither back when the thread ends: new threads in every
/// epoch use up the device's memory.
#[derive(Debug, Default)]
pub(crate) struct WorkerPool {
    idle: Mutex<Vec<Worker>>,
}

#[derive(Debug)]
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let (jobs, queue) = channel();
        let thread = thread::Builder::new()
            .name("batch-loader".to_owned())
            .spawn(move || run(&queue))?;
        Ok(Self { jobs, thread })
    }
}

fn run(queue: &Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        // A job reports its panics itself; one that can't leaves a closed channel
        // to its iterator, and the thread is still good for the next job.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

impl WorkerPool {
    /// Lends `count` threads, those that are idle first.
    ///
    /// # Errors
    ///
    /// When the system starts no more threads.
    pub(crate) fn lease(self: &Arc<Self>, count: usize) -> io::Result<Lease> {
        let mut lease = Lease {
            workers: Vec::with_capacity(count),
            pool: Arc::clone(self),
        };
        {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = idle.len().saturating_sub(count);
            lease.workers.extend(idle.drain(kept..));
        }
        while lease.workers.len() < count {
            lease.workers.push(Worker::start()?);
        }
        Ok(lease)
    }
}

/// Tells all threads to end, then waits for them.
impl Drop for WorkerPool {
    fn drop(&mut self) {
        let workers = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        let threads: Vec<_> = workers.drain(..).map(|worker| worker.thread).collect();
        for thread in threads {
            // Panics are caught inside it.
            let _ = thread.join();
        }
    }
}

/// Threads on loan; they go back to the pool when it is dropped, after the jobs
/// that they have.
#[derive(Debug)]
pub(crate) struct Lease {
    workers: Vec<Worker>,
    pool: Arc<WorkerPool>,
}

impl Lease {
    /// Has thread number `worker` do `job` after what it was given before.
    pub(crate) fn run(&self, worker: usize, job: impl FnOnce() + Send + 'static) {
        // Threads end with the pool only, so one takes every job.
        let _ = self.workers[worker].jobs.send(Box::new(job));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut idle = self
            .pool
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        idle.append(&mut self.workers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::ThreadId;

    fn ids(lease: &Lease) -> Vec<ThreadId> {
        let count = lease.workers.len();
        let mut ids: Vec<ThreadId> = (0..count)
            .map(|worker| {
                let (sender, receiver) = channel();
                lease.run(worker, move || {
                    let _ = sender.send(thread::current().id());
                });
                receiver.recv().expect("the job runs")
            })
            .collect();
        ids.sort_by_key(|id| format!("{id:?}"));
        ids
    }

    #[test]
    fn threads_are_used_again() {
        let pool = Arc::new(WorkerPool::default());
        let first = ids(&pool.lease(3).expect("starts"));
        assert_eq!(ids(&pool.lease(3).expect("starts")), first);
        let fewer = pool.lease(2).expect("starts");
        let both = (ids(&fewer), ids(&pool.lease(1).expect("starts")));
        assert!(both.0.iter().chain(&both.1).all(|id| first.contains(id)));
        assert!(!both.0.contains(&both.1[0]), "one loan at a time");
    }

    #[test]
    fn a_panicking_job_does_not_cost_the_thread() {
        let pool = Arc::new(WorkerPool::default());
        let lease = pool.lease(1).expect("starts");
        let before = ids(&lease);
        lease.run(0, || panic!("expected by this test"));
        assert_eq!(ids(&lease), before);
    }

    /// The lease outlives the loader's own handle: the last of them joins.
    #[test]
    fn the_last_handle_ends_the_threads() {
        let pool = Arc::new(WorkerPool::default());
        let lease = pool.lease(2).expect("starts");
        drop(pool);
        let (sender, receiver) = channel::<()>();
        for worker in 0..2 {
            let sender = sender.clone();
            lease.run(worker, move || {
                // Kept until the thread ends.
                thread_local!(static HELD: std::cell::RefCell<Option<Sender<()>>> =
                    const { std::cell::RefCell::new(None) });
                HELD.with(|held| *held.borrow_mut() = Some(sender));
            });
        }
        drop(sender);
        drop(lease);
        assert!(
            receiver
                .try_recv()
                .is_err_and(|error| { error == std::sync::mpsc::TryRecvError::Disconnected })
        );
    }
}
