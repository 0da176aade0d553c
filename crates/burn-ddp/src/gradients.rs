//! Moves gradients between a module's tensors and the reducer.

use std::sync::Mutex;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, Gradients, Tensor, TensorData};

use crate::ddp::changed_module;
use crate::pass::lock;
use crate::reducer::Reducer;
use crate::{Error, Result};

/// Reads a gradient from its device.
type Read = Box<dyn FnOnce() -> Result<TensorData>>;

/// Delivers the gradients that no hook has delivered: those of a device that
/// computes them later, and those of a forward pass on the inner module.
pub(crate) fn deliver_rest<M: Module>(
    module: &M,
    mut grads: Gradients,
    reducer: &Mutex<Reducer>,
) -> Result<()> {
    let mut collector = Collector {
        grads: &mut grads,
        reads: Vec::new(),
    };
    module.visit(&mut collector);
    let mut reads = collector.reads;

    let mut reducer = lock(reducer);
    // A hook may have failed.
    reducer.check()?;
    if reads.len() != reducer.parameters() {
        return Err(reducer.fail(changed_module()));
    }
    // In the order of the buckets, so that the first ones are on their way while
    // the others are still read from the device.
    for parameter in reducer.order() {
        if let Some(read) = reads[parameter].take() {
            let data = read().map_err(|error| reducer.fail(error))?;
            reducer.deliver(parameter, data)?;
        }
    }
    // What is left is not in the plan, which `deliver` explains.
    for (parameter, read) in reads.into_iter().enumerate() {
        if let Some(read) = read {
            let data = read().map_err(|error| reducer.fail(error))?;
            reducer.deliver(parameter, data)?;
        }
    }
    Ok(())
}

struct Collector<'a> {
    grads: &'a mut Gradients,
    /// One per tensor of the module, `None` where there is no gradient.
    reads: Vec<Option<Read>>,
}

impl ModuleVisitor for Collector<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let read = param.base().grad_remove(self.grads).map(|grad| -> Read {
            Box::new(move || {
                grad.try_into_data()
                    .map_err(|error| Error::environment_from("can't read a gradient", error))
            })
        });
        self.reads.push(read);
    }

    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, burn::tensor::Int>>) {
        self.reads.push(None);
    }

    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, burn::tensor::Bool>>) {
        self.reads.push(None);
    }
}

/// The averaged gradients, on the devices of their parameters.
pub(crate) fn averaged<M: Module>(module: &M, reducer: &Reducer) -> Result<GradientsParams> {
    let mut builder = Builder {
        reducer,
        grads: GradientsParams::new(),
        next: 0,
        error: None,
    };
    module.visit(&mut builder);
    match builder.error {
        None => Ok(builder.grads),
        Some(error) => Err(error),
    }
}

struct Builder<'a> {
    reducer: &'a Reducer,
    grads: GradientsParams,
    next: usize,
    error: Option<Error>,
}

impl ModuleVisitor for Builder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let position = self.next;
        self.next += 1;
        let Some(bytes) = self.reducer.averaged(position) else {
            return;
        };
        let value = param.base();
        let (device, dtype) = (value.device().without_autodiff(), value.dtype());
        let bytes = Bytes::from_bytes_vec(bytes);
        match TensorData::try_from_bytes(bytes, value.shape(), dtype) {
            Ok(data) => {
                let grad = Tensor::<D>::from_data(data, (&device, dtype));
                self.grads.register(param.id, grad);
            }
            Err(_) => {
                self.error.get_or_insert_with(changed_module);
            }
        }
    }

    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, burn::tensor::Int>>) {
        self.next += 1;
    }

    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, burn::tensor::Bool>>) {
        self.next += 1;
    }
}
