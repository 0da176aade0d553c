//! The comparisons: data-parallel on all ranks against plain Burn in one
//! process.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, bail};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_ddp::{Ddp, ErrorKind, ProcessGroup, ReduceOp};

use crate::difference::{gradients, largest, parameters};
use crate::network::Network;
use crate::report::{Check, Comparison, Report};
use crate::samples::{Samples, samples};

/// Samples per rank and step.
const BATCH: usize = 16;
/// Parts into which gradient accumulation divides a batch.
const MICRO_BATCHES: usize = 4;
const STEPS: usize = 20;
const LEARNING_RATE: f64 = 0.05;
const SEED: u64 = 42;
/// For gradients in f32: sums in another order differ in the last bits.
const GRADIENT_TOLERANCE: f64 = 1e-5;
/// For parameters after [`STEPS`] steps, each of which may add the gradients'
/// differences.
const PARAMETER_TOLERANCE: f64 = 1e-4;
/// A group that takes longer to set up on a healthy machine points at a fault:
/// name resolution, a firewall.
const SETUP_LIMIT: Duration = Duration::from_secs(60);

/// Compares training on all ranks of `group` with training in one process.
///
/// Every rank computes the one process's part too, on the samples of all ranks.
/// The loss of rank `broken`, if given, is wrong, so that the comparison fails.
/// Collective: every rank gets the same report.
pub(crate) fn run(
    group: &ProcessGroup,
    kind: &'static str,
    device: Device,
    broken: Option<usize>,
) -> Result<Report> {
    device.seed(SEED);
    let single = Network::new(&device);
    // Burn makes parameters when they are first used; these are wanted now, from
    // this seed.
    parameters(&single)?;
    let initial = if group.is_main() {
        single.clone()
    } else {
        // Rank 0's values must replace these.
        device.seed(SEED + group.rank() as u64);
        Network::new(&device)
    };
    let mut checker = Checker {
        group,
        model: Ddp::new(initial, group)?,
        single,
        device,
        loss_scale: if broken == Some(group.rank()) {
            1.5
        } else {
            1.0
        },
    };

    let same_start = checker.same_start()?;
    let gradients = checker.gradients()?;
    let accumulated_gradients = checker.accumulated_gradients()?;
    let parameters = checker.train()?;
    let setup = checker.slowest_setup()?;
    let checks = vec![
        same_start,
        gradients.check("gradients"),
        accumulated_gradients.check("accumulation"),
        parameters.check("20 optimizer steps"),
        checker.replicas()?,
        devices(group, kind),
        Check {
            name: "set-up",
            pass: setup < SETUP_LIMIT,
            detail: format!("{:.3} s on the slowest rank", setup.as_secs_f64()),
        },
    ];
    Ok(Report {
        world_size: group.world_size(),
        device: kind,
        gradients,
        accumulated_gradients,
        parameters,
        passed: checks.iter().all(|check| check.pass),
        checks,
        setup_seconds: setup.as_secs_f64(),
    })
}

/// The same network trained in two ways.
struct Checker<'a> {
    group: &'a ProcessGroup,
    device: Device,
    /// On all ranks, each with its shard.
    model: Ddp<Network>,
    /// In this process alone, with all samples.
    single: Network,
    loss_scale: f64,
}

impl Checker<'_> {
    /// The numbers of all ranks' samples in step `step`.
    fn global_batch(&self, step: usize) -> Range<usize> {
        let size = self.group.world_size() * BATCH;
        step * size..(step + 1) * size
    }

    /// This rank's part, of `size` samples per rank, of the samples from `start`
    /// on.
    fn shard(&self, start: usize, size: usize) -> Samples {
        let start = start + self.group.rank() * size;
        samples(start..start + size, &self.device)
    }

    fn scaled(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.mul_scalar(self.loss_scale)
    }

    /// The gradients on all ranks of step `step`.
    fn distributed_gradients(&self, step: usize) -> Result<GradientsParams> {
        let shard = self.shard(self.global_batch(step).start, BATCH);
        let loss = self.scaled(self.model.forward(|m| m.loss(shard)));
        Ok(self.model.backward(loss)?)
    }

    /// The gradients in one process of step `step`.
    fn single_gradients(&self, step: usize) -> GradientsParams {
        let all = samples(self.global_batch(step), &self.device);
        GradientsParams::from_grads(self.single.loss(all).backward(), &self.single)
    }

    fn same_start(&self) -> Result<Check> {
        let (actual, expected) = (parameters(&self.model)?, parameters(&self.single)?);
        let differences = largest(&actual, &expected, self.group)?;
        let pass = differences.iter().all(|d| d.max_absolute == 0.0);
        Ok(Check {
            name: "initial parameters",
            pass,
            detail: if pass {
                "rank 0's on every rank".to_owned()
            } else {
                "not rank 0's on every rank".to_owned()
            },
        })
    }

    fn gradients(&self) -> Result<Comparison> {
        let actual = gradients(&self.model, &self.distributed_gradients(0)?)?;
        let expected = gradients(&self.single, &self.single_gradients(0))?;
        let ranks = self.group.world_size();
        Ok(Comparison {
            title: format!(
                "gradients of one step: {ranks} x {BATCH} samples against {} in one process",
                ranks * BATCH
            ),
            tolerance: GRADIENT_TOLERANCE,
            differences: largest(&actual, &expected, self.group)?,
        })
    }

    fn accumulated_gradients(&self) -> Result<Comparison> {
        let batch = self.global_batch(0);
        let mut step = self.model.accumulate(MICRO_BATCHES)?;
        for start in batch.step_by(BATCH / MICRO_BATCHES * self.group.world_size()) {
            let shard = self.shard(start, BATCH / MICRO_BATCHES);
            let loss = self.scaled(step.forward(|m| m.loss(shard)));
            step.backward(loss)?;
        }
        let actual = gradients(&self.model, &step.finish()?)?;
        let expected = gradients(&self.single, &self.single_gradients(0))?;
        Ok(Comparison {
            title: format!("gradients of {MICRO_BATCHES} micro-batches"),
            tolerance: GRADIENT_TOLERANCE,
            differences: largest(&actual, &expected, self.group)?,
        })
    }

    /// Trains both, and compares where they end.
    fn train(&mut self) -> Result<Comparison> {
        let mut optimizers: [ModuleOptimizer; 2] = [optimizer(), optimizer()];
        for step in 0..STEPS {
            let grads = self.distributed_gradients(step)?;
            self.model = optimizers[0].step(LEARNING_RATE, self.model.clone(), grads);
            let grads = self.single_gradients(step);
            self.single = optimizers[1].step(LEARNING_RATE, self.single.clone(), grads);
        }
        let (actual, expected) = (parameters(&self.model)?, parameters(&self.single)?);
        Ok(Comparison {
            title: format!("parameters after {STEPS} steps of SGD with momentum"),
            tolerance: PARAMETER_TOLERANCE,
            differences: largest(&actual, &expected, self.group)?,
        })
    }

    fn replicas(&self) -> Result<Check> {
        let (pass, detail) = match self.model.verify_replicas() {
            Ok(fingerprint) => (true, format!("bitwise equal: {fingerprint} on every rank")),
            Err(error) if error.kind() == ErrorKind::Usage => (false, error.to_string()),
            Err(error) => bail!(error),
        };
        Ok(Check {
            name: "replicas",
            pass,
            detail,
        })
    }

    fn slowest_setup(&self) -> Result<Duration> {
        let mut seconds = [self.group.setup_time().as_secs_f64()];
        self.group.all_reduce(&mut seconds, ReduceOp::Max)?;
        Ok(Duration::from_secs_f64(seconds[0]))
    }
}

fn optimizer() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .init()
}

/// Whether the ranks of this host have a device each. More ranks than cores are
/// slow, not wrong.
fn devices(group: &ProcessGroup, kind: &str) -> Check {
    let ranks = group.local_world_size();
    if kind != "cpu" {
        // A rank without one has ended with an error before.
        return Check {
            name: "devices",
            pass: true,
            detail: format!("{ranks} ranks of {}, a GPU each", group.world_size()),
        };
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let note = if ranks > cores {
        "; they share cores, which is slow, not wrong"
    } else {
        ""
    };
    Check {
        name: "devices",
        pass: true,
        detail: format!(
            "{ranks} ranks of {} on this host's {cores} cores{note}",
            group.world_size()
        ),
    }
}
