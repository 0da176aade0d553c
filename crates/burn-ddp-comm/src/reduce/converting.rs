//! Reductions that accumulate in a wider type: half floats in `f32`, the mean
//! of integers in integers that can't overflow.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::operator::{Max, Min, Number, Operator, Product, Sum};
use super::{Functions, direct};
use crate::ReduceOp;

/// Elements converted at a time, so that the wide values stay in registers and
/// first-level cache.
const BLOCK: usize = 256;

/// An element type that accumulates in [`Wide`](Self::Wide).
trait Narrow: bytemuck::Pod {
    type Wide: Number;
    fn widen(source: &[Self], target: &mut [Self::Wide]);
    /// Stores `wide / divisor`.
    fn narrow(wide: &mut [Self::Wide], divisor: usize, target: &mut [Self]);
}

macro_rules! half {
    ($($ty:ty),*) => {$(
        impl Narrow for $ty {
            type Wide = f32;

            fn widen(source: &[Self], target: &mut [f32]) {
                source.convert_to_f32_slice(target);
            }

            fn narrow(wide: &mut [f32], divisor: usize, target: &mut [Self]) {
                if divisor != 1 {
                    let divisor = divisor as f32;
                    for value in wide.iter_mut() {
                        *value /= divisor;
                    }
                }
                target.convert_from_f32_slice(wide);
            }
        }
    )*};
}

macro_rules! integer {
    ($($ty:ty => $wide:ty),*) => {$(
        impl Narrow for $ty {
            type Wide = $wide;

            fn widen(source: &[Self], target: &mut [$wide]) {
                for (target, &value) in target.iter_mut().zip(source) {
                    *target = <$wide>::from(value);
                }
            }

            fn narrow(wide: &mut [$wide], divisor: usize, target: &mut [Self]) {
                for (target, &value) in target.iter_mut().zip(&*wide) {
                    // A mean of `Self`s fits `Self`.
                    *target = (value / divisor as $wide) as Self;
                }
            }
        }
    )*};
}

half!(f16, bf16);
integer!(i32 => i64, i64 => i128, u8 => i64);

/// The functions of a half float type.
#[expect(private_bounds, reason = "the trait is this file's own business")]
pub(super) fn half<E: Narrow>(op: ReduceOp) -> Functions {
    match op {
        ReduceOp::Sum => functions::<E, Sum, false>(),
        ReduceOp::Mean => functions::<E, Sum, true>(),
        ReduceOp::Product => functions::<E, Product, false>(),
        ReduceOp::Min => functions::<E, Min, false>(),
        ReduceOp::Max => functions::<E, Max, false>(),
    }
}

/// The functions of an integer type: its mean accumulates in a wider one.
#[expect(private_bounds, reason = "the trait is this file's own business")]
pub(super) fn mean_or<E: Narrow + Number>(op: ReduceOp) -> Functions {
    direct::integer::<E>(op).unwrap_or_else(functions::<E, Sum, true>)
}

fn functions<E: Narrow, O: Operator, const MEAN: bool>() -> Functions {
    Functions {
        accumulator_size: size_of::<E::Wide>(),
        start: start::<E>,
        fold: fold::<E, O>,
        merge: direct::merge::<E::Wide, O>,
        finish: finish::<E, MEAN>,
        pair: pair::<E, O, MEAN>,
    }
}

fn start<E: Narrow>(accumulator: &mut [u8], source: &[u8]) {
    E::widen(
        bytemuck::cast_slice(source),
        bytemuck::cast_slice_mut(accumulator),
    );
}

fn fold<E: Narrow, O: Operator>(accumulator: &mut [u8], source: &[u8]) {
    let accumulator: &mut [E::Wide] = bytemuck::cast_slice_mut(accumulator);
    let source: &[E] = bytemuck::cast_slice(source);
    let mut block = [bytemuck::Zeroable::zeroed(); BLOCK];
    for (accumulator, source) in accumulator.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        let block = &mut block[..source.len()];
        E::widen(source, block);
        for (left, &right) in accumulator.iter_mut().zip(&*block) {
            *left = O::combine(*left, right);
        }
    }
}

fn finish<E: Narrow, const MEAN: bool>(target: &mut [u8], accumulator: &[u8], world_size: usize) {
    let target: &mut [E] = bytemuck::cast_slice_mut(target);
    let accumulator: &[E::Wide] = bytemuck::cast_slice(accumulator);
    let divisor = if MEAN { world_size } else { 1 };
    let mut block = [bytemuck::Zeroable::zeroed(); BLOCK];
    for (target, accumulator) in target.chunks_mut(BLOCK).zip(accumulator.chunks(BLOCK)) {
        let block = &mut block[..accumulator.len()];
        block.copy_from_slice(accumulator);
        E::narrow(block, divisor, target);
    }
}

fn pair<E: Narrow, O: Operator, const MEAN: bool>(
    target: &mut [u8],
    source: &[u8],
    source_first: bool,
    world_size: usize,
) {
    let target: &mut [E] = bytemuck::cast_slice_mut(target);
    let source: &[E] = bytemuck::cast_slice(source);
    let divisor = if MEAN { world_size } else { 1 };
    let mut own = [bytemuck::Zeroable::zeroed(); BLOCK];
    let mut other = [bytemuck::Zeroable::zeroed(); BLOCK];
    for (target, source) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
        let own = &mut own[..source.len()];
        let other = &mut other[..source.len()];
        E::widen(target, own);
        E::widen(source, other);
        for (own, &other) in own.iter_mut().zip(&*other) {
            *own = if source_first {
                O::combine(other, *own)
            } else {
                O::combine(*own, other)
            };
        }
        E::narrow(own, divisor, target);
    }
}
