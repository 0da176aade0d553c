//! The batches of one epoch, loaded ahead by worker threads.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataset::Dataset;
use burn_core::tensor::Device;

use crate::worker_pool::{Lease, WorkerPool};
use crate::{Error, Result, Sample, ShardedSampler};

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
        let indices: Vec<usize> = samples.iter().map(|sample| sample.index).collect();
        let asked = indices.len();
        // Nothing of this crate is left half-changed by a panic; a data set or
        // batcher that is must expect to be called again anyway.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let items = self
                .dataset
                .get_many(indices)
                .map_err(|source| Error::Dataset {
                    epoch,
                    batch,
                    source,
                })?;
            let returned = items.len();
            if returned != asked {
                return Err(Error::Count {
                    epoch,
                    batch,
                    asked,
                    returned,
                });
            }
            Ok(self.batcher.batch(items, &self.device))
        }));
        match loaded {
            Ok(loaded) => loaded.map(|loaded| MaskedBatch {
                batch: loaded,
                valid: samples.iter().filter(|sample| sample.counts).count(),
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

/// Which samples to load.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) sampler: ShardedSampler,
    pub(crate) epoch: usize,
    /// What all ranks together have seen of the epoch.
    pub(crate) position: usize,
    /// Numbers of this rank's samples, counted from there.
    pub(crate) items: Range<usize>,
}

impl Plan {
    fn batches(&self) -> usize {
        self.items.len().div_ceil(self.sampler.batch_size())
    }

    fn samples(&self, batch: usize) -> Vec<Sample> {
        let start = self.items.start + batch * self.sampler.batch_size();
        let end = self.items.end.min(start + self.sampler.batch_size());
        self.sampler.samples(self.epoch, self.position, start..end)
    }
}

/// The batches of an epoch, in order, whatever the number of workers. Ends after
/// the first error.
///
/// Dropping it stops the workers after the batch that each is loading, without
/// waiting for them.
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
    Workers {
        batches: Vec<Receiver<Result<MaskedBatch<O>>>>,
        /// Dropped after the channels, so that no worker still waits to send.
        _lease: Lease,
    },
    /// The workers couldn't be started.
    Failed(Error),
    /// After the last batch, or an error.
    Ended,
}

impl<I: 'static, O: Send + 'static> MaskedEpoch<I, O> {
    /// Starts loading; each of `workers` threads is `prefetch` batches ahead at
    /// most, and at least one.
    pub(crate) fn start(
        source: &Source<I, O>,
        plan: Plan,
        pool: &Arc<WorkerPool>,
        workers: usize,
        prefetch: usize,
    ) -> Self {
        let (epoch, batches) = (plan.epoch, plan.batches());
        let workers = workers.min(batches);
        let loading = if workers == 0 {
            let source = source.clone();
            Loading::Here { source, plan }
        } else {
            match pool.lease(workers) {
                Ok(lease) => start_workers(source, &plan, lease, workers, prefetch.max(1)),
                Err(source) => Loading::Failed(Error::Threads { workers, source }),
            }
        };
        Self {
            epoch,
            batches,
            next: 0,
            loading,
        }
    }
}

fn start_workers<I: 'static, O: Send + 'static>(
    source: &Source<I, O>,
    plan: &Plan,
    lease: Lease,
    workers: usize,
    prefetch: usize,
) -> Loading<I, O> {
    let start = |worker| {
        let (sender, receiver) = sync_channel(prefetch);
        let (source, plan) = (source.clone(), plan.clone());
        lease.run(worker, move || {
            let numbers = (worker..plan.batches()).step_by(workers);
            load_all(&source, &plan, numbers, &sender);
        });
        receiver
    };
    Loading::Workers {
        batches: (0..workers).map(start).collect(),
        _lease: lease,
    }
}

fn load_all<I, O>(
    source: &Source<I, O>,
    plan: &Plan,
    numbers: impl Iterator<Item = usize>,
    sender: &SyncSender<Result<MaskedBatch<O>>>,
) {
    for number in numbers {
        let loaded = source.load(plan.epoch, number, &plan.samples(number));
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

    /// Number of batches that have been taken.
    pub(crate) fn batches_taken(&self) -> usize {
        self.next
    }
}

impl<I, O> Iterator for MaskedEpoch<I, O> {
    type Item = Result<MaskedBatch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.batches_left() == 0 {
            return None;
        }
        let (epoch, batch) = (self.epoch, self.next);
        let loaded = match &self.loading {
            Loading::Here { source, plan } => source.load(epoch, batch, &plan.samples(batch)),
            Loading::Workers { batches, .. } => {
                let received = batches[batch % batches.len()].recv();
                received.unwrap_or_else(|_| {
                    let message = "its worker ended without an answer".to_owned();
                    Err(Error::Panic {
                        epoch,
                        batch,
                        message,
                    })
                })
            }
            Loading::Failed(_) | Loading::Ended => return self.fail(),
        };
        if loaded.is_ok() {
            self.next += 1;
        }
        if loaded.is_err() || self.next == self.batches {
            // Gives the workers back.
            self.loading = Loading::Ended;
        }
        Some(loaded)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.batches_left().min(1), Some(self.batches_left()))
    }
}

impl<I, O> MaskedEpoch<I, O> {
    /// The error of workers that couldn't be started, once.
    fn fail(&mut self) -> Option<Result<MaskedBatch<O>>> {
        match std::mem::replace(&mut self.loading, Loading::Ended) {
            Loading::Failed(error) => Some(Err(error)),
            _ => None,
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
