//! Buffers: tensors that a forward pass changes, such as the running mean of a
//! batch normalisation. They follow rank 0.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bytes, Tensor, TensorData};
use burn_ddp_comm::Work;

use crate::{Error, ProcessGroup, Result};

/// Brings the buffers of `module` up to date: until its next forward pass, Burn's
/// `RunningState` keeps the last update beside the value that records and
/// visitors see.
pub(crate) fn settle<M: Module>(module: &M) {
    // Switching to validation merges it, in the module that is switched too.
    let _ = module.valid();
}

/// Which tensors of a module are buffers.
pub(crate) struct Buffers {
    /// By position among the module's float tensors.
    positions: Vec<usize>,
}

/// A broadcast of buffers under way.
pub(crate) struct PendingBuffers(Option<Work<Vec<u8>>>);

impl Buffers {
    /// Finds the buffers of `module`.
    ///
    /// A buffer is a float tensor that clones of the module share, as Burn's
    /// `RunningState` is: a forward pass, which has the module by reference, can
    /// change no other. So each candidate of a clone is replaced by an empty
    /// tensor, and the buffers are those that the module then sees empty.
    pub(crate) fn find<M: Module>(module: &M) -> Self {
        settle(module);
        let mut swapper = Swapper::default();
        let _ = module.clone().map(&mut swapper);
        let mut finder = Finder::default();
        module.visit(&mut finder);
        let positions: Vec<usize> = finder.empty;
        let saved = swapper.saved;
        let _ = module.clone().map(&mut Restorer { saved, next: 0 });
        Self { positions }
    }

    /// Starts the broadcast of rank 0's buffers.
    pub(crate) fn start_broadcast<M: Module>(
        &self,
        module: &M,
        group: &ProcessGroup,
    ) -> Result<PendingBuffers> {
        if self.positions.is_empty() {
            return Ok(PendingBuffers(None));
        }
        settle(module);
        if group.world_size() == 1 {
            return Ok(PendingBuffers(None));
        }
        let mut reader = Reader {
            positions: &self.positions,
            next: 0,
            bytes: Vec::new(),
            error: None,
        };
        module.visit(&mut reader);
        match reader.error {
            Some(error) => Err(error),
            None => Ok(PendingBuffers(Some(
                group.broadcast_async::<u8, _>(reader.bytes, 0),
            ))),
        }
    }

    /// Waits for the broadcast and sets the buffers of `module`.
    pub(crate) fn finish_broadcast<M: Module>(
        &self,
        module: &M,
        pending: PendingBuffers,
    ) -> Result<()> {
        let Some(work) = pending.0 else {
            return Ok(());
        };
        let mut writer = Writer {
            positions: &self.positions,
            next: 0,
            bytes: &work.wait()?,
        };
        // A clone shares the buffers, and only them.
        let _ = module.clone().map(&mut writer);
        Ok(())
    }
}

/// Replaces float tensors without gradient by empty ones.
#[derive(Default)]
struct Swapper {
    saved: Vec<Option<TensorBox>>,
}

/// A tensor of any rank.
type TensorBox = Box<dyn std::any::Any>;

impl ModuleMapper for Swapper {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_require_grad() {
            self.saved.push(None);
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let empty = Tensor::<D>::empty([0; D], (&tensor.device(), tensor.dtype()));
        self.saved.push(Some(Box::new(tensor)));
        Param::from_mapped_value(id, empty, mapper)
    }
}

/// Finds float tensors without elements.
#[derive(Default)]
struct Finder {
    next: usize,
    empty: Vec<usize>,
}

impl ModuleVisitor for Finder {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.base().dims().contains(&0) {
            self.empty.push(self.next);
        }
        self.next += 1;
    }
}

/// Undoes a [`Swapper`].
struct Restorer {
    saved: Vec<Option<TensorBox>>,
    next: usize,
}

impl ModuleMapper for Restorer {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let saved = self.saved.get_mut(self.next).and_then(Option::take);
        self.next += 1;
        match saved.map(|tensor| tensor.downcast::<Tensor<D>>()) {
            Some(Ok(tensor)) => {
                let (id, _, mapper) = param.consume();
                Param::from_mapped_value(id, *tensor, mapper)
            }
            _ => param,
        }
    }
}

struct Reader<'a> {
    positions: &'a [usize],
    next: usize,
    bytes: Vec<u8>,
    error: Option<Error>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.positions.binary_search(&self.next).is_ok() {
            match param.base().try_into_data() {
                Ok(data) => self.bytes.extend_from_slice(data.bytes()),
                Err(error) => {
                    self.error
                        .get_or_insert(Error::environment_from("can't read a buffer", error));
                }
            }
        }
        self.next += 1;
    }
}

struct Writer<'a> {
    positions: &'a [usize],
    next: usize,
    bytes: &'a [u8],
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let position = self.next;
        self.next += 1;
        if self.positions.binary_search(&position).is_err() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let (own, rest) = self
            .bytes
            .split_at(self.bytes.len().min(shape.num_elements() * dtype.size()));
        self.bytes = rest;
        let own = Bytes::from_bytes_vec(own.to_vec());
        let tensor = match TensorData::try_from_bytes(own, shape, dtype) {
            Ok(data) => Tensor::from_data(data, (&tensor.device(), dtype)),
            // Rank 0's bytes were as many as this rank's, or the broadcast would
            // have failed.
            Err(_) => tensor,
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
