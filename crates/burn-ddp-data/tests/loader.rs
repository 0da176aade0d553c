//! The loader: order, errors, threads, and Burn's own trait.

use std::collections::HashSet;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use burn_core::data::dataloader::DataLoader;
use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn_core::tensor::Device;
use burn_ddp_data::{Error, Remainder, ShardedDataLoader, ShardedDataLoaderBuilder};
use proptest::prelude::*;

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
        .filter(|name| name.starts_with("batch-loader"))
        .count()
}

/// Waits for that number of loader threads: one that has been joined may be listed
/// a moment longer, and one that has just started has no name yet.
#[track_caller]
fn assert_loader_threads(expected: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while loader_threads() != expected {
        let now = loader_threads();
        assert!(
            Instant::now() < deadline,
            "{now} loader threads, not {expected}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
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
    assert_loader_threads(0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every rank has equally many full batches, whatever loads them, and those of
    /// all ranks together are the epoch's order.
    #[test]
    fn ranks_share_one_order(
        len in 1usize..200, b in 1usize..9, world in 1usize..5, epoch in 0usize..9,
        workers in 0usize..4, prefetch in 0usize..3, seed: u64,
    ) {
        let _alone = alone();
        let loader = |b, rank, world| {
            builder(len)
                .batch_size(b)
                .shuffle(seed)
                .shard(rank, world)
                .num_workers(workers)
                .prefetch(prefetch)
                .build()
                .expect("valid")
        };
        let ranks: Vec<_> = (0..world).map(|rank| all(&loader(b, rank, world), epoch)).collect();
        let steps = len.div_ceil(b * world);
        for batches in &ranks {
            prop_assert_eq!(batches.len(), steps);
            prop_assert!(batches.iter().all(|batch| batch.len() == b));
        }
        let together: Vec<usize> = (0..steps)
            .flat_map(|step| ranks.iter().flat_map(move |batches| batches[step].clone()))
            .collect();
        let one = all(&loader(b * world, 0, 1), epoch).concat();
        prop_assert_eq!(together, one, "the same as of one rank with the global batch");
    }
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
            // Kept for the next epoch.
            assert_loader_threads(workers);
            assert!(loader.epoch(5).next().expect("one batch").is_ok());
            // Burn's trait has the data set's error type for both.
            let mut burn = DataLoader::iter(&loader);
            assert!(burn.by_ref().take(6).all(|batch| batch.is_ok()));
            assert!(burn.next().expect("one bad batch").is_err());
            assert!(burn.next().is_none());
            assert_eq!(burn.progress().items_processed, 12);
            drop(burn);
            drop(loader);
            assert_loader_threads(0);
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
    drop(loader);
    assert_loader_threads(0);
    // One batch taken; each worker holds at most four, one to hand over, and one
    // that it was loading.
    assert!(loaded.load(Ordering::SeqCst) <= 1 + 3 * 6);
}

/// A thread per worker, whatever the number of epochs: a device keeps a memory pool
/// for every thread that ever used it.
#[test]
fn epochs_use_the_same_threads() {
    /// Notes where it runs.
    struct Where(Arc<Mutex<HashSet<ThreadId>>>);
    impl Batcher<usize, ()> for Where {
        fn batch(&self, _items: Vec<usize>, _device: &Device) {
            let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            seen.insert(std::thread::current().id());
        }
    }
    let _alone = alone();
    let seen = Arc::default();
    let data = InMemDataset::new((0..40).collect());
    let loader = ShardedDataLoader::builder(data, Where(Arc::clone(&seen)))
        .num_workers(2)
        .build()
        .expect("valid");
    for epoch in 0..5 {
        assert_eq!(loader.epoch(epoch).count(), 40);
        // Left early, and through Burn's trait.
        assert!(
            loader
                .epoch(epoch)
                .next()
                .is_some_and(|batch| batch.is_ok())
        );
        let moved = loader.to_device(&Device::default());
        assert_eq!(moved.iter().count(), 40);
        assert_eq!(moved.slice(3, 9).iter().count(), 6);
        assert_loader_threads(2);
    }
    drop(loader);
    assert_loader_threads(0);
    assert_eq!(seen.lock().expect("not poisoned").len(), 2);
}

#[test]
fn epochs_can_be_taken_side_by_side() {
    let _alone = alone();
    let loader = builder(200).batch_size(2).shuffle(1).num_workers(2);
    let loader = loader.build().expect("valid");
    let (mut first, mut second) = (loader.epoch(0), loader.epoch(1));
    let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
    while let (Some(a), Some(b)) = (first.next(), second.next()) {
        of_first.push(a.expect("loads"));
        of_second.push(b.expect("loads"));
    }
    assert_loader_threads(4);
    assert_eq!(of_first, all(&loader, 0));
    assert_eq!(of_second, all(&loader, 1));
    // An iterator may outlive its loader.
    let late = loader.epoch(0);
    drop(loader);
    assert_eq!(
        late.map(|batch| batch.expect("loads")).collect::<Vec<_>>(),
        of_first
    );
    drop((first, second));
    assert_loader_threads(0);
}

/// Says that it has forty items, and returns one too few for the last of them.
struct Forgetful;

impl Dataset<usize> for Forgetful {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        Ok(index)
    }

    fn get_many(&self, indices: Vec<usize>) -> Result<Vec<usize>, DatasetError> {
        Ok(indices.into_iter().filter(|&index| index != 39).collect())
    }

    fn len(&self) -> usize {
        40
    }
}

#[test]
fn a_short_answer_of_the_data_set_is_an_error() {
    let _alone = alone();
    let loader = ShardedDataLoader::builder(Forgetful, Keep).batch_size(8);
    let error = loader.build().expect("valid").epoch(0).last();
    let text = error.expect("five batches").expect_err("short").to_string();
    assert!(text.contains("batch 4 of epoch 0"), "{text}");
    assert!(text.contains("7 items for 8 indices"), "{text}");
}

/// A panic whose payload panics once more where it is dropped, which the worker
/// can't report.
#[test]
fn a_worker_that_can_not_answer_is_an_error() {
    struct Nasty;
    impl Drop for Nasty {
        fn drop(&mut self) {
            panic!("expected by this test");
        }
    }
    struct Throws;
    impl Batcher<usize, ()> for Throws {
        fn batch(&self, _items: Vec<usize>, _device: &Device) {
            std::panic::panic_any(Nasty);
        }
    }
    let _alone = alone();
    let data = InMemDataset::new((0..4).collect());
    let loader = ShardedDataLoader::builder(data, Throws)
        .build()
        .expect("valid");
    let error = loader.epoch(0).next().expect("one batch").expect_err("bad");
    assert!(error.to_string().contains("without an answer"), "{error}");
    drop(loader);
    assert_loader_threads(0);
}

/// In a process of its own, whose threads would have stacks larger than memory.
#[test]
fn threads_that_can_not_be_started_are_an_error() {
    const CHILD: &str = "BURN_DDP_DATA_TEST_WITHOUT_THREADS";
    if std::env::var_os(CHILD).is_some() {
        let loader = |workers| builder(4).num_workers(workers).build().expect("valid");
        let with = loader(3);
        let mut epoch = with.epoch(0);
        let error = epoch.next().expect("an error").expect_err("no thread");
        assert!(
            matches!(error, Error::Threads { workers: 3, .. }),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(
            text.contains("3 threads") && text.contains("ulimit"),
            "{text}"
        );
        assert!(epoch.next().is_none(), "nothing after an error");
        assert_eq!(all(&loader(0), 0).len(), 4, "0 workers need no thread");
        return;
    }
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "threads_that_can_not_be_started_are_an_error"])
        .arg("--test-threads=1")
        .env(CHILD, "1")
        .env("RUST_MIN_STACK", (1u64 << 60).to_string())
        .output()
        .expect("starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
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

    let later = builder(20)
        .batch_size(4)
        .shuffle(2)
        .shard(0, 2)
        .first_epoch(7)
        .build();
    let later = later.expect("valid");
    assert_eq!(of(&later), all(&later, 7), "a run that goes on");

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
