//! The memory of a bucket, and its all-reduce in flight.

use burn_ddp_comm::{DType, Element, ReduceOp, Work};
use half::{bf16, f16};

use crate::{ProcessGroup, Result};

/// The elements of a bucket.
#[derive(Debug)]
pub(crate) enum BucketBuffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// Runs `$body` with `$data` bound to the vector, whatever its type.
macro_rules! with_elements {
    ($buffer:expr, $data:ident => $body:expr) => {
        match $buffer {
            BucketBuffer::F32($data) => $body,
            BucketBuffer::F64($data) => $body,
            BucketBuffer::F16($data) => $body,
            BucketBuffer::BF16($data) => $body,
        }
    };
}

impl BucketBuffer {
    /// A buffer of `len` zeros; `None` where `dtype` is no float type.
    pub(crate) fn zeros(dtype: DType, len: usize) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32(vec![0.0; len])),
            DType::F64 => Some(Self::F64(vec![0.0; len])),
            DType::F16 => Some(Self::F16(vec![f16::ZERO; len])),
            DType::BF16 => Some(Self::BF16(vec![bf16::ZERO; len])),
            DType::I32 | DType::I64 | DType::U8 => None,
        }
    }

    /// Copies `bytes` to the elements from `start` on, in native byte order.
    pub(crate) fn write(&mut self, start: usize, len: usize, bytes: &[u8]) {
        with_elements!(self, data => {
            bytemuck::cast_slice_mut::<_, u8>(&mut data[start..start + len]).copy_from_slice(bytes);
        });
    }

    /// Adds `bytes` to the elements from `start` on.
    pub(crate) fn accumulate(&mut self, start: usize, len: usize, bytes: &[u8]) {
        with_elements!(self, data => add(&mut data[start..start + len], bytes));
    }

    /// Sets the elements from `start` on to zero.
    pub(crate) fn zero(&mut self, start: usize, len: usize) {
        with_elements!(self, data => data[start..start + len].fill(Default::default()));
    }

    /// Sets the flag at `index` to one or zero.
    pub(crate) fn set_flag(&mut self, index: usize, used: bool) {
        let one = f16::from_f32(if used { 1.0 } else { 0.0 });
        match self {
            Self::F32(data) => data[index] = one.into(),
            Self::F64(data) => data[index] = one.into(),
            Self::F16(data) => data[index] = one,
            Self::BF16(data) => data[index] = bf16::from_f32(one.into()),
        }
    }

    /// Whether the flag at `index` is anything but zero.
    pub(crate) fn flag(&self, index: usize) -> bool {
        match self {
            Self::F32(data) => data[index] != 0.0,
            Self::F64(data) => data[index] != 0.0,
            Self::F16(data) => data[index] != f16::ZERO,
            Self::BF16(data) => data[index] != bf16::ZERO,
        }
    }

    /// The elements from `start` on times `scale`, as bytes.
    pub(crate) fn read_scaled(&self, start: usize, len: usize, scale: f64) -> Vec<u8> {
        with_elements!(self, data => scaled(&data[start..start + len], scale))
    }

    /// Starts the all-reduce of the whole buffer.
    pub(crate) fn all_reduce(self, group: &ProcessGroup, op: ReduceOp) -> PendingBuffer {
        match self {
            Self::F32(data) => PendingBuffer::F32(group.all_reduce_async(data, op)),
            Self::F64(data) => PendingBuffer::F64(group.all_reduce_async(data, op)),
            Self::F16(data) => PendingBuffer::F16(group.all_reduce_async(data, op)),
            Self::BF16(data) => PendingBuffer::BF16(group.all_reduce_async(data, op)),
        }
    }
}

/// The all-reduce of a [`BucketBuffer`] in flight.
pub(crate) enum PendingBuffer {
    F32(Work<Vec<f32>>),
    F64(Work<Vec<f64>>),
    F16(Work<Vec<f16>>),
    BF16(Work<Vec<bf16>>),
}

impl PendingBuffer {
    /// Waits for the end of the all-reduce.
    pub(crate) fn wait(self) -> Result<BucketBuffer> {
        Ok(match self {
            Self::F32(work) => BucketBuffer::F32(work.wait()?),
            Self::F64(work) => BucketBuffer::F64(work.wait()?),
            Self::F16(work) => BucketBuffer::F16(work.wait()?),
            Self::BF16(work) => BucketBuffer::BF16(work.wait()?),
        })
    }
}

/// What accumulating and scaling need of an element.
trait Float: Element {
    fn plus(self, other: Self) -> Self;
    fn times(self, scale: f64) -> Self;
}

impl Float for f32 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn times(self, scale: f64) -> Self {
        self * scale as f32
    }
}

impl Float for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn times(self, scale: f64) -> Self {
        self * scale
    }
}

impl Float for f16 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn times(self, scale: f64) -> Self {
        Self::from_f32(self.to_f32() * scale as f32)
    }
}

impl Float for bf16 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
    fn times(self, scale: f64) -> Self {
        Self::from_f32(self.to_f32() * scale as f32)
    }
}

fn add<T: Float>(target: &mut [T], bytes: &[u8]) {
    match bytemuck::try_cast_slice::<u8, T>(bytes) {
        Ok(values) => {
            for (target, value) in target.iter_mut().zip(values) {
                *target = target.plus(*value);
            }
        }
        // Tensor data is aligned as a rule; where it is not, element by element.
        Err(_) => {
            for (target, value) in target.iter_mut().zip(bytes.chunks_exact(size_of::<T>())) {
                *target = target.plus(bytemuck::pod_read_unaligned(value));
            }
        }
    }
}

fn scaled<T: Float>(values: &[T], scale: f64) -> Vec<u8> {
    if scale == 1.0 {
        return bytemuck::cast_slice(values).to_vec();
    }
    let mut bytes = Vec::with_capacity(size_of_val(values));
    for value in values {
        bytes.extend_from_slice(bytemuck::bytes_of(&value.times(scale)));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_type_writes_adds_scales_and_flags() {
        fn check<T: Float + From<f16> + PartialEq + std::fmt::Debug>() {
            let value = |x: f32| T::from(f16::from_f32(x));
            let mut buffer = BucketBuffer::zeros(T::DTYPE, 5).expect("a float type");
            let ones = [value(1.0), value(2.0), value(3.0)];
            buffer.write(1, 3, bytemuck::cast_slice(&ones));
            buffer.accumulate(1, 3, bytemuck::cast_slice(&ones));
            let bytes = buffer.read_scaled(0, 5, 0.5);
            let read: Vec<T> = bytes
                .chunks_exact(size_of::<T>())
                .map(bytemuck::pod_read_unaligned)
                .collect();
            assert_eq!(
                read,
                [value(0.0), value(1.0), value(2.0), value(3.0), value(0.0)]
            );
            buffer.set_flag(4, true);
            assert!(buffer.flag(4) && !buffer.flag(0));
            buffer.zero(1, 4);
            assert!((0..5).all(|i| !buffer.flag(i)));
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();

        // `bf16` has no lossless conversion from `f16`.
        let mut buffer = BucketBuffer::zeros(DType::BF16, 2).expect("a float type");
        let value = bf16::from_f32(1.5);
        buffer.write(0, 1, bytemuck::bytes_of(&value));
        buffer.accumulate(0, 1, bytemuck::bytes_of(&value));
        buffer.set_flag(1, true);
        assert!(buffer.flag(1));
        let bytes = buffer.read_scaled(0, 1, 0.5);
        assert_eq!(bytemuck::pod_read_unaligned::<bf16>(&bytes), value);
    }

    #[test]
    fn unaligned_bytes_are_added_too() {
        let values = [1.0f32, 2.0];
        let mut bytes = vec![0u8];
        bytes.extend_from_slice(bytemuck::cast_slice(&values));
        // One of the two starts is not aligned.
        for start in [0, 1] {
            let mut shifted = vec![0u8; start];
            shifted.extend_from_slice(&bytes[1..]);
            let mut target = [10.0f32, 20.0];
            add(&mut target, &shifted[start..]);
            assert_eq!(target, [11.0, 22.0]);
        }
    }

    #[test]
    fn integers_have_no_bucket() {
        for dtype in [DType::I32, DType::I64, DType::U8] {
            assert!(BucketBuffer::zeros(dtype, 1).is_none());
        }
    }
}
