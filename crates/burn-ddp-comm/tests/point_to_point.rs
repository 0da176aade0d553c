//! Messages between two ranks: others go on, and calls that do not match are
//! errors on every rank, never a wait.

mod ranks;

use std::time::Duration;

use burn_ddp_comm::{Error, ProcessGroup, ReduceOp};
use ranks::{Rank, Reported, Spec, job};

#[test]
fn messages_arrive_in_order_while_others_go_on() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            // Ranks 2 and 3 have nothing to do with it, and are ahead.
            for i in 0..200_usize {
                let len = i * 37;
                match rank.rank {
                    0 => group.send(&vec![i as f32; len], 1).unwrap(),
                    1 => {
                        let mut data = vec![0.0_f32; len];
                        group.recv(&mut data, 0).unwrap();
                        assert_eq!(data, vec![i as f32; len]);
                    }
                    _ => {}
                }
            }
            let mut data = vec![rank.rank as i32; 20_000];
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data, vec![6; 20_000]);
        };
        let name = "messages_arrive_in_order_while_others_go_on";
        job(name, Spec::new(4, tcp), main, |job| {
            job.results::<()>();
        });
    }
}

#[test]
fn asynchronous_messages_form_a_pipeline() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            let (own, last) = (rank.rank, rank.spec.world_size - 1);
            let mut sends = Vec::new();
            for i in 0..50_i64 {
                let mut data = vec![i; 10_000];
                if own > 0 {
                    data = group.recv_async::<i64, _>(data, own - 1).wait().unwrap();
                }
                data.iter_mut().for_each(|element| *element += 1);
                if own < last {
                    sends.push(group.send_async::<i64, _>(data, own + 1));
                } else {
                    assert_eq!(data, vec![i + 1 + last as i64; 10_000]);
                }
            }
            for send in sends {
                send.wait().unwrap();
            }
        };
        let name = "asynchronous_messages_form_a_pipeline";
        job(name, Spec::new(3, tcp), main, |job| {
            job.results::<()>();
        });
    }
}

type Attempt = fn(&ProcessGroup, usize) -> Result<(), Error>;

/// What ranks 0 and 1 of three call, and what all three are told. Rank 2 waits in
/// a barrier.
const MISMATCHES: [(Attempt, &str); 7] = [
    (
        |group, rank| group.send(&[1_u8], 1 - rank),
        "rank 0 called send #2 to rank 1 (u8, 1), rank 1 called send #2 to rank 0 (u8, 1)",
    ),
    (
        |group, rank| group.recv(&mut [1_u8], 1 - rank),
        "rank 0 called recv #2 from rank 1 (u8, 1), rank 1 called recv #2 from rank 0 (u8, 1)",
    ),
    (
        |group, rank| match rank {
            0 => group.send(&[0_f32; 4], 1),
            _ => group.recv(&mut [0_f32; 5], 0),
        },
        "rank 0 called send #2 to rank 1 (f32, 4), rank 1 called recv #2 from rank 0 (f32, 5)",
    ),
    (
        |group, rank| match rank {
            0 => group.send(&[0_f32; 4], 1),
            _ => group.recv(&mut [0_i32; 4], 0),
        },
        "rank 0 called send #2 to rank 1 (f32, 4), rank 1 called recv #2 from rank 0 (i32, 4)",
    ),
    (
        |group, rank| match rank {
            0 => group.send_recv(&[0_u8; 4], 1, &mut [0; 3], 1),
            _ => group.send_recv(&[0_u8; 4], 0, &mut [0; 3], 0),
        },
        "rank 0 called send_recv #2 with rank 1 (u8, 4 out, 3 in), rank 1 called send_recv #2 with \
         rank 0 (u8, 4 out, 3 in)",
    ),
    (
        |group, rank| match rank {
            0 => group.send(&[0_u8; 4], 1),
            _ => group.barrier(),
        },
        "rank 0 called send #2 to rank 1 (u8, 4)",
    ),
    (
        |group, rank| match rank {
            0 => group.all_reduce_coalesced(&mut [&mut [0_u8; 3], &mut [0; 5]], ReduceOp::Sum),
            _ => group.all_reduce_coalesced(&mut [&mut [0_u8; 5], &mut [0; 3]], ReduceOp::Sum),
        },
        "called all_reduce_coalesced #1 (u8 sum, 8 in 2 buffers of layout",
    ),
];

#[test]
fn calls_that_do_not_match_are_errors_on_every_rank() {
    for tcp in [false, true] {
        for (case, (attempt, expected)) in MISMATCHES.into_iter().enumerate() {
            let main = |rank: &Rank| {
                let group = rank.group();
                let result = match rank.rank {
                    // Something that matches first, so that the streams have moved.
                    0 => group.send(&[7_u8; 9], 1).and_then(|()| attempt(&group, 0)),
                    1 => group
                        .recv(&mut [0_u8; 9], 0)
                        .and_then(|()| attempt(&group, 1)),
                    _ => loop {
                        if let Some(error) = group.error() {
                            break Err(error);
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    },
                };
                Reported::from(result.unwrap_err())
            };
            let spec = Spec {
                case,
                ..Spec::new(3, tcp)
            };
            let name = "calls_that_do_not_match_are_errors_on_every_rank";
            job(name, spec, main, |job| {
                for error in job.results::<Reported>() {
                    assert_eq!(error.kind, "usage");
                    assert!(error.text.contains(expected), "{}\n{expected}", error.text);
                }
            });
        }
    }
}

#[test]
fn a_message_s_killed_peer_is_named() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let group = rank.group();
            rank.reach("ready");
            if rank.rank == 1 {
                std::thread::sleep(Duration::from_secs(1000));
            }
            let result = match rank.rank {
                0 => group.send(&vec![0_f32; 1 << 20], 1),
                _ => group.recv(&mut [0_u8; 5], 1),
            };
            Reported::from(result.unwrap_err())
        };
        let name = "a_message_s_killed_peer_is_named";
        job(name, Spec::new(3, tcp), main, |job| {
            for rank in 0..3 {
                job.await_point(rank, "ready");
            }
            std::thread::sleep(Duration::from_millis(50));
            job.kill(1);
            for rank in [0, 2] {
                let error: Reported = job.result(rank);
                assert_eq!((&*error.kind, &*error.ranks), ("peer", &[1][..]));
            }
        });
    }
}
