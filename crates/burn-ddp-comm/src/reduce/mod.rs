//! The arithmetic of an all-reduce, on bytes whose element type is known at run
//! time.
//!
//! Whatever path the elements take within a host, each result is the same fold
//! over the ranks in ascending order, in the same accumulator type, rounded once:
//! so paths and transports agree bit by bit.

mod converting;
mod direct;
mod operator;

use crate::{DType, ReduceOp};

/// A reduction of one dtype by one operation over a number of ranks.
///
/// All byte slices hold whole, aligned elements: of the dtype, or of the
/// accumulator type where the parameter is called `accumulator`.
#[derive(Clone, Copy)]
pub(crate) struct Reduction {
    functions: Functions,
    world_size: usize,
}

#[derive(Clone, Copy)]
struct Functions {
    accumulator_size: usize,
    start: fn(accumulator: &mut [u8], source: &[u8]),
    fold: fn(accumulator: &mut [u8], source: &[u8]),
    merge: fn(accumulator: &mut [u8], earlier: &[u8]),
    finish: fn(target: &mut [u8], accumulator: &[u8], world_size: usize),
    pair: fn(target: &mut [u8], source: &[u8], source_first: bool, world_size: usize),
}

impl Reduction {
    /// The reduction of `dtype` by `op` over `world_size` ranks.
    pub(crate) fn new(dtype: DType, op: ReduceOp, world_size: usize) -> Self {
        let functions = match dtype {
            DType::F32 => direct::float::<f32>(op, world_size),
            DType::F64 => direct::float::<f64>(op, world_size),
            DType::F16 => converting::half::<half::f16>(op),
            DType::BF16 => converting::half::<half::bf16>(op),
            DType::I32 => converting::mean_or::<i32>(op),
            DType::I64 => converting::mean_or::<i64>(op),
            DType::U8 => converting::mean_or::<u8>(op),
        };
        Self {
            functions,
            world_size,
        }
    }

    /// Size of an accumulator element, in bytes.
    pub(crate) fn accumulator_size(&self) -> usize {
        self.functions.accumulator_size
    }

    /// Begins the fold with the elements of rank 0.
    pub(crate) fn start(&self, accumulator: &mut [u8], source: &[u8]) {
        (self.functions.start)(accumulator, source);
    }

    /// Folds the elements of the next rank in.
    pub(crate) fn fold(&self, accumulator: &mut [u8], source: &[u8]) {
        (self.functions.fold)(accumulator, source);
    }

    /// Folds a fold over some ranks onto one over others, `earlier`, of
    /// accumulator elements too.
    pub(crate) fn merge(&self, accumulator: &mut [u8], earlier: &[u8]) {
        (self.functions.merge)(accumulator, earlier);
    }

    /// Rounds the fold over all ranks into `target`.
    pub(crate) fn finish(&self, target: &mut [u8], accumulator: &[u8]) {
        (self.functions.finish)(target, accumulator, self.world_size);
    }

    /// The whole fold in one pass where there are two ranks: `target` holds one
    /// rank's elements and receives the result; `source_first` says whether
    /// `source` is rank 0's.
    pub(crate) fn pair(&self, target: &mut [u8], source: &[u8], source_first: bool) {
        (self.functions.pair)(target, source, source_first, self.world_size);
    }
}

#[cfg(test)]
mod tests;
