//! The collectives over every kind of link, between threads: the transports are
//! the real ones, and what needs processes is tested with processes.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::Topology;
use super::all_reduce::slice;
use crate::communicator::Communicator;
use crate::fault::Fault;
use crate::liveness::Limits;
use crate::membership::Membership;
use crate::scope::Scope;
use crate::transport::Link;
use crate::transport::shared_memory::{Layout, OwnSegment, SharedMemoryLink};
use crate::transport::tcp::TcpLink;
use crate::waiter::Waiter;
use crate::{DType, ReduceOp};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    SharedMemory,
    Tcp,
    /// Two hosts: shared memory between ranks of the same parity.
    Mixed,
    /// Three hosts.
    ThreeHosts,
}

impl Kind {
    const ALL: [Self; 4] = [Self::SharedMemory, Self::Tcp, Self::Mixed, Self::ThreeHosts];

    /// The host that `rank` is on.
    fn host(self, rank: usize) -> usize {
        match self {
            Self::SharedMemory => 0,
            Self::Tcp => rank,
            Self::Mixed => rank % 2,
            // Of 6 ranks: 3 on the first, 2 on the second, 1 on the third.
            Self::ThreeHosts => [0, 1, 0, 2, 1, 0, 0, 2][rank % 8],
        }
    }

    fn shares_memory(self, one: usize, other: usize) -> bool {
        self.host(one) == self.host(other)
    }
}

/// The communicators of a group of `world_size`.
fn communicators(world_size: usize, kind: Kind) -> Vec<Communicator> {
    // Small rings, so that messages are longer than them.
    let layout = Layout {
        rings: world_size,
        ring_bytes: 1 << 14,
    };
    let segments: Vec<_> = (0..world_size)
        .map(|rank| OwnSegment::create(layout, [rank as u8; 32]).unwrap())
        .collect();
    let mut links: Vec<Vec<Option<Link>>> = (0..world_size)
        .map(|_| (0..world_size).map(|_| None).collect())
        .collect();
    let pairs = (0..world_size).flat_map(|one| (0..one).map(move |other| (one, other)));
    for (one, other) in pairs {
        let (first, second) = if kind.shares_memory(one, other) {
            let link = |from: usize, to: usize| {
                let (peer, own) = (&segments[to].mapping, &segments[from].mapping);
                Link::SharedMemory(SharedMemoryLink::new((peer, from), (own, to)).unwrap())
            };
            (link(one, other), link(other, one))
        } else {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            let link = |stream| Link::Tcp(Box::new(TcpLink::new(stream).unwrap()));
            (link(stream), link(accepted))
        };
        links[one][other] = Some(first);
        links[other][one] = Some(second);
    }
    links
        .into_iter()
        .zip(&segments)
        .enumerate()
        .map(|(rank, (links, segment))| {
            let timeout = Duration::from_secs(60);
            let fault = Arc::new(Fault::new());
            let segment = (kind != Kind::Tcp).then(|| Arc::clone(&segment.mapping));
            let sockets = kind != Kind::SharedMemory;
            let waiter = Waiter::new(fault, segment, sockets, true).unwrap();
            let membership = Arc::new(Membership::single());
            let scope = Arc::new(Scope::world(world_size));
            let hosts: Vec<usize> = (0..world_size).map(|rank| kind.host(rank)).collect();
            Communicator::new(
                rank,
                scope,
                links,
                waiter,
                membership,
                Limits {
                    timeout,
                    patience: timeout,
                },
                Topology::new(&hosts),
            )
        })
        .collect()
}

/// Runs `rank_main` for every rank and returns what they return, by rank.
fn run<R: Send>(
    world_size: usize,
    kind: Kind,
    rank_main: impl Fn(&mut Communicator) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let rank_main = &rank_main;
        let ranks: Vec<_> = communicators(world_size, kind)
            .into_iter()
            .map(|mut communicator| scope.spawn(move || rank_main(&mut communicator)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Rank `rank`'s element `i`: no two alike, and sums that round.
fn element(rank: usize, i: usize) -> f32 {
    (i as f32).mul_add(0.37, rank as f32 * 1.113).sin() * 10_f32.powi((i % 7) as i32 - 3)
}

fn elements(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| element(rank, i)).collect()
}

/// A fold over the ranks in order, rounded at each step.
fn mean(world_size: usize, len: usize) -> Vec<f32> {
    let ranks: Vec<usize> = (0..world_size).collect();
    let sum = |i: usize| sum(&ranks, i);
    (0..len).map(|i| sum(i) / world_size as f32).collect()
}

fn sum(ranks: &[usize], i: usize) -> f32 {
    let others = ranks[1..].iter();
    others.fold(element(ranks[0], i), |sum, &rank| sum + element(rank, i))
}

/// The same within each host, and over the hosts from the one that a place's
/// block is numbered after.
fn mean_over_hosts(kind: Kind, world_size: usize, len: usize) -> Vec<f32> {
    let mut hosts: Vec<Vec<usize>> = Vec::new();
    for rank in 0..world_size {
        match hosts.iter_mut().find(|h| kind.shares_memory(h[0], rank)) {
            Some(host) => host.push(rank),
            None => hosts.push(vec![rank]),
        }
    }
    let flat = hosts.len() == 1 || hosts.iter().all(|host| host.len() == 1);
    if flat || len * 4 <= 32 << 10 {
        return mean(world_size, len);
    }
    let lanes = hosts.iter().map(Vec::len).min().unwrap();
    let mut means = Vec::new();
    for lane in 0..lanes {
        let bytes = slice(len * 4, lanes, lane);
        for block in 0..hosts.len() {
            for _ in slice(bytes.len(), hosts.len(), block).step_by(4) {
                let i = means.len();
                let mut parts = (0..hosts.len()).map(|h| sum(&hosts[(block + h) % hosts.len()], i));
                let first = parts.next().unwrap();
                means.push(parts.fold(first, |sum, part| sum + part) / world_size as f32);
            }
        }
    }
    means
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        0..40_usize,
        // Around the change from one hop to slices.
        8180..8204_usize,
        0..60_000_usize,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn all_reduce_is_the_fold_in_a_fixed_order(
        world_size in 1..9_usize,
        lens in proptest::collection::vec(lengths(), 1..4),
    ) {
        for kind in Kind::ALL {
            let results = run(world_size, kind, |communicator| {
                let rank = communicator.rank();
                lens.iter().map(|&len| {
                    let mut data = elements(rank, len);
                    let bytes = bytemuck::cast_slice_mut(&mut data);
                    communicator.all_reduce(DType::F32, bytes, ReduceOp::Mean).unwrap();
                    data
                }).collect::<Vec<_>>()
            });
            for result in results {
                for (data, &len) in result.iter().zip(&lens) {
                    let expected = mean_over_hosts(kind, world_size, len);
                    prop_assert_eq!(
                        bytemuck::cast_slice::<f32, u32>(data),
                        bytemuck::cast_slice::<f32, u32>(&expected),
                        "{:?}, {} ranks, {} elements", kind, world_size, len
                    );
                }
            }
        }
    }

    #[test]
    fn broadcast_gather_and_objects_move_what_was_given(
        world_size in 1..10_usize,
        root in any::<proptest::sample::Index>(),
        len in lengths(),
    ) {
        let root = root.index(world_size);
        for kind in Kind::ALL {
            run(world_size, kind, |communicator| {
                let rank = communicator.rank();
                let mut data = elements(rank, len);
                let bytes = bytemuck::cast_slice_mut(&mut data);
                communicator.broadcast(DType::F32, bytes, root).unwrap();
                assert_eq!(data, elements(root, len));

                let own = elements(rank, len / 4);
                let mut out = vec![0_f32; own.len() * world_size];
                let (own, out_bytes) = (bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut out));
                communicator.all_gather(DType::F32, own, out_bytes).unwrap();
                let expected: Vec<f32> = (0..world_size).flat_map(|r| elements(r, len / 4)).collect();
                assert_eq!(out, expected);

                communicator.barrier().unwrap();

                let object = |rank: usize| vec![rank as u8 + 1; len + 1000 * rank];
                let given = if rank == root { Ok(Some(object(root))) } else { Ok(None) };
                assert_eq!(communicator.broadcast_bytes(given, root).unwrap(), object(root));
                let all = communicator.all_gather_bytes(Ok(object(rank))).unwrap();
                assert_eq!(all, (0..world_size).map(object).collect::<Vec<_>>());
            });
        }
    }
}

/// Elements of `dtype`, `len` bytes of them, whose sums and products are exact in
/// the accumulators.
fn small_integers(dtype: DType, len: usize, rank: usize) -> Vec<u8> {
    let value = |i: usize| ((i * 7 + rank * 13 + i / 256) % 9) as u8;
    let bytes = |i: usize| match dtype {
        DType::F32 => f32::from(value(i)).to_ne_bytes().to_vec(),
        DType::F64 => f64::from(value(i)).to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from(value(i)).to_ne_bytes().to_vec(),
        DType::BF16 => half::bf16::from(value(i)).to_ne_bytes().to_vec(),
        DType::I32 => i32::from(value(i)).to_ne_bytes().to_vec(),
        DType::I64 => i64::from(value(i)).to_ne_bytes().to_vec(),
        DType::U8 => vec![value(i)],
    };
    (0..len / dtype.size()).flat_map(bytes).collect()
}

#[test]
fn all_dtypes_and_operations_agree_on_all_paths() {
    const OPS: [ReduceOp; 5] = [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
    ];
    const DTYPES: [DType; 7] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I32,
        DType::I64,
        DType::U8,
    ];
    for world_size in [2, 3, 5] {
        for kind in Kind::ALL {
            run(world_size, kind, |communicator| {
                for dtype in DTYPES {
                    for op in OPS {
                        // As one long message and as many short ones.
                        let len = 5000 * 8;
                        let rank = communicator.rank();
                        let source = match communicator.topology().is_hierarchical() {
                            // In another order there, with another rounding.
                            true => small_integers(dtype, len, rank),
                            false => (0..len)
                                .map(|i| (i * 7 + rank * 13 + i / 256) as u8 & 0x3f)
                                .collect(),
                        };
                        let mut words = vec![0_u64; len / 8];
                        let long: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
                        long.copy_from_slice(&source);
                        communicator.all_reduce(dtype, long, op).unwrap();
                        let mut words = vec![0_u64; len / 8];
                        let short: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
                        short.copy_from_slice(&source);
                        for piece in short.chunks_mut(8 * 999) {
                            communicator.all_reduce(dtype, piece, op).unwrap();
                        }
                        assert!(long == short, "{dtype} {op} over {world_size} ranks");
                    }
                }
            });
        }
    }
}

#[test]
fn different_calls_are_named_on_every_rank() {
    for kind in Kind::ALL {
        let errors = run(3, kind, |communicator| {
            communicator.barrier().unwrap();
            let mut data = [0_u8; 400];
            if communicator.rank() == 2 {
                communicator.all_gather(DType::F32, &data[..4], &mut [0; 12])
            } else {
                communicator.all_reduce(DType::F32, &mut data, ReduceOp::Sum)
            }
            .unwrap_err()
            .to_string()
        });
        for error in errors {
            assert_eq!(
                error,
                "rank 2 called all_gather #2 (f32, 1), ranks 0, 1 called all_reduce #2 (f32 sum, \
                 100): every rank has to make the same calls in the same order"
            );
        }
    }
}

#[test]
fn different_roots_are_an_error() {
    for kind in Kind::ALL {
        let errors = run(3, kind, |communicator| {
            let root = usize::from(communicator.rank() == 2);
            let error = communicator.broadcast(DType::U8, &mut [1, 2, 3], root);
            error.unwrap_err().to_string()
        });
        for error in errors {
            assert!(
                error.contains("rank 2 called broadcast #1 (u8, 3, root 1)"),
                "{error}"
            );
        }
    }
}
