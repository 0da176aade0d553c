//! The loader: order, errors, threads, and Burn's own trait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use burn_core::data::dataloader::DataLoader;
use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn_core::tensor::Device;
use burn_ddp_data::{Error, Remainder, ShardedDataLoader, ShardedDataLoaderBuilder};

/// A batch is the list of its items.
struct Keep;

impl Batcher<usize, Vec<usize>> for Keep {
    fn batch(&self, items: Vec<usize>, _device: &Device) -> Vec<usize> {
        items
    }
}

fn builder(len: usize) -> ShardedDataLoaderBuilder<usize, Vec<usize>> {
    ShardedDataLoader::builder(InMemDataset::new((0..len).collect()), Keep)
}

fn all(loader: &ShardedDataLoader<usize, Vec<usize>>, epoch: usize) -> Vec<Vec<usize>> {
    let batches: Result<Vec<_>, _> = loader.epoch(epoch).collect();
    batches.expect("an in-memory data set does not fail")
}

/// Tests that count this process's threads must not overlap with others.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn loader_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("loader-"))
        .count()
}

#[test]
fn the_order_does_not_depend_on_the_number_of_workers() {
    let _alone = alone();
    let load = |workers| {
        let loader = builder(103)
            .batch_size(4)
            .shuffle(9)
            .shard(1, 3)
            .num_workers(workers)
            .build()
            .expect("valid");
        all(&loader, 2)
    };
    let reference = load(0);
    assert_eq!(reference.len(), 9);
    for workers in [1, 2, 3, 20] {
        assert_eq!(load(workers), reference, "{workers} workers");
    }
    assert_eq!(loader_threads(), 0);
}

#[test]
fn every_sample_is_counted_once_over_all_ranks() {
    let _alone = alone();
    let mut counted = Vec::new();
    let mut batches = Vec::new();
    for rank in 0..3 {
        let loader = builder(20)
            .batch_size(4)
            .shard(rank, 3)
            .remainder(Remainder::Mask)
            .build()
            .expect("valid");
        for batch in loader.masked_epoch(0) {
            let batch = batch.expect("an in-memory data set does not fail");
            assert_eq!(batch.batch.len(), 4, "padded to the full size");
            counted.extend_from_slice(&batch.batch[..batch.valid]);
        }
        batches.push(loader.num_batches());
    }
    counted.sort_unstable();
    assert!(counted.into_iter().eq(0..20));
    assert_eq!(batches, [2; 3], "equally many on every rank");
}

#[test]
fn an_epoch_resumes_where_it_was_left() {
    let _alone = alone();
    let loader = |rank, world_size| {
        builder(50)
            .batch_size(3)
            .shuffle(1)
            .shard(rank, world_size)
            .remainder(Remainder::Mask)
            .build()
            .expect("valid")
    };
    let whole = all(&loader(0, 2), 5);
    let position = loader(0, 2).sampler().position_after(0, 4);
    assert_eq!(position, 24);
    let rest: Result<Vec<_>, _> = loader(0, 2).epoch_from(5, position).collect();
    assert_eq!(rest.expect("loads"), whole[4..]);
}

/// Fails at one index, by error or by panic.
struct Fragile {
    at: usize,
    panics: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("sector {0} is unreadable")]
struct Unreadable(usize);

impl Dataset<usize> for Fragile {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        match (index == self.at, self.panics) {
            (false, _) => Ok(index),
            (true, false) => Err(DatasetError::new(Unreadable(index))),
            (true, true) => panic!("index {index} is cursed"),
        }
    }

    fn len(&self) -> usize {
        40
    }
}

#[test]
fn errors_and_panics_arrive_in_order_and_end_the_epoch() {
    let _alone = alone();
    for workers in [0, 1, 3] {
        for panics in [false, true] {
            let loader = ShardedDataLoader::builder(Fragile { at: 13, panics }, Keep)
                .batch_size(2)
                .num_workers(workers)
                .build()
                .expect("valid");
            let mut epoch = loader.epoch(4);
            for batch in 0..6 {
                let loaded = epoch.next().expect("six good batches");
                assert_eq!(loaded.expect("good")[0], 2 * batch);
            }
            let error = epoch.next().expect("one bad batch").expect_err("bad");
            let text = error.to_string();
            assert!(text.contains("batch 6 of epoch 4"), "{text}");
            match (&error, panics) {
                (Error::Dataset { .. }, false) => assert!(text.contains("sector 13"), "{text}"),
                (Error::Panic { .. }, true) => assert!(text.contains("is cursed"), "{text}"),
                _ => panic!("{error:?}"),
            }
            assert!(epoch.next().is_none(), "nothing after an error");
            drop(epoch);
            assert_eq!(loader_threads(), 0);
            // Burn's trait has the data set's error type for both.
            let burn: Vec<_> = DataLoader::iter(&loader).collect();
            assert!(burn[6].is_err());
        }
    }
}

/// Counts what is loaded, slowly.
struct Slow(Arc<AtomicUsize>);

impl Dataset<usize> for Slow {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
        Ok(index)
    }

    fn len(&self) -> usize {
        1_000_000
    }
}

#[test]
fn an_epoch_that_is_left_early_stops_its_workers() {
    let _alone = alone();
    let loaded = Arc::new(AtomicUsize::new(0));
    let loader = ShardedDataLoader::builder(Slow(Arc::clone(&loaded)), Keep)
        .num_workers(3)
        .prefetch(4)
        .build()
        .expect("valid");
    let mut epoch = loader.epoch(0);
    assert!(epoch.next().is_some_and(|batch| batch.is_ok()));
    assert!(loader_threads() > 0, "they load ahead");
    drop(epoch);
    assert_eq!(loader_threads(), 0);
    // One batch taken; each worker holds at most four, one to hand over, and one
    // that it was loading.
    assert!(loaded.load(Ordering::SeqCst) <= 1 + 3 * 6);
}

#[test]
fn it_is_a_burn_data_loader() {
    let _alone = alone();
    let loader = builder(20).batch_size(4).shuffle(2).shard(0, 2).build();
    let loader = loader.expect("valid");
    assert_eq!(loader.num_items(), 12, "three batches of four");
    let of = |loader: &dyn DataLoader<Vec<usize>>| -> Vec<Vec<usize>> {
        loader.iter().map(|batch| batch.expect("loads")).collect()
    };
    let first = of(&loader);
    assert_eq!(first, all(&loader, 0));
    assert_eq!(of(&loader), all(&loader, 1), "the next epoch");

    let mut iterator = DataLoader::iter(&loader);
    assert_eq!(iterator.progress().items_processed, 0);
    let _ = iterator.next();
    let progress = iterator.progress();
    assert_eq!((progress.items_processed, progress.items_total), (4, 12));
    drop(iterator);

    let fresh = builder(20).batch_size(4).shuffle(2).shard(0, 2).build();
    let slice = fresh.expect("valid").slice(3, 9);
    assert_eq!(slice.num_items(), 6);
    let sliced = of(slice.as_ref());
    assert_eq!(sliced.concat(), first.concat()[3..9]);
    assert_eq!(sliced[0].len(), 4);
    let moved = slice.slice(1, 100).to_device(&Device::default());
    assert_eq!(moved.num_items(), 5);
}

#[test]
fn bad_configurations_are_refused() {
    let text = |builder: ShardedDataLoaderBuilder<usize, Vec<usize>>| {
        builder.build().expect_err("invalid").to_string()
    };
    assert!(text(builder(0)).contains("empty"));
    assert!(text(builder(4).batch_size(0)).contains("batch size is 0"));
    assert!(text(builder(4).shard(0, 0)).contains("world size is 0"));
    assert!(text(builder(4).shard(5, 5)).contains("rank 5"));
    let dropped = builder(4).batch_size(3).shard(0, 2);
    assert!(text(dropped.remainder(Remainder::Drop)).contains("4 samples"));
}
