//! Reductions that accumulate in the element type itself.

use super::Functions;
use super::operator::{Max, Min, Number, Operator, Product, Sum};
use crate::ReduceOp;

/// What is done to the fold before it is stored.
trait Scale<N> {
    fn scale(value: N, by: N) -> N;
}

struct Keep;
struct Divide;
/// By the reciprocal: exact, and so the same bits as a division, where the
/// divisor is a power of two.
struct Multiply;

impl<N> Scale<N> for Keep {
    #[inline(always)]
    fn scale(value: N, _by: N) -> N {
        value
    }
}

/// A float type.
pub(super) trait Float:
    Number + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self>
{
    fn from_count(count: usize) -> Self;
}

impl Float for f32 {
    fn from_count(count: usize) -> Self {
        count as Self
    }
}

impl Float for f64 {
    fn from_count(count: usize) -> Self {
        count as Self
    }
}

impl<N: Float> Scale<N> for Divide {
    #[inline(always)]
    fn scale(value: N, by: N) -> N {
        value / by
    }
}

impl<N: Float> Scale<N> for Multiply {
    #[inline(always)]
    fn scale(value: N, by: N) -> N {
        value * by
    }
}

/// Where the second argument of [`Scale::scale`] comes from.
trait Factor<N> {
    fn factor(world_size: usize) -> N;
}

impl<N: Number> Factor<N> for Keep {
    fn factor(_world_size: usize) -> N {
        N::zeroed()
    }
}

impl<N: Float> Factor<N> for Divide {
    fn factor(world_size: usize) -> N {
        N::from_count(world_size)
    }
}

impl<N: Float> Factor<N> for Multiply {
    fn factor(world_size: usize) -> N {
        N::from_count(1) / N::from_count(world_size)
    }
}

/// The functions of a float type.
pub(super) fn float<N: Float>(op: ReduceOp, world_size: usize) -> Functions {
    match op {
        ReduceOp::Mean if world_size.is_power_of_two() => functions::<N, Sum, Multiply>(),
        ReduceOp::Mean => functions::<N, Sum, Divide>(),
        ReduceOp::Sum => functions::<N, Sum, Keep>(),
        ReduceOp::Product => functions::<N, Product, Keep>(),
        ReduceOp::Min => functions::<N, Min, Keep>(),
        ReduceOp::Max => functions::<N, Max, Keep>(),
    }
}

/// The functions of an integer type, but for the mean, for which `None` is
/// returned.
pub(super) fn integer<N: Number>(op: ReduceOp) -> Option<Functions> {
    match op {
        ReduceOp::Sum => Some(functions::<N, Sum, Keep>()),
        ReduceOp::Product => Some(functions::<N, Product, Keep>()),
        ReduceOp::Min => Some(functions::<N, Min, Keep>()),
        ReduceOp::Max => Some(functions::<N, Max, Keep>()),
        ReduceOp::Mean => None,
    }
}

fn functions<N: Number, O: Operator, S: Scale<N> + Factor<N>>() -> Functions {
    Functions {
        accumulator_size: size_of::<N>(),
        start: |accumulator, source| accumulator.copy_from_slice(source),
        fold: fold::<N, O>,
        merge: merge::<N, O>,
        finish: finish::<N, S>,
        pair: pair::<N, O, S>,
    }
}

fn fold<N: Number, O: Operator>(accumulator: &mut [u8], source: &[u8]) {
    let accumulator: &mut [N] = bytemuck::cast_slice_mut(accumulator);
    let source: &[N] = bytemuck::cast_slice(source);
    for (left, &right) in accumulator.iter_mut().zip(source) {
        *left = O::combine(*left, right);
    }
}

/// Combines `earlier` with what is in `accumulator`, in this order.
pub(super) fn merge<N: Number, O: Operator>(accumulator: &mut [u8], earlier: &[u8]) {
    let accumulator: &mut [N] = bytemuck::cast_slice_mut(accumulator);
    let earlier: &[N] = bytemuck::cast_slice(earlier);
    for (right, &left) in accumulator.iter_mut().zip(earlier) {
        *right = O::combine(left, *right);
    }
}

fn finish<N: Number, S: Scale<N> + Factor<N>>(
    target: &mut [u8],
    accumulator: &[u8],
    world_size: usize,
) {
    let target: &mut [N] = bytemuck::cast_slice_mut(target);
    let accumulator: &[N] = bytemuck::cast_slice(accumulator);
    let factor = S::factor(world_size);
    for (target, &value) in target.iter_mut().zip(accumulator) {
        *target = S::scale(value, factor);
    }
}

fn pair<N: Number, O: Operator, S: Scale<N> + Factor<N>>(
    target: &mut [u8],
    source: &[u8],
    source_first: bool,
    world_size: usize,
) {
    let target: &mut [N] = bytemuck::cast_slice_mut(target);
    let source: &[N] = bytemuck::cast_slice(source);
    let factor = S::factor(world_size);
    if source_first {
        for (own, &other) in target.iter_mut().zip(source) {
            *own = S::scale(O::combine(other, *own), factor);
        }
    } else {
        for (own, &other) in target.iter_mut().zip(source) {
            *own = S::scale(O::combine(*own, other), factor);
        }
    }
}
