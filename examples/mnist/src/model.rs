//! The network.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

use crate::batch::Batch;
use crate::dataset::CLASSES;

/// Channels after the first and the second convolution.
const CHANNELS: [usize; 2] = [16, 32];
/// Side of the second convolution's output after pooling: 28 → 24 → 12 → 8 → 4.
const POOLED_SIDE: usize = 4;
const HIDDEN: usize = 128;

/// Two convolutions with pooling and two linear layers, after LeNet-5 (LeCun et
/// al. 1998, "Gradient-based learning applied to document recognition"), with
/// rectifiers and dropout.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    linear1: Linear,
    dropout: Dropout,
    linear2: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        let [first, second] = CHANNELS;
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]);
        Self {
            conv1: Conv2dConfig::new([1, first], [5, 5]).init(device),
            conv2: Conv2dConfig::new([first, second], [5, 5]).init(device),
            pool: pool.init(),
            linear1: LinearConfig::new(second * POOLED_SIDE * POOLED_SIDE, HIDDEN).init(device),
            dropout: DropoutConfig::new(0.25).init(),
            linear2: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    /// A score per class, `[batch, CLASSES]`, for images `[batch, 1, SIDE, SIDE]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.pool.forward(relu(self.conv1.forward(images)));
        let x = self.pool.forward(relu(self.conv2.forward(x)));
        let x = relu(self.linear1.forward(x.flatten(1, 3)));
        self.linear2.forward(self.dropout.forward(x))
    }

    /// The mean cross entropy over a batch, `[1]`.
    pub(crate) fn loss(&self, batch: Batch) -> Tensor<1> {
        let loss = CrossEntropyLossConfig::new().init(&batch.labels.device());
        loss.forward(self.forward(batch.images), batch.labels)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;

    use super::*;

    #[test]
    fn a_new_network_guesses() {
        let device = Device::flex();
        device.seed(3);
        let model = Cnn::new(&device);
        let batch = Batch {
            images: Tensor::ones([4, 1, 28, 28], &device),
            labels: Tensor::<1, Int>::zeros([4], &device),
        };
        assert_eq!(model.forward(batch.images.clone()).dims(), [4, CLASSES]);
        let loss: f32 = model.loss(batch).into_scalar();
        assert!((loss - (CLASSES as f32).ln()).abs() < 1.0, "{loss}");
        assert!((50_000..200_000).contains(&model.num_params()));
    }
}
