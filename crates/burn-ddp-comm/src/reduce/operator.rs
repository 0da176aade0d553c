//! The element-wise operations.

/// A number that reductions combine.
pub(super) trait Number: bytemuck::Pod {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
}

/// A binary operation on numbers.
pub(super) trait Operator {
    fn combine<N: Number>(left: N, right: N) -> N;
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;

impl Operator for Sum {
    #[inline(always)]
    fn combine<N: Number>(left: N, right: N) -> N {
        left.add(right)
    }
}

impl Operator for Product {
    #[inline(always)]
    fn combine<N: Number>(left: N, right: N) -> N {
        left.multiply(right)
    }
}

impl Operator for Min {
    #[inline(always)]
    fn combine<N: Number>(left: N, right: N) -> N {
        left.smaller(right)
    }
}

impl Operator for Max {
    #[inline(always)]
    fn combine<N: Number>(left: N, right: N) -> N {
        left.larger(right)
    }
}

macro_rules! float {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            // Not-a-number wins over every number, on either side: a diverged
            // rank must not be hidden by the others.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
        }
    )*};
}

macro_rules! integer {
    ($($ty:ty),*) => {$(
        impl Number for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}

float!(f32, f64);
integer!(i32, i64, i128, u8);
