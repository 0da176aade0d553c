//! How an all-reduce combines the ranks' elements.

use std::fmt;

/// The reduction of an all-reduce.
///
/// Elements are combined in rank order, so the result is bitwise identical on
/// every rank and from run to run. Half types accumulate in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum over ranks. Integers wrap.
    Sum,
    /// The sum over ranks divided by their number. For integers, rounded towards zero.
    Mean,
    /// The smallest element.
    Min,
    /// The largest element.
    Max,
    /// The product over ranks. Integers wrap.
    Product,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        })
    }
}
