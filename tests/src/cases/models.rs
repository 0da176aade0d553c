//! Models and batches that a test job trains.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, Relu};
use burn::tensor::{Device, Tensor};

/// A multi-layer perceptron.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
    relu: Relu,
}

impl Mlp {
    /// A perceptron of `width` hidden units on 8 inputs and 3 outputs.
    pub(crate) fn new(width: usize, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(8, width).init(device),
            second: LinearConfig::new(width, width).init(device),
            third: LinearConfig::new(width, 3).init(device),
            relu: Relu::new(),
        }
    }

    /// Outputs `[batch, 3]` for inputs `[batch, 8]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.relu.forward(self.first.forward(x));
        let x = self.relu.forward(self.second.forward(x));
        self.third.forward(x)
    }

    /// The mean square of the outputs' distance from a function of the inputs.
    pub(crate) fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let target = x.clone().sum_dim(1).sin().repeat_dim(1, 3);
        (self.forward(x) - target).powi_scalar(2).mean()
    }
}

/// A convolutional network with a batch normalisation.
#[derive(Module, Debug)]
pub(crate) struct Cnn {
    conv: Conv2d,
    /// Its running mean and variance are buffers.
    pub(crate) norm: BatchNorm,
    head: Linear,
}

impl Cnn {
    /// A network on images of 6 × 6.
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            head: LinearConfig::new(64, 2).init(device),
        }
    }

    /// A loss for images `[batch, 1, 6, 6]`.
    pub(crate) fn loss(&self, x: Tensor<4>) -> Tensor<1> {
        let x = self.norm.forward(self.conv.forward(x));
        self.head
            .forward::<2>(x.flatten(1, 3))
            .powi_scalar(2)
            .mean()
    }
}

/// A module whose parts take part in the loss or don't, as the caller says.
#[derive(Module, Debug)]
pub(crate) struct Branches {
    /// Always takes part.
    pub(crate) trunk: Linear,
    /// Takes part on some ranks.
    pub(crate) sometimes: Linear,
    /// Takes part on none.
    pub(crate) never: Linear,
    /// Is frozen.
    pub(crate) frozen: Param<Tensor<1>>,
}

impl Branches {
    /// Three layers on 8 inputs, and a frozen vector.
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            trunk: LinearConfig::new(8, 8).init(device),
            sometimes: LinearConfig::new(8, 8).init(device),
            never: LinearConfig::new(8, 8).init(device),
            frozen: Param::from_tensor(Tensor::ones([8], device)).set_require_grad(false),
        }
    }

    /// A loss in which the second layer takes part if asked for.
    pub(crate) fn loss(&self, x: Tensor<2>, with_sometimes: bool) -> Tensor<1> {
        let mut x = self.trunk.forward(x) * self.frozen.val().unsqueeze();
        if with_sometimes {
            x = self.sometimes.forward(x);
        }
        x.powi_scalar(2).mean()
    }
}

/// Rows `start..end` of an endless table of inputs, the same on every rank.
pub(crate) fn rows(start: usize, end: usize, device: &Device) -> Tensor<2> {
    let values: Vec<f32> = (start * 8..end * 8)
        .map(|i| ((i * 2_654_435_761 + 12_345) % 10_007) as f32 / 5_003.5 - 1.0)
        .collect();
    Tensor::<1>::from_floats(values.as_slice(), device).reshape([end - start, 8])
}
