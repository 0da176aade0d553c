//! Averages gradients over ranks, bucket by bucket, while the backward pass goes
//! on.
//!
//! The reducer knows nothing of modules or autodiff: gradients come in as bytes
//! under the position of their parameter, and averages are read out the same
//! way.

use std::time::{Duration, Instant};

use burn::tensor::TensorData;
use burn_ddp_comm::ReduceOp;

use crate::bucket_buffer::{BucketBuffer, PendingBuffer};
use crate::bucket_plan::{BucketPlan, BucketSizes, Gradient};
use crate::parameters::Parameter;
use crate::{Error, ProcessGroup, Result};

/// How gradients are combined over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over ranks: what one process would compute on the union of the
    /// ranks' equally large batches with a loss that is a mean over the batch.
    #[default]
    Mean,
    /// The sum over ranks.
    Sum,
}

/// Where a bucket is in the current step.
enum State {
    /// Gradients are written to it.
    Filling(BucketBuffer),
    /// Its all-reduce is under way.
    Reducing(PendingBuffer),
    /// It holds the result of the last step.
    Reduced(BucketBuffer),
}

struct Bucket {
    /// `None` only while it changes state, and after an error.
    state: Option<State>,
    /// Gradients of the running backward pass that are not in yet.
    missing: usize,
}

/// A gradient within the current step.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Written by some micro-batch of the step.
    written: bool,
    /// Delivered in the backward pass that is running.
    delivered: bool,
    /// Written on some rank, known when the step is finished.
    anywhere: bool,
}

/// What a step's communication cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SyncStats {
    /// Time from the start of the last backward pass of the step to averaged
    /// gradients.
    pub backward: Duration,
    /// The part of it in which this rank had nothing left to compute and waited
    /// for all-reduces to end.
    pub wait: Duration,
    /// Number of buckets.
    pub buckets: usize,
    /// How many of them were already under way when the backward pass ended.
    pub overlapped: usize,
}

/// The gradients of one module on one rank.
pub(crate) struct Reducer {
    group: ProcessGroup,
    op: ReduceOp,
    sizes: BucketSizes,
    gradients: Vec<Gradient>,
    paths: Vec<String>,
    plan: BucketPlan,
    buckets: Vec<Bucket>,
    progress: Vec<Progress>,
    /// Buckets before this one have been launched in this step.
    next_launch: usize,
    /// Whether the running backward pass is the step's last.
    last_micro_batch: bool,
    /// The order in which gradients became ready, recorded in the first step.
    ready_order: Option<Vec<usize>>,
    micro_batches: usize,
    /// Set by the first error, which every later call returns.
    failed: Option<Error>,
    started: Instant,
    stats: SyncStats,
}

impl Reducer {
    /// A reducer for the trainable ones of `parameters`.
    ///
    /// # Errors
    ///
    /// A usage error for a trainable parameter of a type that can't be averaged.
    pub(crate) fn new(
        parameters: &[Parameter],
        group: ProcessGroup,
        reduction: Reduction,
        sizes: BucketSizes,
    ) -> Result<Self> {
        let gradients = parameters
            .iter()
            .enumerate()
            .filter(|(_, parameter)| parameter.trainable)
            .map(|(position, parameter)| {
                Ok(Gradient {
                    parameter: position,
                    len: parameter.len(),
                    dtype: gradient_dtype(parameter)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        // A backward pass goes from the last layer to the first.
        let plan = BucketPlan::new(parameters.len(), gradients.iter().rev().copied(), sizes);
        let mut reducer = Self {
            group,
            op: match reduction {
                Reduction::Mean => ReduceOp::Mean,
                Reduction::Sum => ReduceOp::Sum,
            },
            sizes,
            gradients,
            paths: parameters.iter().map(|p| p.path.clone()).collect(),
            plan,
            buckets: Vec::new(),
            progress: vec![Progress::default(); parameters.len()],
            next_launch: 0,
            last_micro_batch: true,
            ready_order: Some(Vec::new()),
            micro_batches: 0,
            failed: None,
            started: Instant::now(),
            stats: SyncStats::default(),
        };
        reducer.allocate();
        Ok(reducer)
    }

    /// Makes the buffers of the plan.
    fn allocate(&mut self) {
        self.buckets = self
            .plan
            .buckets
            .iter()
            .map(|layout| Bucket {
                state: BucketBuffer::zeros(layout.dtype, layout.len()).map(State::Filling),
                missing: layout.slots.len(),
            })
            .collect();
    }

    /// Number of the module's tensors, trainable or not.
    pub(crate) fn parameters(&self) -> usize {
        self.paths.len()
    }

    /// Size of all buckets together, in bytes.
    pub(crate) fn bucket_bytes(&self) -> usize {
        self.plan.bytes()
    }

    /// Costs of the last step.
    pub(crate) fn stats(&self) -> SyncStats {
        self.stats
    }

    /// The trainable parameters in the order of the buckets.
    pub(crate) fn order(&self) -> Vec<usize> {
        self.plan.order().collect()
    }

    /// As [`order`](Self::order), by path.
    pub(crate) fn order_paths(&self) -> Vec<String> {
        self.plan.order().map(|p| self.path(p).to_owned()).collect()
    }

    /// Starts a step of one or more backward passes.
    pub(crate) fn begin_step(&mut self) -> Result<()> {
        self.check()?;
        self.progress.fill(Progress::default());
        self.next_launch = 0;
        self.micro_batches = 0;
        for index in 0..self.buckets.len() {
            let state = match self.buckets[index].state.take() {
                Some(State::Filling(buffer) | State::Reduced(buffer)) => State::Filling(buffer),
                // A step was dropped while it was reduced.
                Some(State::Reducing(pending)) => {
                    let buffer = pending.wait();
                    State::Filling(self.remember(buffer)?)
                }
                None => return Err(self.fail(Error::usage("a gradient bucket was lost"))),
            };
            self.buckets[index].state = Some(state);
        }
        Ok(())
    }

    /// Starts one backward pass of a step. With `last`, buckets are reduced as
    /// soon as they are full.
    pub(crate) fn begin_backward(&mut self, last: bool) {
        self.started = Instant::now();
        self.last_micro_batch = last;
        self.micro_batches += 1;
        for progress in &mut self.progress {
            progress.delivered = false;
        }
        for (bucket, layout) in self.buckets.iter_mut().zip(&self.plan.buckets) {
            bucket.missing = layout.slots.len();
        }
    }

    /// Records that a gradient became ready, for the rebuilt bucket order.
    pub(crate) fn record_ready(&mut self, parameter: usize) {
        if let Some(order) = &mut self.ready_order {
            order.push(parameter);
        }
    }

    /// Takes the gradient of the running backward pass for `parameter`.
    ///
    /// # Errors
    ///
    /// A usage error for a parameter that has none in the plan, a second
    /// gradient in one pass, or an unexpected shape.
    pub(crate) fn deliver(&mut self, parameter: usize, data: TensorData) -> Result<()> {
        let Some((b, s)) = self.plan.place(parameter) else {
            return Err(self.fail(Error::usage(format!(
                "`{}` got a gradient, but it was frozen when the module was wrapped: call \
                 `Ddp::new` after unfreezing parameters",
                self.path(parameter)
            ))));
        };
        if self.progress[parameter].delivered {
            return Err(self.fail(Error::usage(format!(
                "`{}` got two gradients in one backward pass: run every forward pass of a step \
                 through `forward` of one `Ddp` value, not of its clones, and not through the \
                 inner module besides",
                self.path(parameter)
            ))));
        }
        let data = self.convert(parameter, data)?;
        let slot = &self.plan.buckets[b].slots[s];
        if let Some(State::Filling(buffer)) = &mut self.buckets[b].state {
            if self.progress[parameter].written {
                buffer.accumulate(slot.start, slot.len, data.bytes());
            } else {
                buffer.write(slot.start, slot.len, data.bytes());
            }
        }
        self.progress[parameter].written = true;
        self.progress[parameter].delivered = true;
        self.buckets[b].missing -= 1;
        self.launch_full();
        Ok(())
    }

    /// Gives the data the bucket's dtype and checks its length.
    fn convert(&mut self, parameter: usize, data: TensorData) -> Result<TensorData> {
        let (b, s) = match self.plan.place(parameter) {
            Some(place) => place,
            None => return Ok(data),
        };
        let layout = &self.plan.buckets[b];
        let (expected, len) = (to_burn(layout.dtype), layout.slots[s].len);
        if data.num_elements() != len {
            let shape = data.shape().clone();
            return Err(self.fail(Error::usage(format!(
                "the gradient of `{}` has shape {shape:?}, but the parameter has {len} elements",
                self.path(parameter),
            ))));
        }
        if data.dtype() == expected {
            return Ok(data);
        }
        let from = data.dtype();
        data.try_cast(expected).map_err(|error| {
            self.fail(Error::usage(format!(
                "the gradient of `{}` is {from:?} and can't be converted to {expected:?}: {error}",
                self.path(parameter),
            )))
        })
    }

    /// Launches every bucket that is full, in order, stopping at the first that
    /// is not: the order must be the same on every rank.
    fn launch_full(&mut self) {
        while self.last_micro_batch
            && self
                .buckets
                .get(self.next_launch)
                .is_some_and(|bucket| bucket.missing == 0)
        {
            self.launch_next();
        }
    }

    fn launch_next(&mut self) {
        let layout = &self.plan.buckets[self.next_launch];
        let bucket = &mut self.buckets[self.next_launch];
        bucket.state = match bucket.state.take() {
            Some(State::Filling(mut buffer)) => {
                for (index, slot) in layout.slots.iter().enumerate() {
                    let written = self.progress[slot.parameter].written;
                    if !written {
                        buffer.zero(slot.start, slot.len);
                    }
                    buffer.set_flag(layout.flags_start + index, written);
                }
                Some(State::Reducing(buffer.all_reduce(&self.group, self.op)))
            }
            state => state,
        };
        self.next_launch += 1;
    }

    /// Ends the step's last backward pass: launches what is left, parameters
    /// without a gradient contributing zero, and waits for every bucket.
    pub(crate) fn finish_step(&mut self) -> Result<()> {
        self.stats = SyncStats {
            buckets: self.buckets.len(),
            overlapped: self.next_launch,
            ..SyncStats::default()
        };
        while self.next_launch < self.buckets.len() {
            self.launch_next();
        }
        let waiting = Instant::now();
        for index in 0..self.buckets.len() {
            if let Some(State::Reducing(pending)) = self.buckets[index].state.take() {
                let buffer = pending.wait();
                let buffer = self.remember(buffer)?;
                let layout = &self.plan.buckets[index];
                for (flag, slot) in (layout.flags_start..).zip(&layout.slots) {
                    self.progress[slot.parameter].anywhere = buffer.flag(flag);
                }
                self.buckets[index].state = Some(State::Reduced(buffer));
            }
        }
        self.stats.wait = waiting.elapsed();
        self.stats.backward = self.started.elapsed();
        Ok(())
    }

    /// The averaged gradient of `parameter` after [`finish_step`](Self::finish_step),
    /// as bytes; `None` where no rank has one.
    pub(crate) fn averaged(&self, parameter: usize) -> Option<Vec<u8>> {
        let (b, s) = self.plan.place(parameter)?;
        let layout = &self.plan.buckets[b];
        let Some(State::Reduced(buffer)) = &self.buckets[b].state else {
            return None;
        };
        if !self.progress[parameter].anywhere {
            return None;
        }
        let slot = &layout.slots[s];
        let scale = 1.0 / self.micro_batches.max(1) as f64;
        Some(buffer.read_scaled(slot.start, slot.len, scale))
    }

    /// Rebuilds the buckets, once, in the order in which rank 0's gradients
    /// became ready. Collective; after the first step.
    pub(crate) fn rebuild_once(&mut self) -> Result<()> {
        let Some(order) = self.ready_order.take() else {
            return Ok(());
        };
        if self.gradients.is_empty() {
            return Ok(());
        }
        let order = self.group.broadcast_object(Some(order), 0);
        let order = self.remember(order)?;
        let ready: std::collections::HashSet<usize> = order.iter().copied().collect();
        let by_position = |position: &usize| {
            let found = self.gradients.iter().find(|g| g.parameter == *position);
            found.copied()
        };
        // What had no gradient comes last: it may never have one.
        let unready = self.gradients.iter().rev();
        let unready = unready.filter(|gradient| !ready.contains(&gradient.parameter));
        let gradients: Vec<Gradient> = order
            .iter()
            .filter_map(by_position)
            .chain(unready.copied())
            .collect();
        let plan = BucketPlan::new(self.parameters(), gradients, self.sizes);
        if plan != self.plan {
            self.plan = plan;
            self.allocate();
        }
        Ok(())
    }

    /// The trainable parameters that no backward pass of the last step has
    /// reached on this rank, and those that none has reached on any.
    pub(crate) fn unused(&self) -> UnusedParameters {
        let paths = |used: fn(&Progress) -> bool| {
            let unused = |g: &&Gradient| !used(&self.progress[g.parameter]);
            let unused = self.gradients.iter().filter(unused);
            unused.map(|g| self.path(g.parameter).to_owned()).collect()
        };
        UnusedParameters {
            on_this_rank: paths(|progress| progress.written),
            on_every_rank: paths(|progress| progress.anywhere),
        }
    }

    fn path(&self, parameter: usize) -> &str {
        &self.paths[parameter]
    }

    /// The error that failed the reducer, if there was one.
    pub(crate) fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Keeps `error` for every later call, and returns the first one.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }

    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|error| self.fail(error))
    }
}

/// Parameters that took no part in the loss of the last step: their paths in
/// module traversal order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnusedParameters {
    /// On this rank: they contributed zero to the average.
    pub on_this_rank: Vec<String>,
    /// On every rank: they have no gradient, and the optimizer leaves them alone.
    pub on_every_rank: Vec<String>,
}

fn gradient_dtype(parameter: &Parameter) -> Result<burn_ddp_comm::DType> {
    use burn::tensor::DType;
    match parameter.dtype {
        // Its storage on the host is that of `F32`.
        DType::F32 | DType::Flex32 => Ok(burn_ddp_comm::DType::F32),
        DType::F64 => Ok(burn_ddp_comm::DType::F64),
        DType::F16 => Ok(burn_ddp_comm::DType::F16),
        DType::BF16 => Ok(burn_ddp_comm::DType::BF16),
        other => Err(Error::usage(format!(
            "gradients of `{}` can't be averaged: its dtype is {other:?}, and only f32, f64, f16 \
             and bf16 can; freeze it with `no_grad()` or convert it",
            parameter.path
        ))),
    }
}

fn to_burn(dtype: burn_ddp_comm::DType) -> burn::tensor::DType {
    use burn_ddp_comm::DType;
    match dtype {
        DType::F32 => burn::tensor::DType::F32,
        DType::F64 => burn::tensor::DType::F64,
        DType::F16 => burn::tensor::DType::F16,
        DType::BF16 => burn::tensor::DType::BF16,
        DType::I32 => burn::tensor::DType::I32,
        DType::I64 => burn::tensor::DType::I64,
        DType::U8 => burn::tensor::DType::U8,
    }
}
