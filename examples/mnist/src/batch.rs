//! Batches of images as tensors.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::dataset::{Item, SIDE};

/// Mean and standard deviation of MNIST's pixels, scaled to `0..=1`.
const MEAN: f32 = 0.1307;
const DEVIATION: f32 = 0.3081;
/// A pixel of the background, normalised.
pub(crate) const BACKGROUND: f32 = -MEAN / DEVIATION;

/// Images and their labels.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// `[batch, 1, SIDE, SIDE]`, normalised to mean 0 and variance 1.
    pub(crate) images: Tensor<4>,
    /// `[batch]`.
    pub(crate) labels: Tensor<1, Int>,
}

/// Makes a [`Batch`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ImageBatcher;

impl Batcher<Item, Batch> for ImageBatcher {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        let count = items.len();
        let pixels: Vec<f32> = items
            .iter()
            .flat_map(|item| &item.pixels)
            .map(|&pixel| (f32::from(pixel) / 255.0 - MEAN) / DEVIATION)
            .collect();
        let labels: Vec<i64> = items.iter().map(|item| item.label.into()).collect();
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, [count, 1, SIDE, SIDE]), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_are_normalised_and_labels_kept() {
        let item = |pixel, label| Item {
            pixels: vec![pixel; SIDE * SIDE],
            label,
        };
        let batch = ImageBatcher.batch(vec![item(0, 3), item(255, 9)], &Device::flex());
        assert_eq!(batch.images.dims(), [2, 1, SIDE, SIDE]);
        let data = batch.images.into_data().try_into_vec::<f32>().unwrap();
        assert!((data[0] - BACKGROUND).abs() < 1e-6);
        assert!((data[SIDE * SIDE] - (1.0 - MEAN) / DEVIATION).abs() < 1e-6);
        let labels: Vec<i64> = batch.labels.into_data().iter::<i64>().collect();
        assert_eq!(labels, [3, 9]);
    }
}
