//! A busy rank is waited for; a silent one, and ranks that wait for each other, are
//! not, and are named with what they were last seen doing.

mod ranks;

use std::time::Duration;

use burn_ddp_comm::{Error, FlightRecord, FlightState, ReduceOp};
use ranks::{Rank, Reported, Spec, job};
use rustix::process::Signal;

/// The shortest silence that counts, since ranks show once a second that they run.
const TIMEOUT: Duration = Duration::from_secs(3);

fn spec(world_size: usize, tcp: bool) -> Spec {
    Spec {
        timeout: TIMEOUT,
        ..Spec::new(world_size, tcp)
    }
}

#[test]
fn a_busy_rank_is_waited_for_beyond_the_time_limit() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            group.barrier().unwrap();
            let mut data = [1.0_f32; 100];
            if rank.rank == 1 {
                std::thread::sleep(2 * TIMEOUT + Duration::from_secs(1));
                // Rank 2 waits for rank 0, which waits for this one.
                group.send(&data, 0).unwrap();
            } else if rank.rank == 0 {
                group.recv(&mut data, 1).unwrap();
                group.send(&data, 2).unwrap();
            } else {
                group.recv(&mut data, 0).unwrap();
            }
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, [3.0; 100]);
        };
        let name = "a_busy_rank_is_waited_for_beyond_the_time_limit";
        job(name, spec(3, tcp), main, |job| {
            job.results::<()>();
        });
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_a_circle_are_told_at_the_time_limit() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            group.barrier().unwrap();
            if rank.rank == 3 {
                // Busy, and not waited for by anybody in the circle.
                while group.error().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return Reported::from(group.error().unwrap());
            }
            let from = (rank.rank + 1) % 3;
            Reported::from(group.recv(&mut [0_u8; 8], from).unwrap_err())
        };
        let name = "ranks_that_wait_for_each_other_in_a_circle_are_told_at_the_time_limit";
        job(name, spec(4, tcp), main, |job| {
            for error in job.results::<Reported>() {
                assert_eq!(error.kind, "peer");
                assert!(error.text.contains("recv #1 from rank"), "{}", error.text);
                assert!(error.text.contains("(deadline)"), "{}", error.text);
                assert!(
                    error.text.contains("without progress for"),
                    "{}",
                    error.text
                );
            }
        });
    }
}

/// What a rank gets whose peer, `stopped`, is stopped while `waits` says whether
/// anybody waits for it.
fn stop(name: &str, spec: Spec, stopped: usize, waits: bool, check: impl Fn(&Reported)) {
    let main = |rank: &Rank| {
        let group = rank.group();
        group.barrier().unwrap();
        rank.reach("ready");
        let error = loop {
            if rank.rank != stopped && waits {
                break group
                    .all_reduce(&mut [1_i32; 9], ReduceOp::Sum)
                    .unwrap_err();
            }
            if let Some(error) = group.error() {
                break error;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Reported::from(error)
    };
    let (world_size, limit) = (spec.world_size, TIMEOUT + Duration::from_secs(4));
    let hosts = spec.rank_0_hosts && stopped == 0;
    job(name, spec, main, |job| {
        for rank in 0..world_size {
            job.await_point(rank, "ready");
        }
        let at = job.signal(stopped, Signal::STOP);
        for rank in (0..world_size).filter(|&rank| rank != stopped) {
            let error: Reported = job.result(rank);
            assert_eq!((&*error.kind, &*error.ranks), ("peer", &[stopped][..]));
            let after = error.at.saturating_sub(at);
            assert!(after < limit, "after {after:?}: {}", error.text);
            assert!(after > TIMEOUT / 2, "after {after:?}: {}", error.text);
            check(&error);
        }
        // It goes on, and is told too; the store's host finds that the others have
        // given up.
        job.signal(stopped, Signal::CONT);
        let error: Reported = job.result(stopped);
        assert!(hosts || error.ranks == [stopped], "{}", error.text);
    });
}

#[test]
fn a_stopped_rank_is_named_at_the_time_limit() {
    for (case, (tcp, waits)) in [(false, true), (true, true), (false, false)]
        .into_iter()
        .enumerate()
    {
        let spec = Spec {
            case,
            ..spec(3, tcp)
        };
        let name = "a_stopped_rank_is_named_at_the_time_limit";
        stop(name, spec, 1, waits, |error| {
            // Whoever notices first: the store, or a rank that waits.
            let silent = error.text.contains("rank 1 has been silent for 3.");
            let waiting = error.text.contains("(deadline); rank 1 (process");
            assert!(silent || (waits && waiting), "{}", error.text);
        });
    }
}

#[test]
fn a_stopped_store_host_is_named_at_the_time_limit() {
    for waits in [false, true] {
        let spec = Spec {
            rank_0_hosts: true,
            case: usize::from(waits),
            ..spec(3, false)
        };
        let name = "a_stopped_store_host_is_named_at_the_time_limit";
        stop(name, spec, 0, waits, |error| {
            assert!(error.text.contains("rank 0"), "{}", error.text);
        });
    }
}

/// A whole job that is stopped, as by a batch system, goes on as if nothing had
/// happened.
#[test]
fn a_job_that_is_stopped_as_a_whole_goes_on() {
    let main = |rank: &Rank| {
        let group = rank.group();
        rank.reach("ready");
        for _ in 0..2 {
            // In a wait while it is stopped, all but rank 0.
            if rank.rank == 0 {
                std::thread::sleep(Duration::from_secs(1));
            }
            group.all_reduce(&mut [1_u8; 10], ReduceOp::Sum).unwrap();
        }
    };
    let spec = Spec {
        rank_0_hosts: true,
        ..spec(3, false)
    };
    job(
        "a_job_that_is_stopped_as_a_whole_goes_on",
        spec,
        main,
        |job| {
            for rank in 0..3 {
                job.await_point(rank, "ready");
            }
            std::thread::sleep(Duration::from_millis(300));
            for rank in 0..3 {
                job.signal(rank, Signal::STOP);
            }
            std::thread::sleep(TIMEOUT + Duration::from_secs(2));
            for rank in 0..3 {
                job.signal(rank, Signal::CONT);
            }
            job.results::<()>();
        },
    );
}

#[test]
fn a_monitored_barrier_names_all_that_are_missing() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            group.monitored_barrier(TIMEOUT).unwrap();
            let error = if [1, 3].contains(&rank.rank) {
                while group.error().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                group.barrier().unwrap_err()
            } else {
                group
                    .monitored_barrier(Duration::from_millis(500))
                    .unwrap_err()
            };
            Reported::from(error)
        };
        let name = "a_monitored_barrier_names_all_that_are_missing";
        job(name, spec(4, tcp), main, |job| {
            for error in job.results::<Reported>() {
                assert_eq!((&*error.kind, &*error.ranks), ("peer", &[1, 3][..]));
                let begin = "barrier #2: no data from ranks 1, 3 for 0.5 s (deadline); rank 1 (";
                assert!(error.text.starts_with(begin), "{}", error.text);
            }
        });
    }
}

#[test]
fn every_rank_leaves_a_flight_record_when_its_group_fails() {
    let main = |rank: &Rank| {
        let group = rank.group();
        for _ in 0..3 {
            group.all_reduce(&mut [1_u8; 10], ReduceOp::Sum).unwrap();
        }
        let failed: Result<(), Error> = match rank.rank {
            1 => group.all_gather(&[0_f32; 4], &mut [0.0; 12]),
            _ => group.all_reduce(&mut [0_f64; 6], ReduceOp::Sum),
        };
        Reported::from(failed.unwrap_err())
    };
    let name = "every_rank_leaves_a_flight_record_when_its_group_fails";
    job(name, spec(3, false), main, |job| {
        let errors = job.results::<Reported>();
        for (rank, error) in errors.iter().enumerate() {
            let path = job.dir().join(FlightRecord::file_name(rank));
            let record = FlightRecord::read(&path).unwrap();
            assert_eq!(record.reason, error.text);
            assert_eq!((record.rank, record.world_size), (rank, 3));
            assert_eq!(record.groups["world"], [0, 1, 2]);
            assert_eq!(record.entries.len(), 4);
            let last = &record.entries[3];
            let called = match rank {
                1 => "all_gather #4 (f32, 4)",
                _ => "all_reduce #4 (f64 sum, 6)",
            };
            assert_eq!(last.operation.as_deref(), Some(called));
            assert_eq!(last.state, FlightState::Started);
            assert!(last.called_at.contains("tests/liveness.rs:"));
            assert_eq!(record.entries[2].state, FlightState::Completed);
            assert!(record.entries[2].ended_at_us >= record.entries[2].started_at_us);
        }
    });
}
