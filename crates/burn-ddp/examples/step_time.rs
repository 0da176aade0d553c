//! What synchronisation costs: the time of a training step with `Ddp` over the
//! time of the same step without, in the same processes, steps interleaved.
//!
//! ```console
//! $ cargo build --release -p burn-ddp --example step_time
//! $ burnrun --nproc-per-node 2 -- target/release/examples/step_time big
//! ```
//!
//! Models: `cnn` (the MNIST example's size) and `big` (a perceptron of 25 million
//! parameters), in batches of 32 per rank.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Tensor};
use burn_ddp::{Ddp, Error, ProcessGroup, ReduceOp, Result};

const BATCH: usize = 32;
const ROUNDS: usize = 25;

#[derive(Module, Debug)]
struct Cnn {
    first: Conv2d,
    second: Conv2d,
    pool: MaxPool2d,
    hidden: Linear,
    output: Linear,
}

impl Cnn {
    fn new(device: &Device) -> Self {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]);
        Self {
            first: Conv2dConfig::new([1, 16], [5, 5]).init(device),
            second: Conv2dConfig::new([16, 32], [5, 5]).init(device),
            pool: pool.init(),
            hidden: LinearConfig::new(512, 128).init(device),
            output: LinearConfig::new(128, 10).init(device),
        }
    }
}

#[derive(Module, Debug)]
struct Perceptron {
    layers: Vec<Linear>,
}

impl Perceptron {
    /// 784 → 3,072 → 3,072 → 3,072 → 1,024 → 10: 24.4 million parameters.
    fn new(device: &Device) -> Self {
        let sizes = [784, 3072, 3072, 3072, 1024, 10];
        let layer = |w: &[usize]| LinearConfig::new(w[0], w[1]).init(device);
        Self {
            layers: sizes.windows(2).map(layer).collect(),
        }
    }
}

/// A model and a loss of 28 × 28 images.
trait Model: Module {
    fn loss(&self, images: Tensor<4>) -> Tensor<1>;
}

impl Model for Cnn {
    fn loss(&self, images: Tensor<4>) -> Tensor<1> {
        let x = self.pool.forward(relu(self.first.forward(images)));
        let x = self.pool.forward(relu(self.second.forward(x)));
        let x = relu(self.hidden.forward::<2>(x.flatten(1, 3)));
        self.output.forward(x).powi_scalar(2).mean()
    }
}

impl Model for Perceptron {
    fn loss(&self, images: Tensor<4>) -> Tensor<1> {
        let x: Tensor<2> = images.flatten(1, 3);
        let x = self
            .layers
            .iter()
            .fold(x, |x, layer| relu(layer.forward(x)));
        x.powi_scalar(2).mean()
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn plain_step<M: Model>(model: M, optim: &mut ModuleOptimizer, images: Tensor<4>) -> M {
    let grads = GradientsParams::from_grads(model.loss(images).backward(), &model);
    optim.step(1e-4, model, grads)
}

fn measure<M: Model>(name: &str, model: M, group: &ProcessGroup, device: &Device) -> Result<()> {
    let images = Tensor::<4>::random([BATCH, 1, 28, 28], Distribution::Default, device);
    let mut plain = model.clone();
    let mut ddp = Ddp::new(model, group)?;
    let (mut plain_optim, mut optim) = (SgdConfig::new().init(), SgdConfig::new().init());
    let (mut plain_times, mut ddp_times, mut waits) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // All ranks compute at the same time in both, as independent processes do.
        group.barrier()?;
        let start = Instant::now();
        plain = plain_step(plain, &mut plain_optim, images.clone());
        let plain_time = start.elapsed();

        group.barrier()?;
        let start = Instant::now();
        let loss = ddp.forward(|m| m.loss(images.clone()));
        let grads = ddp.backward(loss)?;
        ddp = optim.step(1e-4, ddp, grads);
        let ddp_time = start.elapsed();
        // The first steps make buffers and rebuild buckets.
        if round >= 3 {
            plain_times.push(plain_time);
            ddp_times.push(ddp_time);
            waits.push(ddp.sync_stats().wait);
        }
    }
    // The slowest rank decides.
    let mut times = [median(plain_times), median(ddp_times), median(waits)];
    group.all_reduce(&mut times, ReduceOp::Max)?;
    let [plain, with_ddp, wait] = times;
    if group.is_main() {
        println!(
            "{name}: {} parameters, {} ranks, plain step {plain:.2} ms, Ddp step {with_ddp:.2} ms \
             (waiting {wait:.2} ms), ratio {:.3}",
            ddp.num_params(),
            group.world_size(),
            with_ddp / plain
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = burn_ddp::device(&group)?.autodiff();
    match std::env::args().nth(1).as_deref() {
        Some("cnn") => measure("cnn", Cnn::new(&device), &group, &device),
        Some("big") => measure("big", Perceptron::new(&device), &group, &device),
        _ => Err(Error::usage("name a model: `cnn` or `big`")),
    }
}
