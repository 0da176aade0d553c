//! Loads this rank's batches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn_core::data::dataset::{Dataset, DatasetError};
use burn_core::tensor::Device;

use crate::epoch::{Epoch, MaskedEpoch, Plan, Source};
use crate::worker_pool::WorkerPool;
use crate::{Remainder, Result, ShardedSampler};

/// Loads the batches of one rank, in worker threads ahead of the training step.
///
/// The order of batches depends on data set length, seed, epoch, batch size and
/// world size alone: never on the number of workers or their speed. Every rank
/// has the same number of batches, always.
///
/// It is a Burn [`DataLoader`] too: each call of [`iter`](DataLoader::iter)
/// is the next epoch, counted from
/// [`first_epoch`](ShardedDataLoaderBuilder::first_epoch).
///
/// Worker threads are started by the first epoch and kept for the next ones, until
/// the loader and all that came of it are dropped.
pub struct ShardedDataLoader<I, O> {
    source: Source<I, O>,
    sampler: ShardedSampler,
    workers: usize,
    prefetch: usize,
    pool: Arc<WorkerPool>,
    /// The samples of this rank that [`DataLoader::slice`] has left, `None` for
    /// all.
    window: Option<Range<usize>>,
    /// The epoch of the next [`DataLoader::iter`].
    next_epoch: AtomicUsize,
}

impl<I: 'static, O: Send + 'static> ShardedDataLoader<I, O> {
    /// Starts to build a loader of `dataset`, whose items `batcher` makes batches
    /// of.
    pub fn builder(
        dataset: impl Dataset<I> + 'static,
        batcher: impl Batcher<I, O> + 'static,
    ) -> ShardedDataLoaderBuilder<I, O> {
        ShardedDataLoaderBuilder {
            dataset: Arc::new(dataset),
            batcher: Arc::new(batcher),
            device: None,
            batch_size: 1,
            seed: None,
            shard: (0, 1),
            remainder: Remainder::default(),
            workers: 1,
            prefetch: 2,
            first_epoch: 0,
        }
    }

    /// The batches of an epoch.
    pub fn epoch(&self, epoch: usize) -> Epoch<I, O> {
        self.epoch_from(epoch, 0)
    }

    /// The batches of what is left of an epoch after `position` samples of all
    /// ranks together: what [`position_after`](ShardedSampler::position_after)
    /// returned in the run that is resumed, also at another world size.
    pub fn epoch_from(&self, epoch: usize, position: usize) -> Epoch<I, O> {
        Epoch(self.masked_epoch_from(epoch, position))
    }

    /// The batches of an epoch, with the number of samples in each that count.
    /// Under [`Remainder::Mask`], every sample of the data set counts once on one
    /// rank.
    pub fn masked_epoch(&self, epoch: usize) -> MaskedEpoch<I, O> {
        self.masked_epoch_from(epoch, 0)
    }

    fn masked_epoch_from(&self, epoch: usize, position: usize) -> MaskedEpoch<I, O> {
        let left = self.sampler.batches_from(position) * self.sampler.batch_size();
        let plan = Plan {
            sampler: self.sampler,
            epoch,
            position,
            items: self.window.clone().unwrap_or(0..left),
        };
        MaskedEpoch::start(&self.source, plan, &self.pool, self.workers, self.prefetch)
    }
}

impl<I, O> ShardedDataLoader<I, O> {
    /// Which samples this rank sees.
    pub fn sampler(&self) -> &ShardedSampler {
        &self.sampler
    }

    /// Number of batches of every rank in an epoch.
    pub fn num_batches(&self) -> usize {
        match &self.window {
            None => self.sampler.batches(),
            Some(window) => window.len().div_ceil(self.sampler.batch_size()),
        }
    }

    /// The same loader with another device or window.
    fn with(&self, device: &Device, window: Option<Range<usize>>) -> Self {
        let mut source = self.source.clone();
        source.device = device.clone();
        Self {
            source,
            sampler: self.sampler,
            workers: self.workers,
            prefetch: self.prefetch,
            pool: Arc::clone(&self.pool),
            window,
            next_epoch: AtomicUsize::new(self.next_epoch.load(Ordering::Relaxed)),
        }
    }
}

impl<I, O> std::fmt::Debug for ShardedDataLoader<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedDataLoader")
            .field("sampler", &self.sampler)
            .field("workers", &self.workers)
            .finish_non_exhaustive()
    }
}

/// Builds a [`ShardedDataLoader`].
pub struct ShardedDataLoaderBuilder<I, O> {
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<I, O>>,
    device: Option<Device>,
    batch_size: usize,
    seed: Option<u64>,
    shard: (usize, usize),
    remainder: Remainder,
    workers: usize,
    prefetch: usize,
    first_epoch: usize,
}

impl<I: 'static, O: Send + 'static> ShardedDataLoaderBuilder<I, O> {
    /// Number of samples in a batch of one rank; 1 unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Shuffles, in every epoch differently. The seed must be the same on every
    /// rank.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Which share of the data this rank has; all of it unless set.
    pub fn shard(mut self, rank: usize, world_size: usize) -> Self {
        self.shard = (rank, world_size);
        self
    }

    /// What happens when the samples don't fill every rank's last batch.
    pub fn remainder(mut self, remainder: Remainder) -> Self {
        self.remainder = remainder;
        self
    }

    /// The device that batches are made on; Burn's default device unless set.
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Number of threads that load ahead; 1 unless set, 0 to load in the calling
    /// thread.
    pub fn num_workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Number of batches that each worker may be ahead, at least 1; 2 unless set.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// The epoch of the first [`iter`](DataLoader::iter), for a `burn-train` run that
    /// goes on; 0 unless set.
    pub fn first_epoch(mut self, epoch: usize) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// Builds the loader.
    ///
    /// # Errors
    ///
    /// A usage error for an empty data set, a batch size or world size of zero, a
    /// rank that does not exist, or [`Remainder::Drop`] when nothing is left.
    pub fn build(self) -> Result<ShardedDataLoader<I, O>> {
        let (rank, world_size) = self.shard;
        let sampler = ShardedSampler::new(self.dataset.len(), self.batch_size, rank, world_size)?;
        let sampler = match self.seed {
            Some(seed) => sampler.shuffle(seed),
            None => sampler,
        };
        Ok(ShardedDataLoader {
            source: Source {
                dataset: self.dataset,
                batcher: self.batcher,
                device: self.device.unwrap_or_default(),
            },
            sampler: sampler.remainder(self.remainder)?,
            workers: self.workers,
            prefetch: self.prefetch,
            pool: Arc::default(),
            window: None,
            next_epoch: AtomicUsize::new(self.first_epoch),
        })
    }
}

impl<I, O> std::fmt::Debug for ShardedDataLoaderBuilder<I, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedDataLoaderBuilder")
            .field("batch_size", &self.batch_size)
            .field("shard", &self.shard)
            .finish_non_exhaustive()
    }
}

/// A loader's epoch as Burn's trait has it.
struct BurnEpoch<I, O> {
    epoch: Epoch<I, O>,
    batch_size: usize,
    items: usize,
}

impl<I, O> Iterator for BurnEpoch<I, O> {
    type Item = std::result::Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.epoch.next().map(|b| b.map_err(DatasetError::new))
    }
}

impl<I, O> DataLoaderIterator<O> for BurnEpoch<I, O> {
    fn progress(&self) -> Progress {
        let items = self
            .items
            .min(self.epoch.0.batches_taken() * self.batch_size);
        Progress::new(items, self.items, Some("items".to_owned()))
    }
}

impl<I: 'static, O: Send + 'static> DataLoader<O> for ShardedDataLoader<I, O> {
    /// The next epoch.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(BurnEpoch {
            epoch: self.epoch(self.next_epoch.fetch_add(1, Ordering::Relaxed)),
            batch_size: self.sampler.batch_size(),
            items: self.num_items(),
        })
    }

    /// Number of samples of this rank in an epoch, padding included.
    fn num_items(&self) -> usize {
        match &self.window {
            None => self.sampler.batches() * self.sampler.batch_size(),
            Some(window) => window.len(),
        }
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.with(device, self.window.clone()))
    }

    /// Samples `start..end` of this rank's share, cut off at its end.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let items = self.num_items();
        let offset = self.window.as_ref().map_or(0, |window| window.start);
        let end = end.min(items);
        let window = offset + start.min(end)..offset + end;
        Arc::new(self.with(&self.source.device, Some(window)))
    }
}
