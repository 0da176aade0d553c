//! Groups of some of the ranks: who is in them, that several run at once, and
//! how they fail.

mod ranks;

use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, ReduceOp};
use ranks::{Rank, Reported, Spec, job};

fn sum(group: &ProcessGroup, value: u64) -> u64 {
    let mut data = [value as i64];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    data[0] as u64
}

/// Ranks in two colors, in reverse order, and one left out.
#[test]
fn a_group_splits_by_color_in_order_of_keys() {
    for (case, tcp) in [false, true].into_iter().enumerate() {
        let spec = Spec {
            case,
            ..Spec::new(5, tcp)
        };
        let main = |rank: &Rank| {
            let group = rank.group();
            assert_eq!(group.name(), "world");
            let color = (rank.rank != 4).then_some(rank.rank as u32 % 2);
            let half = group.split(color, -(rank.rank as i64)).unwrap();
            let Some(half) = half else {
                assert_eq!(rank.rank, 4);
                assert_eq!(sum(&group, 4), 10);
                return;
            };
            let expected = [[2, 0], [3, 1]][rank.rank % 2];
            assert_eq!(half.job_ranks(), expected);
            assert_eq!(half.world_size(), 2);
            assert_eq!(half.job_ranks()[half.rank()], rank.rank);
            assert_eq!(half.name(), format!("split 1, color {}", rank.rank % 2));
            assert_eq!(half.local_rank(), half.rank());
            assert_eq!(half.local_world_size(), 2);
            assert_eq!(sum(&half, rank.rank as u64), [2, 4][rank.rank % 2]);
            let mut first = [rank.rank as i32];
            half.broadcast(&mut first, 0).unwrap();
            assert_eq!(first, [expected[0] as i32]);
            // The world goes on beside it, and a part can be split again.
            assert_eq!(sum(&group, rank.rank as u64), 10);
            let alone = half.split(Some(rank.rank as u32), 0).unwrap().unwrap();
            assert_eq!((alone.rank(), alone.world_size()), (0, 1));
            assert_eq!(alone.job_ranks(), [rank.rank]);
            assert_eq!(sum(&alone, 7), 7);
        };
        job(
            "a_group_splits_by_color_in_order_of_keys",
            spec,
            main,
            |job| {
                job.results::<()>();
            },
        );
    }
}

/// Rows and columns of a grid, with operations of both and of the world in
/// flight in every order.
#[test]
fn several_groups_are_in_flight_at_once() {
    for (case, tcp) in [false, true].into_iter().enumerate() {
        let spec = Spec {
            case,
            ..Spec::new(4, tcp)
        };
        let main = |rank: &Rank| {
            let world = rank.group();
            let (row, column) = (rank.rank / 2, rank.rank % 2);
            let by_row = world.split(Some(row as u32), 0).unwrap().unwrap();
            let by_column = world.split(Some(column as u32), 0).unwrap().unwrap();
            for round in 0..50_usize {
                let groups = [&world, &by_row, &by_column];
                let length = 1 + round * 997 % 40_000;
                // Each rank starts with another group: waits of one must not
                // hold up another.
                let mut works: Vec<_> = (0..3)
                    .map(|i| {
                        let which = (i + rank.rank + round) % 3;
                        let data = vec![rank.rank as i64 + round as i64; length];
                        let work = groups[which].all_reduce_async::<i64, _>(data, ReduceOp::Sum);
                        (which, work)
                    })
                    .collect();
                works.reverse();
                for (which, work) in works {
                    let ranks = groups[which].job_ranks();
                    let expected: usize = ranks.iter().map(|r| r + round).sum();
                    assert_eq!(work.wait().unwrap(), vec![expected as i64; length]);
                }
            }
        };
        job("several_groups_are_in_flight_at_once", spec, main, |job| {
            job.results::<()>();
        });
    }
}

/// Links and threads of a group that is dropped are given back.
#[test]
fn groups_come_and_go() {
    let main = |rank: &Rank| {
        let world = rank.group();
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let mut before = (0, 0);
        for round in 0..40 {
            let pair = world.split(Some(0), 0).unwrap().unwrap();
            let work = pair.all_reduce_async::<u8, _>(vec![1; 9], ReduceOp::Sum);
            assert_eq!(work.wait().unwrap(), [2; 9]);
            drop(pair);
            match round {
                4 => before = (files(), threads()),
                5.. => assert_eq!((files(), threads()), before, "round {round}"),
                _ => {}
            }
        }
    };
    job("groups_come_and_go", Spec::new(2, false), main, |job| {
        job.results::<()>();
    });
}

/// A rank that waits in a group which the other has dropped is told so.
#[test]
fn a_dropped_group_is_missed_by_the_others() {
    for (case, tcp) in [false, true].into_iter().enumerate() {
        let spec = Spec {
            case,
            ..Spec::new(3, tcp)
        };
        let main = |rank: &Rank| {
            let world = rank.group();
            let pair = world.split((rank.rank > 0).then_some(0), 0).unwrap();
            if rank.rank == 2 {
                let pair = pair.unwrap();
                let started = Instant::now();
                let error = pair.barrier().unwrap_err();
                assert!(started.elapsed() < Duration::from_secs(20));
                return Some(Reported::from(error));
            }
            drop(pair);
            // Still in the job.
            while world.error().is_none() {
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        };
        job(
            "a_dropped_group_is_missed_by_the_others",
            spec,
            main,
            |job| {
                let error = job.results::<Option<Reported>>().remove(2).unwrap();
                assert_eq!(
                    (&*error.kind, &*error.ranks),
                    ("peer", &[1][..]),
                    "{error:?}"
                );
                let text = &error.text;
                let name = "barrier #1 in split 1, color 0 (ranks 1, 2 of the job): ";
                assert!(text.starts_with(name), "{text}");
                assert!(text.contains("rank 1"), "{text}");
            },
        );
    }
}

/// A difference in a part names the job's ranks, and fails every group.
#[test]
fn different_calls_in_a_group_are_an_error_everywhere() {
    let main = |rank: &Rank| {
        let world = rank.group();
        let color = rank.rank as u32 / 2;
        let pair = world.split(Some(color), 0).unwrap().unwrap();
        let error = match rank.rank {
            2 => pair.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum),
            3 => pair.all_reduce(&mut [1.0_f32; 5], ReduceOp::Sum),
            // Not in that group, and told all the same.
            _ => world.barrier(),
        };
        let error = error.unwrap_err();
        assert_eq!(world.error().unwrap().to_string(), error.to_string());
        Reported::from(error)
    };
    let name = "different_calls_in_a_group_are_an_error_everywhere";
    job(name, Spec::new(4, false), main, |job| {
        for error in job.results::<Reported>() {
            let text = &error.text;
            assert_eq!(error.kind, "usage", "{text}");
            assert!(
                text.contains("rank 2 called all_reduce #1 (f32 sum, 4)"),
                "{text}"
            );
            assert!(
                text.contains("rank 3 called all_reduce #1 (f32 sum, 5)"),
                "{text}"
            );
            assert!(text.contains("split 1, color 1"), "{text}");
        }
    });
}

/// A death is noticed in every group, also by ranks of groups that the dead rank
/// was not in.
#[test]
fn a_killed_rank_fails_every_group() {
    for (case, tcp) in [false, true].into_iter().enumerate() {
        let spec = Spec {
            case,
            ..Spec::new(4, tcp)
        };
        let main = |rank: &Rank| {
            let world = rank.group();
            let pair = world.split(Some(rank.rank as u32 / 2), 0).unwrap().unwrap();
            rank.reach("split");
            if rank.rank == 1 {
                std::thread::sleep(Duration::from_secs(60));
            }
            loop {
                let step = match rank.rank {
                    0 => pair.barrier(),
                    _ => pair.all_reduce(&mut [1.0_f32; 1000], ReduceOp::Mean),
                };
                if let Err(error) = step {
                    return Reported::from(error);
                }
            }
        };
        job("a_killed_rank_fails_every_group", spec, main, |job| {
            for rank in 0..4 {
                job.await_point(rank, "split");
            }
            let killed = job.kill(1);
            for rank in [0, 2, 3] {
                let error: Reported = job.result(rank);
                assert_eq!(
                    (&*error.kind, &*error.ranks),
                    ("peer", &[1][..]),
                    "{error:?}"
                );
                assert!(error.at - killed < Duration::from_secs(1), "{error:?}");
            }
        });
    }
}

#[test]
fn a_world_of_one_splits_into_itself_or_nothing() {
    let group = ProcessGroup::single();
    let own = group.split(Some(3), 1).unwrap().unwrap();
    assert_eq!((own.rank(), own.world_size()), (0, 1));
    assert_eq!(own.name(), "split 1, color 3");
    assert!(group.split(None, 0).unwrap().is_none());
}
