//! The module wrapper.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use crate::accumulation::Accumulation;
use crate::bucket_plan::BucketSizes;
use crate::buffers::Buffers;
use crate::fingerprint::{self, Fingerprint};
use crate::hook::Hooker;
use crate::pass::{Pass, lock};
use crate::reducer::{Reducer, Reduction, SyncStats, UnusedParameters};
use crate::{Error, ProcessGroup, Result, gradients, parameters, replicate};

/// How [`Ddp`] synchronises.
///
/// ```
/// use burn_ddp::{DdpConfig, Reduction};
///
/// let config = DdpConfig::new()
///     .with_bucket_bytes(4 << 20)
///     .with_reduction(Reduction::Sum);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DdpConfig {
    sizes: BucketSizes,
    reduction: Reduction,
    overlap: bool,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl DdpConfig {
    /// Buckets of 25 MiB, the first of 1 MiB; the mean over ranks, computed while
    /// the backward pass goes on.
    pub fn new() -> Self {
        Self {
            sizes: BucketSizes {
                first: 1 << 20,
                others: 25 << 20,
            },
            reduction: Reduction::Mean,
            overlap: true,
        }
    }

    /// Size of a bucket, in bytes. Must be the same on every rank.
    pub fn with_bucket_bytes(mut self, bytes: usize) -> Self {
        self.sizes.others = bytes;
        self
    }

    /// Size of the bucket that starts first, in bytes. Must be the same on every
    /// rank.
    pub fn with_first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.sizes.first = bytes;
        self
    }

    /// How gradients are combined over ranks. Must be the same on every rank.
    pub fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Whether buckets are reduced while the backward pass goes on, where the
    /// device allows it, or after it: to see what the overlap saves. Each rank
    /// may choose; the averages are the same.
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Wraps `module`; see [`Ddp::new`].
    ///
    /// # Errors
    ///
    /// Those of [`Ddp::new`].
    pub fn init<M: Module>(&self, module: M, group: &ProcessGroup) -> Result<Ddp<M>> {
        // Listing the parameters makes those that were not made yet.
        let parameters = parameters::list(&module);
        parameters::check_agreement(&parameters, group)?;
        parameters::check_distinct(&parameters)?;
        let module = replicate::replicate(module, &parameters, group)?;
        let buffers = Buffers::find(&module);
        let reducer = Reducer::new(&parameters, group.clone(), self.reduction, self.sizes)?;
        Ok(Ddp {
            module,
            group: group.clone(),
            reducer: Arc::new(Mutex::new(reducer)),
            buffers: Arc::new(buffers),
            overlap: self.overlap,
            hooked: Mutex::new(None),
        })
    }
}

/// A replica of a module whose gradients are averaged over the ranks of a
/// process group.
///
/// A `Ddp<M>` is a [`Module`]: an optimizer steps it, `valid()` and `train()`
/// switch it, and its record is `M`'s record, with the same paths. A training
/// step is
///
/// ```
/// # use burn::{module::Module, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::{Device, Tensor}};
/// # use burn_ddp::{Ddp, ProcessGroup};
/// # fn main() -> burn_ddp::Result<()> {
/// # let group = ProcessGroup::single();
/// # let device = burn_ddp::device(&group)?.autodiff();
/// # let mut optim = SgdConfig::new().init();
/// let mut model = Ddp::new(LinearConfig::new(4, 1).init(&device), &group)?;
/// # let batch = Tensor::<2>::ones([2, 4], &device);
///
/// let loss = model.forward(|m| m.forward(batch).mean());
/// let grads = model.backward(loss)?;
/// model = optim.step(1e-2, model, grads);
/// # Ok(())
/// # }
/// ```
///
/// Gradients can't go past the group by accident: calling `backward()` on a loss
/// that came out of [`forward`](Self::forward) panics and says what to call
/// instead.
///
/// [`forward`](Self::forward) may be called several times before
/// [`backward`](Self::backward), and the losses added up.
pub struct Ddp<M: Module> {
    module: M,
    group: ProcessGroup,
    reducer: Arc<Mutex<Reducer>>,
    buffers: Arc<Buffers>,
    overlap: bool,
    /// The module with hooks on its parameters, for all forward passes until the
    /// next backward pass.
    hooked: Mutex<Option<Hooked<M>>>,
}

struct Hooked<M> {
    pass: Arc<Pass>,
    module: M,
}

impl<M: Module> Ddp<M> {
    /// Wraps `module` with the default [`DdpConfig`]. Collective: every rank must
    /// call it.
    ///
    /// Checks that every rank has the same parameters (path, shape, dtype,
    /// trainability), then gives every rank rank 0's values and `ParamId`s, so
    /// that all replicas and the optimizer states made for them are equal.
    ///
    /// # Errors
    ///
    /// A usage error that names the first parameter that differs and the ranks
    /// it differs on; one for two trainable parameters of one `ParamId`, or a
    /// parameter whose type can't be averaged. A peer error when a rank dies or
    /// does not call it before the group's deadline.
    pub fn new(module: M, group: &ProcessGroup) -> Result<Self> {
        DdpConfig::new().init(module, group)
    }

    /// The group whose ranks hold the replicas.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Runs a forward pass: calls `f` with the module and returns what it
    /// returns, as a rule the loss.
    ///
    /// On a module in training the parameters that `f` sees hand their gradients
    /// over as soon as the backward pass has them. On one in validation
    /// ([`Module::valid`]) it only calls `f`.
    pub fn forward<R>(&self, f: impl FnOnce(&M) -> R) -> R {
        f(&self.hooked_module())
    }

    /// The module for a forward pass.
    fn hooked_module(&self) -> M {
        if !parameters::any_trainable(&self.module) {
            return self.module.clone();
        }
        let mut hooked = self.hooked.lock().unwrap_or_else(PoisonError::into_inner);
        let hooked = hooked.get_or_insert_with(|| {
            let devices = self.module.devices();
            let eager = self.overlap && devices.iter().all(crate::device::is_eager);
            let pass = Arc::new(Pass::new(Arc::clone(&self.reducer), eager));
            let module = self.module.clone().map(&mut Hooker::new(Arc::clone(&pass)));
            Hooked { pass, module }
        });
        hooked.module.clone()
    }

    /// Runs the backward pass of `loss` and returns the gradients averaged over
    /// the ranks. Collective: every rank must call it, equally often.
    ///
    /// Gradients are averaged while the pass goes on. A parameter that took no
    /// part in `loss` on this rank contributes zero; one that took no part on any
    /// rank has no gradient, as without `Ddp`.
    ///
    /// # Errors
    ///
    /// A peer error when a rank dies or does not arrive before the deadline; a
    /// usage error when the module was changed after it was wrapped. Every later
    /// call then returns the same error.
    pub fn backward<const D: usize>(&self, loss: Tensor<D>) -> Result<GradientsParams> {
        lock(&self.reducer).begin_step()?;
        self.backward_pass(loss, true)?;
        self.finish_step()
    }

    /// Starts a step whose gradients are those of several micro-batches; see
    /// [`Accumulation`].
    ///
    /// # Errors
    ///
    /// A usage error for zero micro-batches; the error of an earlier step that
    /// failed.
    pub fn accumulate(&self, micro_batches: usize) -> Result<Accumulation<'_, M>> {
        Accumulation::new(self, micro_batches)
    }

    /// One backward pass of a step.
    pub(crate) fn backward_pass<const D: usize>(&self, loss: Tensor<D>, last: bool) -> Result<()> {
        let hooked = self
            .hooked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        lock(&self.reducer).begin_backward(last);
        let grads = match &hooked {
            Some(hooked) => {
                let _open = hooked.pass.open();
                loss.backward()
            }
            // The loss came from somewhere else. Its gradients are synchronised
            // all the same, only later.
            None => loss.backward(),
        };
        gradients::deliver_rest(&self.module, grads, &self.reducer)
    }

    /// Ends a step after its last backward pass.
    pub(crate) fn finish_step(&self) -> Result<GradientsParams> {
        let mut reducer = lock(&self.reducer);
        let buffers = self.buffers.start_broadcast(&self.module, &self.group)?;
        reducer.finish_step()?;
        let grads = gradients::averaged(&self.module, &reducer)?;
        reducer.rebuild_once()?;
        drop(reducer);
        self.buffers.finish_broadcast(&self.module, buffers)?;
        Ok(grads)
    }

    pub(crate) fn reducer(&self) -> &Mutex<Reducer> {
        &self.reducer
    }

    /// Compares the parameters of all ranks. Collective.
    ///
    /// # Errors
    ///
    /// A usage error that names the first parameter whose values differ, and the
    /// ranks on which they differ from rank 0's.
    pub fn verify_replicas(&self) -> Result<Fingerprint> {
        fingerprint::verify(&self.module, &self.group)
    }

    /// The parameters that took no part in the last step's loss.
    pub fn unused_parameters(&self) -> UnusedParameters {
        lock(&self.reducer).unused()
    }

    /// What communication cost in the last step.
    pub fn sync_stats(&self) -> SyncStats {
        lock(&self.reducer).stats()
    }

    /// Memory of this rank's gradient buckets, in bytes.
    pub fn bucket_bytes(&self) -> usize {
        lock(&self.reducer).bucket_bytes()
    }

    /// The paths of the trainable parameters in the order in which buckets are
    /// filled: reverse traversal order at first, and from the second step on the
    /// order in which rank 0's gradients became ready.
    pub fn bucket_order(&self) -> Vec<String> {
        lock(&self.reducer).order_paths()
    }

    /// The module itself, without synchronisation from here on.
    pub fn into_inner(self) -> M {
        self.module
    }

    /// The same wrapper around a changed module.
    fn with_module(&self, module: M) -> Self {
        Self {
            module,
            group: self.group.clone(),
            reducer: Arc::clone(&self.reducer),
            buffers: Arc::clone(&self.buffers),
            overlap: self.overlap,
            hooked: Mutex::new(None),
        }
    }

    /// As [`with_module`](Self::with_module), for a change that consumes the module.
    fn change(self, f: impl FnOnce(M) -> M) -> Self {
        Self {
            module: f(self.module),
            hooked: Mutex::new(None),
            group: self.group,
            reducer: self.reducer,
            buffers: self.buffers,
            overlap: self.overlap,
        }
    }
}

impl<M: Module> Clone for Ddp<M> {
    fn clone(&self) -> Self {
        self.with_module(self.module.clone())
    }
}

impl<M: Module> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("module", &self.module)
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .finish_non_exhaustive()
    }
}

/// Everything is the inner module's, so that paths and records are too.
impl<M: Module> Module for Ddp<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.change(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.change(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.change(Module::train)
    }

    fn valid(&self) -> Self {
        self.with_module(self.module.valid())
    }

    fn materialize(self) -> Self {
        self.change(Module::materialize)
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.module.visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        self.change(|module| module.map(mapper))
    }
}

/// The error for a module that is not the one that was wrapped.
pub(crate) fn changed_module() -> Error {
    Error::usage(
        "the module has other parameters than when it was wrapped: call `Ddp::new` again after \
         adding or removing parameters (for instance with `apply_lora`), on every rank",
    )
}
