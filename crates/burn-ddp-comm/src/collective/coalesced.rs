//! Several buffers in one collective: they travel as one, so that many small ones
//! cost one collective's latency.

use crate::call::{Buffers, Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, ReduceOp, Result};

impl Communicator {
    /// [`all_reduce`](Self::all_reduce) of every buffer.
    pub(crate) fn all_reduce_coalesced(
        &mut self,
        dtype: DType,
        buffers: &mut [&mut [u8]],
        op: ReduceOp,
    ) -> Result<()> {
        let mut call = coalesced(Collective::AllReduce, dtype, buffers);
        call.op = Some(op);
        let mut flat = std::mem::take(self.staging());
        let data = flatten(&mut flat, buffers);
        let result = self.reduce_to(&call, data, op, None);
        if result.is_ok() {
            unflatten(data, buffers);
        }
        *self.staging() = flat;
        result
    }

    /// [`broadcast`](Self::broadcast) of every buffer.
    pub(crate) fn broadcast_coalesced(
        &mut self,
        dtype: DType,
        buffers: &mut [&mut [u8]],
        root: usize,
    ) -> Result<()> {
        let mut call = coalesced(Collective::Broadcast, dtype, buffers);
        call.root = Some(root);
        let mut flat = std::mem::take(self.staging());
        let data = flatten(&mut flat, buffers);
        let result = self.broadcast_from(&call, data, root);
        if result.is_ok() && self.rank() != root {
            unflatten(data, buffers);
        }
        *self.staging() = flat;
        result
    }
}

fn coalesced(collective: Collective, dtype: DType, buffers: &[&mut [u8]]) -> Call {
    let len = buffers.iter().map(|buffer| buffer.len()).sum();
    let lengths = buffers.iter().map(|buffer| buffer.len());
    Call {
        buffers: Some(Buffers::new(lengths)),
        ..Call::with_elements(collective, dtype, len)
    }
}

/// Copies the buffers one behind the other, into memory that is aligned to any
/// element.
fn flatten<'a>(flat: &'a mut Vec<u128>, buffers: &[&mut [u8]]) -> &'a mut [u8] {
    let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
    flat.resize(len.div_ceil(size_of::<u128>()), 0);
    let data = &mut bytemuck::cast_slice_mut(flat)[..len];
    let mut rest = &mut *data;
    for buffer in buffers {
        let (start, end) = rest.split_at_mut(buffer.len());
        start.copy_from_slice(buffer);
        rest = end;
    }
    data
}

fn unflatten(mut data: &[u8], buffers: &mut [&mut [u8]]) {
    for buffer in buffers {
        let (start, end) = data.split_at(buffer.len());
        buffer.copy_from_slice(start);
        data = end;
    }
}
