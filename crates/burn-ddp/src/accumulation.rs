//! Gradient accumulation: several backward passes, one synchronisation.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::pass::lock;
use crate::{Ddp, Error, Result};

/// A step whose gradients are the mean over several micro-batches, and over the
/// ranks.
///
/// `k` micro-batches of `b` samples give the gradient of one batch of `k·b`, for
/// a loss that is a mean over its batch. Only the last micro-batch's backward
/// pass communicates.
///
/// ```
/// # use burn::{nn::LinearConfig, tensor::Tensor};
/// # use burn_ddp::{Ddp, ProcessGroup};
/// # fn main() -> burn_ddp::Result<()> {
/// # let group = ProcessGroup::single();
/// # let device = burn_ddp::device(&group)?.autodiff();
/// # let model = Ddp::new(LinearConfig::new(4, 1).init(&device), &group)?;
/// # let micro_batches = [Tensor::<2>::ones([2, 4], &device), Tensor::<2>::ones([2, 4], &device)];
/// let mut step = model.accumulate(2)?;
/// for batch in micro_batches {
///     let loss = step.forward(|m| m.forward(batch).mean());
///     step.backward(loss)?;
/// }
/// let grads = step.finish()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "gradients are averaged and returned by `finish`"]
#[derive(Debug)]
pub struct Accumulation<'a, M: Module> {
    model: &'a Ddp<M>,
    micro_batches: usize,
    done: usize,
}

impl<'a, M: Module> Accumulation<'a, M> {
    pub(crate) fn new(model: &'a Ddp<M>, micro_batches: usize) -> Result<Self> {
        if micro_batches == 0 {
            return Err(Error::usage(
                "a step needs at least one micro-batch: `accumulate(0)` was called",
            ));
        }
        lock(model.reducer()).begin_step()?;
        Ok(Self {
            model,
            micro_batches,
            done: 0,
        })
    }

    /// Runs a forward pass; see [`Ddp::forward`].
    pub fn forward<R>(&self, f: impl FnOnce(&M) -> R) -> R {
        self.model.forward(f)
    }

    /// Runs the backward pass of one micro-batch. The last one's overlaps with
    /// communication.
    ///
    /// # Errors
    ///
    /// A usage error when all micro-batches have been; else those of
    /// [`Ddp::backward`].
    pub fn backward<const D: usize>(&mut self, loss: Tensor<D>) -> Result<()> {
        if self.done == self.micro_batches {
            return Err(Error::usage(format!(
                "the step was begun with `accumulate({0})`, and all {0} micro-batches have been",
                self.micro_batches
            )));
        }
        self.done += 1;
        self.model
            .backward_pass(loss, self.done == self.micro_batches)
    }

    /// Waits for the averages and returns them. Collective.
    ///
    /// # Errors
    ///
    /// A usage error when micro-batches are missing; else those of
    /// [`Ddp::backward`].
    pub fn finish(self) -> Result<GradientsParams> {
        if self.done < self.micro_batches {
            return Err(Error::usage(format!(
                "only {} of the step's {} micro-batches have been: call `backward` for each before \
                 `finish`, and begin a shorter last step with its own number of micro-batches",
                self.done, self.micro_batches
            )));
        }
        self.model.finish_step()
    }
}
