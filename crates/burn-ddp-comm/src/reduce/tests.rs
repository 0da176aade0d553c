//! Every dtype and operation against a plain definition, and every path against
//! the others.

use half::{bf16, f16};
use proptest::prelude::*;

use super::Reduction;
use crate::{Element, ReduceOp};

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Mean,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// The result of folding `ranks` with the general path.
fn folded<T: Element>(op: ReduceOp, ranks: &[Vec<T>]) -> Vec<T> {
    let reduction = Reduction::new(T::DTYPE, op, ranks.len());
    let bytes = ranks[0].len() * reduction.accumulator_size();
    let mut scratch = vec![0_u128; bytes.div_ceil(16)];
    let accumulator = &mut bytemuck::cast_slice_mut(&mut scratch)[..bytes];
    reduction.start(accumulator, bytemuck::cast_slice(&ranks[0]));
    for rank in &ranks[1..] {
        reduction.fold(accumulator, bytemuck::cast_slice(rank));
    }
    let mut result = ranks[0].clone();
    reduction.finish(bytemuck::cast_slice_mut(&mut result), accumulator);
    result
}

fn check<T: Element + PartialEq + std::fmt::Debug>(
    ranks: &[Vec<T>],
    define: impl Fn(ReduceOp, &[T]) -> T,
) {
    for op in OPS {
        let expected: Vec<T> = (0..ranks[0].len())
            .map(|i| define(op, &ranks.iter().map(|r| r[i]).collect::<Vec<_>>()))
            .collect();
        let result = folded(op, ranks);
        assert_eq!(
            bytemuck::cast_slice::<T, u8>(&result),
            bytemuck::cast_slice::<T, u8>(&expected),
            "{op}: {result:?} is not {expected:?}"
        );
        if let [first, second] = ranks {
            let reduction = Reduction::new(T::DTYPE, op, 2);
            for (own, other, other_first) in [(first, second, false), (second, first, true)] {
                let mut target = own.clone();
                reduction.pair(
                    bytemuck::cast_slice_mut(&mut target),
                    bytemuck::cast_slice(other),
                    other_first,
                );
                assert_eq!(
                    bytemuck::cast_slice::<T, u8>(&target),
                    bytemuck::cast_slice::<T, u8>(&expected),
                    "{op} of a pair"
                );
            }
        }
    }
}

fn float(op: ReduceOp, values: &[f32]) -> f32 {
    let fold = |f: fn(f32, f32) -> f32| values[1..].iter().fold(values[0], |a, &b| f(a, b));
    match op {
        ReduceOp::Sum => fold(|a, b| a + b),
        ReduceOp::Mean => fold(|a, b| a + b) / values.len() as f32,
        ReduceOp::Min => fold(f32::min),
        ReduceOp::Max => fold(f32::max),
        ReduceOp::Product => fold(|a, b| a * b),
    }
}

fn integer(op: ReduceOp, values: &[i128]) -> i128 {
    match op {
        ReduceOp::Sum => values.iter().fold(0, |a, &b| a.wrapping_add(b)),
        ReduceOp::Mean => values.iter().sum::<i128>() / values.len() as i128,
        ReduceOp::Min => values.iter().copied().min().unwrap(),
        ReduceOp::Max => values.iter().copied().max().unwrap(),
        ReduceOp::Product => values.iter().fold(1, |a, &b| a.wrapping_mul(b)),
    }
}

/// The same lists, one per rank, of one random length.
fn ranks<T: std::fmt::Debug + Clone>(
    element: impl Strategy<Value = T> + Clone,
) -> impl Strategy<Value = Vec<Vec<T>>> {
    (1..7_usize, 0..600_usize).prop_flat_map(move |(world, len)| {
        let rank = proptest::collection::vec(element.clone(), len);
        proptest::collection::vec(rank, world)
    })
}

macro_rules! integer_matches {
    ($($name:ident: $ty:ty),*) => { proptest! { $(
        #[test]
        fn $name(ranks in ranks(any::<$ty>())) {
            check::<$ty>(&ranks, |op, values| {
                let wide: Vec<i128> = values.iter().map(|&v| i128::from(v)).collect();
                integer(op, &wide) as $ty
            });
        }
    )* }};
}

integer_matches!(i32_matches: i32, i64_matches: i64, u8_matches: u8);

proptest! {
    #[test]
    fn f32_matches(ranks in ranks(-1e10_f32..1e10)) {
        check::<f32>(&ranks, float);
    }

    #[test]
    fn f64_matches(ranks in ranks(-1e10_f64..1e10)) {
        check::<f64>(&ranks, |op, values| {
            let fold = |f: fn(f64, f64) -> f64| values[1..].iter().fold(values[0], |a, &b| f(a, b));
            match op {
                ReduceOp::Sum => fold(|a, b| a + b),
                ReduceOp::Mean => fold(|a, b| a + b) / values.len() as f64,
                ReduceOp::Min => fold(f64::min),
                ReduceOp::Max => fold(f64::max),
                ReduceOp::Product => fold(|a, b| a * b),
            }
        });
    }

    #[test]
    fn f16_accumulates_in_f32(ranks in ranks((-9.0_f32..9.0).prop_map(f16::from_f32))) {
        check::<f16>(&ranks, |op, values| {
            let wide: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            f16::from_f32(float(op, &wide))
        });
    }

    #[test]
    fn bf16_accumulates_in_f32(ranks in ranks((-9.0_f32..9.0).prop_map(bf16::from_f32))) {
        check::<bf16>(&ranks, |op, values| {
            let wide: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            bf16::from_f32(float(op, &wide))
        });
    }
}

#[test]
fn not_a_number_is_never_hidden() {
    for op in OPS {
        for ranks in [[vec![f32::NAN], vec![1.0]], [vec![1.0], vec![f32::NAN]]] {
            assert!(folded(op, &ranks)[0].is_nan(), "{op}");
        }
    }
}
