//! Blocking and asynchronous operations of several threads run one at a time in
//! the order of their calls, and their handles always complete.

mod ranks;

use std::time::Duration;

use burn_ddp_comm::ReduceOp;
use ranks::{Rank, Reported, Spec, job};

/// Operations of different lengths, so that any that overtook another would meet
/// the wrong one on the other ranks.
#[test]
fn asynchronous_and_blocking_operations_keep_their_order() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            let size = rank.spec.world_size as i64;
            for round in 0..30_i64 {
                let mut works = Vec::new();
                for i in 0..5_usize {
                    let data = vec![round + i as i64; 10_000 * i + 1];
                    works.push(group.all_reduce_async::<i64, _>(data, ReduceOp::Sum));
                }
                // Queued behind these, and run here.
                let mut data = [round; 3];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [size * round; 3]);
                assert!(works.iter().all(burn_ddp_comm::Work::is_done));

                let own = vec![rank.rank as u8; 2000];
                let gathered = group.all_gather_async(own, vec![0; 2000 * size as usize]);
                let cast = group.broadcast_async::<f32, _>([round as f32; 7], 1);
                let barrier = group.barrier_async();
                // Waited for in another order than that of the calls.
                barrier.wait().unwrap();
                assert_eq!(cast.wait().unwrap(), [round as f32; 7]);
                let (_, out) = gathered.wait().unwrap();
                for (from, part) in out.chunks(2000).enumerate() {
                    assert_eq!(part, [from as u8; 2000]);
                }
                for (i, work) in works.into_iter().enumerate() {
                    let sum = size * (round + i as i64);
                    assert_eq!(work.wait().unwrap(), vec![sum; 10_000 * i + 1]);
                }
            }
        };
        let name = "asynchronous_and_blocking_operations_keep_their_order";
        job(name, Spec::new(3, tcp), main, |job| {
            job.results::<()>();
        });
    }
}

/// Threads take turns by a lock, which fixes the order on each rank; the
/// operations themselves overlap with the other thread's waiting.
#[test]
fn several_threads_share_a_group() {
    let main = |rank: &Rank| {
        let group = rank.group();
        let (to_second, second) = std::sync::mpsc::channel();
        let (to_first, first) = std::sync::mpsc::channel();
        let other = {
            let group = group.clone();
            std::thread::spawn(move || {
                for i in second {
                    let work = group.all_reduce_async::<u8, _>(vec![1; i], ReduceOp::Sum);
                    to_first.send(()).unwrap();
                    assert_eq!(work.wait().unwrap(), vec![2; i]);
                }
            })
        };
        for i in 0..300 {
            to_second.send(i * 37).unwrap();
            first.recv().unwrap();
            let mut data = [i as f64];
            group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
            assert_eq!(data, [i as f64]);
        }
        drop(to_second);
        other.join().unwrap();
    };
    let name = "several_threads_share_a_group";
    job(name, Spec::new(2, false), main, |job| {
        job.results::<()>();
    });
}

#[test]
fn a_dropped_handle_s_operation_still_runs() {
    let main = |rank: &Rank| {
        let group = rank.group();
        for _ in 0..50 {
            drop(group.all_reduce_async::<f32, _>(vec![1.0; 5000], ReduceOp::Sum));
        }
        let mut data = [1.0_f32];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [2.0]);
        // And one that is unfinished when the group is dropped.
        let work = group.all_reduce_async::<f32, _>(vec![1.0; 5000], ReduceOp::Sum);
        drop(group);
        assert_eq!(work.wait().unwrap(), vec![2.0; 5000]);
    };
    let name = "a_dropped_handle_s_operation_still_runs";
    job(name, Spec::new(2, false), main, |job| {
        job.results::<()>();
    });
}

/// Dropping a group does not wait for long for what can't finish, and says so.
#[test]
fn a_group_dropped_with_an_unfinished_operation_fails_the_others() {
    let main = |rank: &Rank| {
        let group = rank.group();
        let error = if rank.rank == 0 {
            let work = group.all_reduce_async::<f32, _>(vec![1.0; 50], ReduceOp::Sum);
            let start = std::time::Instant::now();
            drop(group);
            assert!(start.elapsed() < Duration::from_secs(60));
            work.wait().unwrap_err()
        } else {
            while group.error().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            group.barrier().unwrap_err()
        };
        Reported::from(error)
    };
    let name = "a_group_dropped_with_an_unfinished_operation_fails_the_others";
    job(name, Spec::new(2, false), main, |job| {
        for error in job.results::<Reported>() {
            assert_eq!((&*error.kind, &*error.ranks), ("peer", &[0][..]));
            assert!(error.text.contains("wait for them first"), "{}", error.text);
        }
    });
}

/// A buffer whose `as_mut` panics.
struct Broken;

impl AsMut<[f32]> for Broken {
    fn as_mut(&mut self) -> &mut [f32] {
        panic!("no such buffer")
    }
}

#[test]
fn a_panic_in_a_buffer_fails_the_group_and_hangs_nobody() {
    let main = |rank: &Rank| {
        let group = rank.group();
        let error = if rank.rank == 0 {
            let work = group.all_reduce_async::<f32, _>(Broken, ReduceOp::Sum);
            let Err(abandoned) = work.wait() else {
                panic!("a buffer that panics can't be reduced");
            };
            assert!(abandoned.to_string().contains("panicked"), "{abandoned}");
            group.barrier().unwrap_err()
        } else {
            group.barrier().unwrap_err()
        };
        Reported::from(error)
    };
    let name = "a_panic_in_a_buffer_fails_the_group_and_hangs_nobody";
    job(name, Spec::new(2, false), main, |job| {
        for error in job.results::<Reported>() {
            assert!(error.text.contains("no such buffer"), "{}", error.text);
        }
    });
}
