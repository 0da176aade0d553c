//! The batches of one epoch, loaded ahead by worker threads.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataset::Dataset;
use burn_core::tensor::Device;

use crate::{Error, Result, Sample};

/// A batch in which repeated samples are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskedBatch<O> {
    /// What the batcher made of the samples.
    pub batch: O,
    /// How many of its samples count: the first `valid` of them do, and the
    /// others are padding. May be 0.
    pub valid: usize,
}

/// Where items come from, and what becomes of them.
pub(crate) struct Source<I, O> {
    pub(crate) dataset: Arc<dyn Dataset<I>>,
    pub(crate) batcher: Arc<dyn Batcher<I, O>>,
    pub(crate) device: Device,
}

impl<I, O> Clone for Source<I, O> {
    fn clone(&self) -> Self {
        Self {
            dataset: Arc::clone(&self.dataset),
            batcher: Arc::clone(&self.batcher),
            device: self.device.clone(),
        }
    }
}

impl<I, O> Source<I, O> {
    /// Loads a batch. A panic of the data set or the batcher is an error.
    fn load(&self, epoch: usize, batch: usize, samples: &[Sample]) -> Result<MaskedBatch<O>> {
        let indices = samples.iter().map(|sample| sample.index).collect();
        // Nothing of this crate is left half-changed by a panic; a data set or
        // batcher that is must expect to be called again anyway.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let items = self.dataset.get_many(indices)?;
            Ok(self.batcher.batch(items, &self.device))
        }));
        match loaded {
            Ok(Ok(loaded)) => Ok(MaskedBatch {
                batch: loaded,
                valid: samples.iter().filter(|sample| sample.counts).count(),
            }),
            Ok(Err(source)) => Err(Error::Dataset {
                epoch,
                batch,
                source,
            }),
            Err(panic) => Err(Error::Panic {
                epoch,
                batch,
                message: panic_message(panic.as_ref()),
            }),
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    text.map_or_else(
        || "the data set or the batcher panicked".to_owned(),
        |text| format!("the data set or the batcher panicked: {text}"),
    )
}

/// The samples of each batch, by number.
pub(crate) type Plan = Arc<dyn Fn(usize) -> Vec<Sample> + Send + Sync>;

/// The batches of an epoch, in order, whatever the number of workers. Ends after
/// the first error.
pub struct MaskedEpoch<I, O> {
    epoch: usize,
    batches: usize,
    next: usize,
    loading: Loading<I, O>,
}

enum Loading<I, O> {
    /// In the calling thread.
    Here { source: Source<I, O>, plan: Plan },
    /// Worker `w` of `n` loads batches `w`, `w + n`, `w + 2n`, …
    Workers(Vec<Worker<O>>),
    /// After an error.
    Ended,
}

struct Worker<O> {
    /// `None` once the worker is told to stop.
    batches: Option<Receiver<Result<MaskedBatch<O>>>>,
    thread: Option<JoinHandle<()>>,
}

impl<I: 'static, O: Send + 'static> MaskedEpoch<I, O> {
    /// Starts loading; each of `workers` threads is `prefetch` batches ahead at
    /// most.
    pub(crate) fn start(
        source: &Source<I, O>,
        plan: Plan,
        epoch: usize,
        batches: usize,
        workers: usize,
        prefetch: usize,
    ) -> Self {
        let workers = workers.min(batches);
        let loading = if workers == 0 {
            Loading::Here {
                source: source.clone(),
                plan,
            }
        } else {
            let start = |worker| {
                let (sender, receiver) = sync_channel(prefetch.max(1));
                let (source, plan) = (source.clone(), Arc::clone(&plan));
                let numbers = (worker..batches).step_by(workers);
                let run = move || work(&source, &plan, epoch, numbers, &sender);
                let thread = thread::Builder::new().name(format!("loader-{worker}"));
                // Without the thread the channel is closed, which the iterator
                // reports.
                Worker {
                    batches: Some(receiver),
                    thread: thread.spawn(run).ok(),
                }
            };
            Loading::Workers((0..workers).map(start).collect())
        };
        Self {
            epoch,
            batches,
            next: 0,
            loading,
        }
    }
}

fn work<I, O>(
    source: &Source<I, O>,
    plan: &Plan,
    epoch: usize,
    numbers: impl Iterator<Item = usize>,
    sender: &SyncSender<Result<MaskedBatch<O>>>,
) {
    for number in numbers {
        let loaded = source.load(epoch, number, &plan(number));
        let failed = loaded.is_err();
        // Nobody wants it any more, or nobody wants what comes after it.
        if sender.send(loaded).is_err() || failed {
            return;
        }
    }
}

impl<I, O> MaskedEpoch<I, O> {
    /// Number of batches that are still to come.
    pub fn batches_left(&self) -> usize {
        match self.loading {
            Loading::Ended => 0,
            _ => self.batches - self.next,
        }
    }
}

impl<I, O> Iterator for MaskedEpoch<I, O> {
    type Item = Result<MaskedBatch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.batches {
            return None;
        }
        let (epoch, number) = (self.epoch, self.next);
        let loaded = match &self.loading {
            Loading::Ended => return None,
            Loading::Here { source, plan } => source.load(epoch, number, &plan(number)),
            Loading::Workers(workers) => {
                let worker = &workers[number % workers.len()];
                let received = worker.batches.as_ref().map(Receiver::recv);
                received.and_then(std::result::Result::ok).unwrap_or_else(|| {
                    Err(Error::Panic {
                        epoch,
                        batch: number,
                        message: "its worker thread could not be started".to_owned(),
                    })
                })
            }
        };
        self.next += 1;
        if loaded.is_err() {
            self.loading = Loading::Ended;
        }
        Some(loaded)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.batches_left().min(1), Some(self.batches_left()))
    }
}

/// Stops the workers; waits for what they are loading, so that no thread is left.
impl<O> Drop for Worker<O> {
    fn drop(&mut self) {
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // Its panics are caught where they happen.
            let _ = thread.join();
        }
    }
}

impl<I, O> Drop for MaskedEpoch<I, O> {
    fn drop(&mut self) {
        // All are told to stop before any is waited for.
        if let Loading::Workers(workers) = &mut self.loading {
            for worker in workers {
                worker.batches = None;
            }
        }
    }
}

impl<I, O> std::fmt::Debug for MaskedEpoch<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MaskedEpoch")
            .field("epoch", &self.epoch)
            .field("batches_left", &self.batches_left())
            .finish_non_exhaustive()
    }
}

/// The batches of an epoch without marks; see [`MaskedEpoch`].
#[derive(Debug)]
pub struct Epoch<I, O>(pub(crate) MaskedEpoch<I, O>);

impl<I, O> Epoch<I, O> {
    /// Number of batches that are still to come.
    pub fn batches_left(&self) -> usize {
        self.0.batches_left()
    }
}

impl<I, O> Iterator for Epoch<I, O> {
    type Item = Result<O>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(|batch| batch.map(|batch| batch.batch))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}
