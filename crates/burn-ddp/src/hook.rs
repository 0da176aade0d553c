//! The gradient hook: an identity on a parameter whose backward step hands over
//! the parameter's gradient the moment it is complete.
//!
//! Burn's autodiff visits the backward steps of a graph so that a node comes
//! after everything that contributes to it. A parameter that is replaced, for
//! one forward pass, by the output of an identity operation therefore has its
//! whole gradient when that operation's backward step runs, while the gradients
//! of the layers before it are still to be computed.

// Burn deprecates `NdArray` for Flex; it is supported for as long as Burn has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;

use crate::Error;
use crate::pass::Pass;

/// Where a hook delivers its gradient.
#[derive(Clone)]
pub(crate) struct HookTarget {
    pass: Arc<Pass>,
    /// Position of the parameter in module traversal order.
    parameter: usize,
}

impl fmt::Debug for HookTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookTarget")
            .field("parameter", &self.parameter)
            .finish_non_exhaustive()
    }
}

/// The hook as a Burn backend extension.
#[backend_extension(
    Autodiff,
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    LibTorch: cfg(feature = "tch"),
    Cube: cfg(feature = "cubecl"),
    Fusion: cfg(feature = "cubecl")
)]
pub(crate) trait GradHook: Backend {
    /// The identity, hooked by the autodiff backend and by no other.
    #[fusion(default)]
    fn grad_hook(x: FloatTensor<Self>, _target: HookTarget) -> FloatTensor<Self> {
        x
    }
}

#[cfg(feature = "flex")]
impl GradHook for burn::backend::Flex {}
#[cfg(feature = "ndarray")]
impl GradHook for burn::backend::NdArray {}
#[cfg(feature = "tch")]
impl GradHook for burn::backend::LibTorch {}
#[cfg(feature = "cubecl")]
impl GradHook for burn_cubecl::CubeBackend {}

#[derive(Debug)]
struct Hook;

impl<B: Backend> Backward<B, 1> for Hook {
    type State = HookTarget;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [parent] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let HookTarget { pass, parameter } = ops.state;
        // A gradient that is taken is not passed on, so that its memory is freed.
        if let (Some(grad), Some(parent)) = (deliver::<B>(&pass, parameter, grad), parent) {
            grads.register::<B>(parent.id, grad);
        }
    }
}

/// Hands a gradient over; returns one that can only be read after the backward
/// pass.
fn deliver<B: Backend>(
    pass: &Pass,
    parameter: usize,
    grad: FloatTensor<B>,
) -> Option<FloatTensor<B>> {
    if !pass.gradients_are_eager() {
        pass.seen(parameter);
        return Some(grad);
    }
    // On an eager backend the future is ready, and the only owner's data are
    // moved, not copied.
    match burn::tensor::read_sync(B::float_into_data(grad)) {
        Ok(data) => pass.ready(parameter, data),
        Err(error) => pass.failed(Error::environment_from("can't read a gradient", error)),
    }
    None
}

impl<B: Backend, C: CheckpointStrategy> GradHook for Autodiff<B, C> {
    fn grad_hook(x: FloatTensor<Self>, target: HookTarget) -> FloatTensor<Self> {
        let output = x.primitive().clone();
        match Hook.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(target, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

/// Puts a hook on every trainable parameter of a module.
pub(crate) struct Hooker {
    pass: Arc<Pass>,
    next: usize,
}

impl Hooker {
    pub(crate) fn new(pass: Arc<Pass>) -> Self {
        Self { pass, next: 0 }
    }
}

impl ModuleMapper for Hooker {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let parameter = self.next;
        self.next += 1;
        if !param.is_require_grad() {
            return param;
        }
        let target = HookTarget {
            pass: Arc::clone(&self.pass),
            parameter,
        };
        let (id, tensor, mapper) = param.consume();
        let tensor = <Dispatch as GradHook>::grad_hook(tensor.into_dispatch(), target);
        Param::from_mapped_value(id, Tensor::from_dispatch(tensor), mapper)
    }
}
