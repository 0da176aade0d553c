//! Gives every rank rank 0's parameter values and `ParamId`s.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Bytes, DType, Int, Tensor, TensorData, kind::Basic};

use crate::parameters::Parameter;
use crate::{Error, ProcessGroup, Result};

/// Tensors are broadcast in pieces of at least this size, so that a module of
/// many small ones takes few rounds.
const PIECE: usize = 25 << 20;

/// Replaces the values and ids of `module` by rank 0's. Collective.
///
/// `parameters` must have been found the same on every rank.
pub(crate) fn replicate<M: Module>(
    module: M,
    parameters: &[Parameter],
    group: &ProcessGroup,
) -> Result<M> {
    if group.world_size() == 1 {
        return Ok(module);
    }
    let ids = parameters.iter().map(|p| p.id).collect::<Vec<u64>>();
    let ids = group.broadcast_object(Some(ids), 0)?;
    let values = broadcast_values(&module, parameters, group)?;
    if group.is_main() {
        return Ok(module);
    }
    let mut setter = Setter {
        ids: ids.into_iter(),
        values: values.into_iter(),
    };
    Ok(module.map(&mut setter))
}

/// The values of all tensors of rank 0's module; on rank 0, nothing.
fn broadcast_values<M: Module>(
    module: &M,
    parameters: &[Parameter],
    group: &ProcessGroup,
) -> Result<Vec<TensorData>> {
    let mut sizes = parameters.iter().map(|p| p.len() * p.dtype.size());
    if let Some(p) = parameters.iter().find(|p| is_quantized(p.dtype)) {
        return Err(Error::usage(format!(
            "`{}` is quantized, and a quantized module can't be replicated: quantize after \
             training, or before `Ddp::new` on a world of one",
            p.path
        )));
    }
    let mut own = match group.is_main() {
        true => read(module)?,
        false => Vec::new(),
    }
    .into_iter();

    let mut values = Vec::with_capacity(parameters.len());
    let mut piece = Vec::new();
    let mut in_piece = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let size = sizes.next().unwrap_or(0);
        match own.next() {
            Some(data) => piece.extend_from_slice(data.bytes()),
            None => piece.resize(piece.len() + size, 0),
        }
        in_piece.push(parameter);
        if piece.len() < PIECE && index + 1 < parameters.len() {
            continue;
        }
        group.broadcast(&mut piece, 0)?;
        if !group.is_main() {
            let mut rest = piece.as_slice();
            for parameter in &in_piece {
                let (bytes, after) = rest.split_at(parameter.len() * parameter.dtype.size());
                rest = after;
                values.push(tensor_data(bytes.to_vec(), parameter)?);
            }
        }
        piece.clear();
        in_piece.clear();
    }
    Ok(values)
}

fn is_quantized(dtype: DType) -> bool {
    matches!(dtype, DType::QFloat(_))
}

fn tensor_data(bytes: Vec<u8>, parameter: &Parameter) -> Result<TensorData> {
    let bytes = Bytes::from_bytes_vec(bytes);
    TensorData::try_from_bytes(bytes, parameter.shape.clone(), parameter.dtype).map_err(|error| {
        Error::environment_from(
            format!("rank 0's value of `{}` is unusable", parameter.path),
            error,
        )
    })
}

/// The data of every tensor of `module`, in traversal order.
///
/// # Errors
///
/// An environment error when a device can't be read.
pub(crate) fn read<M: Module>(module: &M) -> Result<Vec<TensorData>> {
    let mut reader = Reader {
        data: Vec::new(),
        error: None,
    };
    module.visit(&mut reader);
    match reader.error {
        None => Ok(reader.data),
        Some(error) => Err(error),
    }
}

struct Reader {
    data: Vec<TensorData>,
    error: Option<Error>,
}

impl Reader {
    fn read<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) {
        match tensor.try_into_data() {
            Ok(data) => self.data.push(data),
            Err(error) => {
                self.error
                    .get_or_insert(Error::environment_from("can't read a parameter", error));
            }
        }
    }
}

impl ModuleVisitor for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.read(param.base());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.read(param.base());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.read(param.base());
    }
}

/// Sets values and ids in traversal order; keeps a tensor whose turn comes after
/// the last of them.
struct Setter {
    ids: std::vec::IntoIter<u64>,
    values: std::vec::IntoIter<TensorData>,
}

impl Setter {
    fn next_id(&mut self, own: ParamId) -> ParamId {
        self.ids.next().map_or(own, ParamId::from)
    }

    /// The next value, on the device of `own`.
    fn next_value<const D: usize, K: Basic>(&mut self, own: &Tensor<D, K>) -> Option<Tensor<D, K>> {
        let data = self.values.next()?;
        let dtype = data.dtype();
        Some(Tensor::from_data(data, (&own.device(), dtype)))
    }
}

impl ModuleMapper for Setter {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, own, mapper) = param.consume();
        let value = self.next_value(&own);
        let value = value.map(|value| value.set_require_grad(own.is_require_grad()));
        Param::from_mapped_value(self.next_id(id), value.unwrap_or(own), mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, own, mapper) = param.consume();
        let value = self.next_value(&own).unwrap_or(own);
        Param::from_mapped_value(self.next_id(id), value, mapper)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (id, own, mapper) = param.consume();
        let value = self.next_value(&own).unwrap_or(own);
        Param::from_mapped_value(self.next_id(id), value, mapper)
    }
}
