//! Synthetic samples, the same on every rank.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Side of an image, in pixels.
pub(crate) const SIDE: usize = 12;
/// Number of labels.
pub(crate) const CLASSES: usize = 10;

/// Images and their labels.
#[derive(Clone, Debug)]
pub(crate) struct Samples {
    /// `[count, 1, SIDE, SIDE]`, from -1 to 1.
    pub(crate) images: Tensor<4>,
    /// `[count]`.
    pub(crate) labels: Tensor<1, Int>,
}

/// The samples of these numbers: each a function of its number alone.
pub(crate) fn samples(numbers: Range<usize>, device: &Device) -> Samples {
    let count = numbers.len();
    let mut pixels = Vec::with_capacity(count * SIDE * SIDE);
    let mut labels = Vec::with_capacity(count);
    for number in numbers {
        let mut rng = ChaCha8Rng::seed_from_u64(number as u64);
        labels.push(rng.random_range(0..CLASSES as i64));
        pixels.extend((0..SIDE * SIDE).map(|_| rng.random_range(-1.0f32..1.0)));
    }
    Samples {
        images: Tensor::from_data(TensorData::new(pixels, [count, 1, SIDE, SIDE]), device),
        labels: Tensor::from_data(TensorData::new(labels, [count]), device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_depends_on_its_number_alone() {
        let device = Device::flex();
        let values = |s: Samples| s.images.into_data().try_into_vec::<f32>().unwrap();
        let together = values(samples(3..6, &device));
        let alone = values(samples(4..5, &device));
        assert_eq!(together[SIDE * SIDE..2 * SIDE * SIDE], alone);
        assert_ne!(together[..SIDE * SIDE], alone);
    }
}
