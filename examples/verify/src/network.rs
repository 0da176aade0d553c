//! The network whose gradients are compared.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, relu};
use burn::tensor::{Device, Tensor};

use crate::samples::{CLASSES, SIDE, Samples};

const CHANNELS: [usize; 2] = [8, 16];
const HIDDEN: usize = 64;
/// Side after each convolution of 3 × 3, the first one pooled: 12 → 10 → 5 → 3.
const LAST_SIDE: usize = ((SIDE - 2) / 2) - 2;

/// Convolutions and a perceptron: no layer whose result for one sample depends
/// on the others, so that a sharded batch is exactly the whole one.
#[derive(Module, Debug)]
pub(crate) struct Network {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    linear1: Linear,
    norm: LayerNorm,
    linear2: Linear,
}

impl Network {
    pub(crate) fn new(device: &Device) -> Self {
        let [first, second] = CHANNELS;
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]);
        Self {
            conv1: Conv2dConfig::new([1, first], [3, 3]).init(device),
            conv2: Conv2dConfig::new([first, second], [3, 3]).init(device),
            pool: pool.init(),
            linear1: LinearConfig::new(second * LAST_SIDE * LAST_SIDE, HIDDEN).init(device),
            norm: LayerNormConfig::new(HIDDEN).init(device),
            linear2: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    /// The mean cross entropy over the samples, `[1]`.
    pub(crate) fn loss(&self, samples: Samples) -> Tensor<1> {
        let x = self.pool.forward(relu(self.conv1.forward(samples.images)));
        let x = relu(self.conv2.forward(x)).flatten(1, 3);
        let x = self
            .linear2
            .forward(gelu(self.norm.forward(self.linear1.forward(x))));
        let loss = CrossEntropyLossConfig::new().init(&samples.labels.device());
        loss.forward(x, samples.labels)
    }
}
