//! Every collective between processes, over both transports, against a
//! definition in a line.

mod ranks;

use burn_ddp_comm::{Element, ProcessGroup, ReduceOp, Transfer};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use ranks::{Rank, Spec, job};
use sha2::{Digest, Sha256};

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Mean,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// An element type, how to make one, and how a list of them is reduced.
trait Case: Element + PartialEq + std::fmt::Debug {
    fn random(rng: &mut StdRng) -> Self;
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
}

macro_rules! float_reduce {
    ($ty:ty, $op:expr, $values:expr) => {{
        let values: Vec<$ty> = $values;
        let fold = |f: fn($ty, $ty) -> $ty| values[1..].iter().fold(values[0], |a, &b| f(a, b));
        match $op {
            ReduceOp::Sum => fold(|a, b| a + b),
            ReduceOp::Mean => fold(|a, b| a + b) / values.len() as $ty,
            ReduceOp::Min => fold(<$ty>::min),
            ReduceOp::Max => fold(<$ty>::max),
            ReduceOp::Product => fold(|a, b| a * b),
        }
    }};
}

impl Case for f32 {
    fn random(rng: &mut StdRng) -> Self {
        rng.random_range(-2.0..2.0)
    }
    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        float_reduce!(f32, op, values.to_vec())
    }
}

impl Case for f64 {
    fn random(rng: &mut StdRng) -> Self {
        rng.random_range(-2.0..2.0)
    }
    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        float_reduce!(f64, op, values.to_vec())
    }
}

impl Case for f16 {
    fn random(rng: &mut StdRng) -> Self {
        Self::from_f32(rng.random_range(-2.0..2.0))
    }
    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        let wide = values.iter().map(|v| v.to_f32()).collect();
        Self::from_f32(float_reduce!(f32, op, wide))
    }
}

impl Case for bf16 {
    fn random(rng: &mut StdRng) -> Self {
        Self::from_f32(rng.random_range(-2.0..2.0))
    }
    fn reduce(op: ReduceOp, values: &[Self]) -> Self {
        let wide = values.iter().map(|v| v.to_f32()).collect();
        Self::from_f32(float_reduce!(f32, op, wide))
    }
}

macro_rules! integer_case {
    ($($ty:ty),*) => {$(
        impl Case for $ty {
            fn random(rng: &mut StdRng) -> Self {
                rng.random()
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                match op {
                    ReduceOp::Sum => values.iter().fold(0, |a, &b| a.wrapping_add(b)),
                    ReduceOp::Product => values.iter().fold(1, |a, &b| a.wrapping_mul(b)),
                    ReduceOp::Min => *values.iter().min().unwrap(),
                    ReduceOp::Max => *values.iter().max().unwrap(),
                    ReduceOp::Mean => {
                        let sum: i128 = values.iter().map(|&v| i128::from(v)).sum();
                        (sum / values.len() as i128) as Self
                    }
                }
            }
        }
    )*};
}

integer_case!(i32, i64, u8);

/// Every rank knows every rank's elements.
fn inputs<T: Case>(world_size: usize, seed: u64, len: usize) -> Vec<Vec<T>> {
    (0..world_size as u64)
        .map(|rank| {
            let mut rng = StdRng::seed_from_u64(seed * 1000 + rank);
            (0..len).map(|_| T::random(&mut rng)).collect()
        })
        .collect()
}

/// Lengths at the edges of what algorithms do, and random ones.
fn lengths(world_size: usize, rng: &mut StdRng) -> Vec<usize> {
    let n = world_size;
    let mut lengths = vec![0, 1, n - 1, n, n + 1, 8191, 8193];
    lengths.push(rng.random_range(2..300));
    lengths.push(rng.random_range(8_000..20_000));
    lengths
}

fn bytes<T: Element>(data: &[T]) -> &[u8] {
    bytemuck::cast_slice(data)
}

/// All collectives on `T`; every result's bytes go into `digest`.
fn check<T: Case>(group: &ProcessGroup, rng: &mut StdRng, digest: &mut Sha256) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for len in lengths(world_size, rng) {
        let inputs = inputs::<T>(world_size, rng.next_u64() % 1_000_000, len);
        for op in OPS {
            let mut data = inputs[rank].clone();
            group.all_reduce(&mut data, op).unwrap();
            let mut values = Vec::new();
            let expected: Vec<T> = (0..len)
                .map(|i| {
                    values.clear();
                    values.extend(inputs.iter().map(|input| input[i]));
                    T::reduce(op, &values)
                })
                .collect();
            assert!(bytes(&data) == bytes(&expected), "{op:?} of {len} elements");
            digest.update(bytes(&data));

            let root = rng.random_range(0..world_size);
            let mut data = inputs[rank].clone();
            group.reduce(&mut data, op, root).unwrap();
            if rank == root {
                assert!(bytes(&data) == bytes(&expected), "reduce {op:?} of {len}");
            }

            let block = len / world_size;
            let mut out = vec![T::zeroed(); block];
            let data = &inputs[rank][..block * world_size];
            group.reduce_scatter(data, &mut out, op).unwrap();
            let own = &expected[rank * block..][..block];
            assert!(bytes(&out) == bytes(own), "reduce_scatter {op:?} of {len}");
        }
        let root = rng.random_range(0..world_size);
        let mut data = inputs[rank].clone();
        group.broadcast(&mut data, root).unwrap();
        assert!(bytes(&data) == bytes(&inputs[root]), "broadcast of {len}");
        digest.update(bytes(&data));

        let mut out = vec![T::zeroed(); len * world_size];
        group.all_gather(&inputs[rank], &mut out).unwrap();
        assert!(
            bytes(&out) == bytes(&inputs.concat()),
            "all_gather of {len}"
        );
        digest.update(bytes(&out));
        check_moves(group, &inputs, rng.random_range(0..world_size));
        check_coalesced(group, &inputs, rng.random_range(0..world_size));
    }
}

/// What moves elements and reduces nothing. `inputs`: every rank's.
fn check_moves<T: Case>(group: &ProcessGroup, inputs: &[Vec<T>], root: usize) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let (own, len) = (&inputs[rank], inputs[0].len());

    let mut out = vec![T::zeroed(); if rank == root { len * world_size } else { 0 }];
    group.gather(own, &mut out, root).unwrap();
    if rank == root {
        assert!(bytes(&out) == bytes(&inputs.concat()), "gather of {len}");
    }
    // Back to where they came from.
    let mut back = vec![T::zeroed(); len];
    group.scatter(&out, &mut back, root).unwrap();
    assert!(bytes(&back) == bytes(own), "scatter of {len}");

    let block = len / world_size;
    let mut out = vec![T::zeroed(); block * world_size];
    let data = &own[..block * world_size];
    group.all_to_all(data, &mut out).unwrap();
    for (from, part) in out.chunks(block.max(1)).enumerate() {
        assert!(bytes(part) == bytes(&inputs[from][rank * block..][..block]));
    }

    // Of another length from every rank, and to every rank.
    let cut = |from: usize, to: usize| &inputs[from][..len / (1 + (from + 2 * to) % 5)];
    let all = group.all_gather_v(cut(rank, 0)).unwrap();
    for (from, part) in all.iter().enumerate() {
        assert!(bytes(part) == bytes(cut(from, 0)), "all_gather_v of {len}");
    }
    let parts: Vec<&[T]> = (0..world_size).map(|to| cut(rank, to)).collect();
    let all = group.all_to_all_v(&parts).unwrap();
    assert_eq!(all.len(), world_size);
    for (from, part) in all.iter().enumerate() {
        assert!(
            bytes(part) == bytes(cut(from, rank)),
            "all_to_all_v of {len}"
        );
    }

    // Round a ring, and with all at once.
    let (next, before) = (
        (rank + 1) % world_size,
        (rank + world_size - 1) % world_size,
    );
    let mut out = vec![T::zeroed(); len];
    group.send_recv(own, next, &mut out, before).unwrap();
    assert!(bytes(&out) == bytes(&inputs[before]), "send_recv of {len}");
    let mut outs = vec![vec![T::zeroed(); len]; world_size];
    let receive = outs.iter_mut().enumerate();
    let mut transfers: Vec<Transfer<'_, T>> = receive
        .map(|(from, data)| Transfer::Recv { data, from })
        .collect();
    transfers.extend((0..world_size).map(|to| Transfer::Send { data: own, to }));
    group.batch_send_recv(&mut transfers).unwrap();
    assert!(outs == inputs, "batch_send_recv of {len}");
}

fn check_coalesced<T: Case>(group: &ProcessGroup, inputs: &[Vec<T>], root: usize) {
    // Cuts that are no multiple of anything.
    let split = |data: &mut Vec<T>, run: &mut dyn FnMut(&mut [&mut [T]])| {
        let third = data.len() / 3;
        let (first, rest) = data.split_at_mut(third);
        let half = rest.len() / 2;
        let (second, last) = rest.split_at_mut(half);
        run(&mut [first, second, &mut [], last]);
    };
    let mut together = inputs[group.rank()].clone();
    split(&mut together, &mut |buffers| {
        group.all_reduce_coalesced(buffers, ReduceOp::Sum).unwrap();
    });
    let mut alone = inputs[group.rank()].clone();
    group.all_reduce(&mut alone, ReduceOp::Sum).unwrap();
    assert!(bytes(&together) == bytes(&alone), "all_reduce_coalesced");

    let mut data = inputs[group.rank()].clone();
    split(&mut data, &mut |buffers| {
        group.broadcast_coalesced(buffers, root).unwrap();
    });
    assert!(bytes(&data) == bytes(&inputs[root]), "broadcast_coalesced");
}

/// Longer than the rings hold.
fn check_long(group: &ProcessGroup, digest: &mut Sha256) {
    let len = 1_500_007;
    let inputs = inputs::<f32>(group.world_size(), 77, len);
    let mut data = inputs[group.rank()].clone();
    group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
    for i in (0..len).step_by(997) {
        let values: Vec<f32> = inputs.iter().map(|input| input[i]).collect();
        assert_eq!(
            data[i].to_bits(),
            f32::reduce(ReduceOp::Mean, &values).to_bits()
        );
    }
    digest.update(bytes(&data));
    group.broadcast(&mut data, 0).unwrap();
    digest.update(bytes(&data));
    check_moves(group, &inputs, 0);
}

fn check_objects(group: &ProcessGroup) {
    let object = |rank: usize| (format!("rank {rank}"), vec![rank as u32; 5000 * rank]);
    let rank = group.rank();
    for root in 0..group.world_size() {
        let gathered = group.gather_object(&object(rank), root).unwrap();
        let expected = (0..group.world_size()).map(object).collect::<Vec<_>>();
        assert_eq!(gathered, (rank == root).then_some(expected));
        let given = (rank == root).then(|| object(root));
        assert_eq!(group.broadcast_object(given, root).unwrap(), object(root));
        // What others give is ignored.
        let received = group.broadcast_object(Some(object(rank)), root).unwrap();
        assert_eq!(received, object(root));
    }
    let all = group.all_gather_object(&object(rank)).unwrap();
    assert_eq!(all, (0..group.world_size()).map(object).collect::<Vec<_>>());
}

/// All collectives on one rank; returns a digest of the results.
fn rank_main(rank: &Rank) -> String {
    let group = rank.group();
    assert_eq!(group.rank(), rank.rank);
    assert_eq!(group.world_size(), rank.spec.world_size);
    let how = if rank.spec.tcp {
        "TCP to "
    } else {
        "shared memory to "
    };
    let summary = group.transport_summary();
    assert!(
        group.world_size() == 1 || summary.starts_with(how),
        "{summary}"
    );

    let mut rng = StdRng::seed_from_u64(5);
    let mut digest = Sha256::new();
    check::<f32>(&group, &mut rng, &mut digest);
    check::<f64>(&group, &mut rng, &mut digest);
    check::<f16>(&group, &mut rng, &mut digest);
    check::<bf16>(&group, &mut rng, &mut digest);
    check::<i32>(&group, &mut rng, &mut digest);
    check::<i64>(&group, &mut rng, &mut digest);
    check::<u8>(&group, &mut rng, &mut digest);
    check_long(&group, &mut digest);
    check_objects(&group);
    group.barrier().unwrap();
    format!("{:x?}", digest.finalize())
}

fn world_of(world_size: usize, name: &str) {
    let mut digests: Vec<String> = Vec::new();
    for tcp in [false, true] {
        job(name, Spec::new(world_size, tcp), rank_main, |job| {
            digests.extend(job.results::<String>());
        });
    }
    // The same bits on every rank and over every transport.
    assert!(digests.iter().all(|digest| *digest == digests[0]));
}

#[test]
fn world_of_1() {
    world_of(1, "world_of_1");
}

#[test]
fn world_of_2() {
    world_of(2, "world_of_2");
}

#[test]
fn world_of_3() {
    world_of(3, "world_of_3");
}

#[test]
fn world_of_4() {
    world_of(4, "world_of_4");
}

#[test]
fn world_of_5() {
    world_of(5, "world_of_5");
}

#[test]
fn world_of_8() {
    world_of(8, "world_of_8");
}

/// A pair whose memory can't be shared falls back to TCP, and the others don't.
#[test]
fn a_rank_without_shared_memory_is_reached_over_tcp() {
    let spec = Spec {
        memoryless: Some(1),
        ..Spec::new(3, false)
    };
    let main = |rank: &Rank| {
        let group = rank.group();
        let mut data = vec![rank.rank as f32; 100_000];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, vec![3.0; 100_000]);
        for len in 0..100 {
            let mut data = vec![rank.rank as i64; len];
            group.all_reduce(&mut data, ReduceOp::Max).unwrap();
            assert_eq!(data, vec![2; len]);
        }
        group.barrier().unwrap();
        group.transport_summary()
    };
    let name = "a_rank_without_shared_memory_is_reached_over_tcp";
    job(name, spec, main, |job| {
        assert_eq!(
            job.results::<String>(),
            [
                "shared memory to rank 2; TCP to rank 1",
                "TCP to ranks 0, 2",
                "shared memory to rank 0; TCP to rank 1",
            ]
        );
    });
}
