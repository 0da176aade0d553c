//! The network.

use std::f64::consts::SQRT_2;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Initializer, Linear, LinearConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

use crate::batch::Batch;
use crate::dataset::CLASSES;

/// Channels after the first and the second convolution.
const CHANNELS: [usize; 2] = [16, 32];
/// Side of the second convolution's output after pooling: 28 → 24 → 12 → 8 → 4.
const POOLED_SIDE: usize = 4;
const HIDDEN: usize = 128;
const DROPOUT: f64 = 0.1;

/// Two convolutions with batch normalisation and pooling and two linear layers,
/// after LeNet-5 (LeCun et al. 1998, "Gradient-based learning applied to document
/// recognition"), with rectifiers and dropout.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: MaxPool2d,
    linear1: Linear,
    dropout: Dropout,
    linear2: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        let [first, second] = CHANNELS;
        // He et al. 2015, "Delving deep into rectifiers".
        let initializer = Initializer::KaimingNormal {
            gain: SQRT_2,
            fan_out_only: false,
        };
        let conv = |channels| {
            Conv2dConfig::new(channels, [5, 5])
                .with_initializer(initializer.clone())
                .init(device)
        };
        let inputs = second * POOLED_SIDE * POOLED_SIDE;
        Self {
            conv1: conv([1, first]),
            norm1: BatchNormConfig::new(first).init(device),
            conv2: conv([first, second]),
            norm2: BatchNormConfig::new(second).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            linear1: LinearConfig::new(inputs, HIDDEN)
                .with_initializer(initializer)
                .init(device),
            dropout: DropoutConfig::new(DROPOUT).init(),
            linear2: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    /// A score per class, `[batch, CLASSES]`, for images `[batch, 1, SIDE, SIDE]`.
    pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.norm1.forward(self.conv1.forward(images));
        let x = self.pool.forward(relu(x));
        let x = self.norm2.forward(self.conv2.forward(x));
        let x = self.pool.forward(relu(x));
        let x = relu(self.linear1.forward(x.flatten(1, 3)));
        self.linear2.forward(self.dropout.forward(x))
    }

    /// The mean cross entropy over a batch, `[1]`.
    pub(crate) fn loss(&self, batch: Batch) -> Tensor<1> {
        let loss = CrossEntropyLossConfig::new().init(&batch.labels.device());
        loss.forward(self.forward(batch.images), batch.labels)
    }
}

/// Number of values that training changes: not those of running statistics.
pub(crate) fn trainable_parameters<M: Module>(module: &M) -> usize {
    struct Counter(usize);
    impl ModuleVisitor for Counter {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0 += param.shape().num_elements();
            }
        }
    }
    let mut counter = Counter(0);
    module.visit(&mut counter);
    counter.0
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;

    use super::*;

    #[test]
    fn a_new_network_guesses() {
        let device = Device::flex().autodiff();
        device.seed(3);
        let model = Cnn::new(&device);
        let batch = Batch {
            images: Tensor::ones([4, 1, 28, 28], &device),
            labels: Tensor::<1, Int>::zeros([4], &device),
        };
        assert_eq!(model.forward(batch.images.clone()).dims(), [4, CLASSES]);
        let loss: f32 = model.loss(batch).into_scalar();
        assert!((loss - (CLASSES as f32).ln()).abs() < 1.0, "{loss}");
        // Per channel two, a running mean and a running variance, are not trained.
        let running = 2 * CHANNELS.iter().sum::<usize>();
        assert_eq!(trainable_parameters(&model) + running, model.num_params());
    }
}
