//! Collectives on several buffers at once.

use super::ProcessGroup;
use crate::{Element, ReduceOp, Result};

/// Collectives on several buffers, which cost one collective's latency. Every rank
/// gives as many buffers, each as long as on the others. They are copied together
/// and back: for large ones, several asynchronous collectives are quicker.
impl ProcessGroup {
    /// [`all_reduce`](Self::all_reduce) of every buffer.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce). On an error, the buffers are as they
    /// were.
    #[track_caller]
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let mut buffers = as_bytes(buffers);
        self.run(|communicator| communicator.all_reduce_coalesced(T::DTYPE, &mut buffers, op))
    }

    /// [`broadcast`](Self::broadcast) of every buffer.
    ///
    /// # Errors
    ///
    /// See [`broadcast`](Self::broadcast). On an error, the buffers are as they
    /// were.
    #[track_caller]
    pub fn broadcast_coalesced<T: Element>(
        &self,
        buffers: &mut [&mut [T]],
        root: usize,
    ) -> Result<()> {
        let mut buffers = as_bytes(buffers);
        self.run(|communicator| communicator.broadcast_coalesced(T::DTYPE, &mut buffers, root))
    }
}

fn as_bytes<'a, T: Element>(buffers: &'a mut [&mut [T]]) -> Vec<&'a mut [u8]> {
    let buffers = buffers.iter_mut();
    buffers
        .map(|buffer| bytemuck::cast_slice_mut(buffer))
        .collect()
}
