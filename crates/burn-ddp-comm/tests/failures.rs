//! What becomes of a group when a rank dies, panics, leaves, hangs, or calls
//! something else: an error on every other rank, soon, that says which and why.

mod ranks;

use std::time::Duration;

use burn_ddp_comm::{Error, GroupConfig, ProcessGroup, ReduceOp};
use ranks::{Rank, Reported, Spec, job, now};

/// Within this time a death is known to every rank.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

/// What the survivors of a kill are doing.
#[derive(Clone, Copy, Debug)]
enum Doing {
    AllReduce,
    Barrier,
    Broadcast,
    Async,
    Idle,
}

const VICTIM: usize = 1;
const SURVIVORS: [usize; 2] = [0, 2];

/// A rank of a job in which the victim is killed; returns the survivor's error.
fn die_while(doing: Doing, rank: &Rank) -> Reported {
    let group = rank.group();
    let mut data = vec![1.0_f32; 300_000];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    rank.reach("ready");
    if rank.rank == VICTIM {
        std::thread::sleep(Duration::from_secs(1000));
    }
    let error = match doing {
        Doing::AllReduce => group.all_reduce(&mut data, ReduceOp::Sum).err(),
        Doing::Barrier => group.barrier().err(),
        Doing::Broadcast => group.broadcast(&mut data, VICTIM).err(),
        Doing::Async => group
            .all_reduce_async::<f32, _>(data.clone(), ReduceOp::Sum)
            .wait()
            .err(),
        Doing::Idle => loop {
            if let Some(error) = group.error() {
                break Some(error);
            }
            std::thread::sleep(Duration::from_millis(1));
        },
    };
    let reported = Reported::from(error.expect("the collective can't succeed"));
    // The group stays failed, with the same error, at once.
    let later = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
    assert_eq!(later.to_string(), reported.text);
    let later = group.barrier_async().wait().unwrap_err();
    assert_eq!(later.to_string(), reported.text);
    reported
}

fn kill_while(name: &str, doing: Doing) {
    for tcp in [false, true] {
        // Noticing takes milliseconds; a second attempt is for a machine on
        // which nothing ran for a second.
        for attempt in 0..2 {
            let mut slowest = Duration::ZERO;
            let main = |rank: &Rank| die_while(doing, rank);
            job(name, Spec::new(3, tcp), main, |job| {
                for rank in 0..3 {
                    job.await_point(rank, "ready");
                }
                // Let them fall asleep in their wait.
                std::thread::sleep(Duration::from_millis(100));
                let killed = job.kill(VICTIM);
                for rank in SURVIVORS {
                    let error: Reported = job.result(rank);
                    assert_eq!((&*error.kind, &*error.ranks), ("peer", &[VICTIM][..]));
                    assert!(error.text.contains("rank 1"), "{}", error.text);
                    slowest = slowest.max(error.at.saturating_sub(killed));
                }
            });
            if slowest < NOTICED_WITHIN {
                break;
            }
            assert!(attempt == 0, "noticed after {slowest:?} only, {doing:?}");
        }
    }
}

#[test]
fn kill_in_all_reduce() {
    kill_while("kill_in_all_reduce", Doing::AllReduce);
}

#[test]
fn kill_in_barrier() {
    kill_while("kill_in_barrier", Doing::Barrier);
}

#[test]
fn kill_in_broadcast() {
    kill_while("kill_in_broadcast", Doing::Broadcast);
}

#[test]
fn kill_in_async() {
    kill_while("kill_in_async", Doing::Async);
}

#[test]
fn kill_while_idle() {
    kill_while("kill_while_idle", Doing::Idle);
}

/// The rank that hosts the store dies, and with it the store.
#[test]
fn kill_the_store_host() {
    let spec = Spec {
        rank_0_hosts: true,
        ..Spec::new(3, false)
    };
    let main = |rank: &Rank| {
        let group = rank.group();
        rank.reach("ready");
        if rank.rank == 0 {
            std::thread::sleep(Duration::from_secs(1000));
        }
        Reported::from(group.barrier().unwrap_err())
    };
    job("kill_the_store_host", spec, main, |job| {
        for rank in 0..3 {
            job.await_point(rank, "ready");
        }
        job.kill(0);
        for rank in [1, 2] {
            let error: Reported = job.result(rank);
            assert!(error.text.contains("rank 0"), "{}", error.text);
        }
    });
}

#[test]
fn a_panic_s_message_travels() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            group.barrier().unwrap();
            if rank.rank == 2 {
                panic!("the answer is {}", 6 * 7);
            }
            Reported::from(group.all_reduce(&mut [1_i32], ReduceOp::Sum).unwrap_err())
        };
        job(
            "a_panic_s_message_travels",
            Spec::new(3, tcp),
            main,
            |job| {
                for rank in [0, 1] {
                    let error: Reported = job.result(rank);
                    assert_eq!((&*error.kind, &*error.ranks), ("peer", &[2][..]));
                    assert!(error.text.contains("the answer is 42"), "{}", error.text);
                    assert!(error.text.contains("tests/failures.rs:"), "{}", error.text);
                }
                assert!(!job.end(2).success());
            },
        );
    }
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    for tcp in [false, true] {
        let spec = Spec {
            timeout: Duration::from_millis(2500),
            patience: Duration::from_millis(2500),
            ..Spec::new(3, tcp)
        };
        let main = |rank: &Rank| {
            let group = rank.group();
            group.barrier().unwrap();
            if rank.rank == 1 {
                // Alive, and busy with something else.
                while group.error().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let error = group.all_reduce(&mut [1.0_f32; 5000], ReduceOp::Sum);
            Reported::from(error.unwrap_err())
        };
        let name = "a_rank_that_never_calls_is_named_at_the_deadline";
        job(name, spec, main, |job| {
            for error in job.results::<Reported>() {
                assert_eq!((&*error.kind, &*error.ranks), ("peer", &[1][..]));
                let begin = "all_reduce #2 (f32 sum, 5000): no data from rank 1 for 2.";
                assert!(error.text.starts_with(begin), "{}", error.text);
                let doing = "was busy elsewhere since it ended barrier #1, called at ";
                assert!(error.text.contains(doing), "{}", error.text);
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            let mut data = vec![1_i64; 100_000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            if rank.rank == 1 {
                return None;
            }
            let error = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
            Some(Reported::from(error))
        };
        let name = "a_rank_that_leaves_early_is_named";
        job(name, Spec::new(3, tcp), main, |job| {
            let results: Vec<Option<Reported>> = job.results();
            for rank in SURVIVORS {
                let error = results[rank].as_ref().unwrap();
                assert_eq!((&*error.kind, &*error.ranks), ("peer", &[1][..]));
                let begin = "all_reduce #2 (i64 sum, 100000): rank 1 left the group";
                assert!(error.text.starts_with(begin), "{}", error.text);
            }
        });
    }
}

/// What a rank sent before it left reaches the others, also if they are late.
#[test]
fn leaving_after_the_last_collective_harms_nobody() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            for _ in 0..20 {
                let mut data = vec![rank.rank as f32; 1000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [6.0; 1000]);
            }
            if rank.rank == 3 {
                // The others have long left when this rank receives.
                std::thread::sleep(Duration::from_millis(300));
            }
            let mut out = vec![if rank.rank == 0 { 9_u8 } else { 0 }; 20_000];
            group.broadcast(&mut out, 0).unwrap();
            assert_eq!(out, [9; 20_000]);
        };
        let name = "leaving_after_the_last_collective_harms_nobody";
        job(name, Spec::new(4, tcp), main, |job| {
            job.results::<()>();
        });
    }
}

#[test]
fn abort_ends_every_rank_s_waits() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            rank.reach("ready");
            let mut at = Duration::ZERO;
            let error = if rank.rank == 0 {
                // One of its own threads waits too.
                let waiting = {
                    let group = group.clone();
                    std::thread::spawn(move || group.barrier().unwrap_err())
                };
                while !(0..3).all(|other| rank.has_reached(other, "ready")) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                std::thread::sleep(Duration::from_millis(100));
                at = now();
                group.abort("the loss is not a number");
                waiting.join().unwrap()
            } else if rank.rank == 1 {
                group
                    .all_reduce(&mut [1_u8; 64], ReduceOp::Max)
                    .unwrap_err()
            } else {
                while group.error().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                group.barrier().unwrap_err()
            };
            (at, Reported::from(error))
        };
        job(
            "abort_ends_every_rank_s_waits",
            Spec::new(3, tcp),
            main,
            |job| {
                for (_, error) in job.results::<(Duration, Reported)>() {
                    assert_eq!((&*error.kind, &*error.ranks), ("peer", &[0][..]));
                    assert_eq!(
                        error.text,
                        "rank 0 aborted the group: the loss is not a number"
                    );
                }
            },
        );
    }
}

#[test]
fn different_calls_are_usage_errors_on_every_rank() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            let mut data = vec![1.0_f32; 2048];
            group.barrier().unwrap();
            let error = match rank.rank {
                2 => group.all_gather(&data[..1024], &mut [0.0; 3 * 1024]),
                _ => group.all_reduce(&mut data, ReduceOp::Sum),
            };
            Reported::from(error.unwrap_err())
        };
        let name = "different_calls_are_usage_errors_on_every_rank";
        job(name, Spec::new(3, tcp), main, |job| {
            for error in job.results::<Reported>() {
                assert_eq!(error.kind, "usage");
                let begin = "rank 2 called all_gather #2 (f32, 1024), ranks 0, 1 called \
                             all_reduce #2 (f32 sum, 2048)";
                assert!(error.text.starts_with(begin), "{}", error.text);
            }
        });
    }
}

/// Another length, dtype, operation or root, or one call more.
#[test]
fn every_difference_is_noticed() {
    type Call = fn(&ProcessGroup) -> Result<(), Error>;
    let pairs: [(Call, Call); 6] = [
        (
            |g| g.all_reduce(&mut [1.0_f32; 7], ReduceOp::Sum),
            |g| g.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        ),
        (
            |g| g.all_reduce(&mut [1.0_f32; 7], ReduceOp::Sum),
            |g| g.all_reduce(&mut [1_i32; 7], ReduceOp::Sum),
        ),
        (
            |g| g.all_reduce(&mut [1.0_f32; 7], ReduceOp::Sum),
            |g| g.all_reduce(&mut [1.0_f32; 7], ReduceOp::Mean),
        ),
        (
            |g| g.broadcast(&mut [1.0_f32; 7], 0),
            |g| g.broadcast(&mut [1.0_f32; 7], 1),
        ),
        (|g| g.barrier(), |g| g.all_gather_object(&1).map(drop)),
        (
            |g| g.broadcast_object(Some(1), 0).map(drop),
            |g| g.broadcast_object(Some(1), 1).map(drop),
        ),
    ];
    for (case, (here, there)) in pairs.into_iter().enumerate() {
        let main = |rank: &Rank| {
            let group = rank.group();
            let call = if rank.rank == 0 { here } else { there };
            Reported::from(call(&group).unwrap_err())
        };
        let spec = Spec {
            case,
            ..Spec::new(2, false)
        };
        job("every_difference_is_noticed", spec, main, |job| {
            for error in job.results::<Reported>() {
                assert_eq!(error.kind, "usage", "case {case}: {}", error.text);
                assert!(error.text.contains("rank 0 called"), "{}", error.text);
                assert!(error.text.contains("rank 1 called"), "{}", error.text);
            }
        });
    }
}

#[test]
fn different_time_limits_are_refused_at_set_up() {
    let main = |rank: &Rank| {
        let seconds = if rank.rank == 1 { 7 } else { 5 };
        let config = rank.config().timeout(Duration::from_secs(seconds));
        Reported::from(ProcessGroup::new(config).unwrap_err())
    };
    let name = "different_time_limits_are_refused_at_set_up";
    job(name, Spec::new(3, false), main, |job| {
        for error in job.results::<Reported>() {
            assert_eq!(error.kind, "usage");
            assert!(error.text.contains("rank 1: "), "{}", error.text);
            assert!(error.text.contains("ranks 0, 2: "), "{}", error.text);
        }
    });
}

#[test]
fn wrong_numbers_are_usage_errors() {
    for (config, text) in [
        (GroupConfig::new(0, 0, "127.0.0.1:1"), "at least one rank"),
        (GroupConfig::new(2, 2, "127.0.0.1:1"), "the rank is 2"),
        (
            GroupConfig::new(0, 2, "127.0.0.1:1").local(1, 1),
            "the local rank is 1",
        ),
        (
            GroupConfig::new(0, 2, "127.0.0.1:1").local(0, 3),
            "the local world size is 3",
        ),
        (
            GroupConfig::new(0, 2, "127.0.0.1:1").timeout(Duration::ZERO),
            "longer than 0 s",
        ),
    ] {
        let error = ProcessGroup::new(config).unwrap_err();
        assert_eq!(error.kind(), burn_ddp_comm::ErrorKind::Usage);
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn wrong_arguments_on_one_rank_are_an_error_on_all() {
    let main = |rank: &Rank| {
        let group = rank.group();
        let mut out = vec![0_u8; if rank.rank == 1 { 3 } else { 4 }];
        Reported::from(group.all_gather(&[1, 2], &mut out).unwrap_err())
    };
    let name = "wrong_arguments_on_one_rank_are_an_error_on_all";
    job(name, Spec::new(2, false), main, |job| {
        for error in job.results::<Reported>() {
            assert_eq!(error.kind, "usage");
            assert!(
                error.text.contains("all_gather #1 on rank 1"),
                "{}",
                error.text
            );
        }
    });
}
