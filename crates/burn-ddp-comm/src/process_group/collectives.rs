//! The collectives, run by the calling thread.

use std::time::Duration;

use super::ProcessGroup;
use crate::communicator::Communicator;
use crate::{Element, ReduceOp, Result};

/// Collectives on elements. Every rank calls the same one with the same element
/// type, lengths, operation and root.
impl ProcessGroup {
    /// Replaces `data` by the reduction of all ranks' `data`, which is as long
    /// on every rank. The result is bitwise the same on all of them.
    ///
    /// # Errors
    ///
    /// Usage: a rank called something else, or with other arguments. Peer: a
    /// rank failed, left, or did not arrive. `data` is undefined then.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let data = bytemuck::cast_slice_mut(data);
        self.run(|communicator| communicator.all_reduce(T::DTYPE, data, op))
    }

    /// Replaces rank `root`'s `data` by the reduction of all ranks' `data`, which
    /// is as long on every rank. On the other ranks `data` is undefined afterwards.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`.
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        let data = bytemuck::cast_slice_mut(data);
        self.run(|communicator| communicator.reduce(T::DTYPE, data, op, root))
    }

    /// Reduces all ranks' `data` and writes this rank's block of the result to
    /// `out`: rank *i* gets elements `i * out.len()..(i + 1) * out.len()`. `data` is
    /// `world_size` times as long as `out`, which is as long on every rank.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if `data` has another
    /// length.
    #[track_caller]
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &[T],
        out: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.reduce_scatter(T::DTYPE, data, out, op))
    }

    /// Replaces `data` by rank `root`'s, which is as long.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`.
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        let data = bytemuck::cast_slice_mut(data);
        self.run(|communicator| communicator.broadcast(T::DTYPE, data, root))
    }

    /// Writes every rank's `data` to `out`, in rank order. `data` is as long on
    /// every rank, and `out` is `world_size` times as long.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if `out` has another
    /// length.
    #[track_caller]
    pub fn all_gather<T: Element>(&self, data: &[T], out: &mut [T]) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.all_gather(T::DTYPE, data, out))
    }

    /// Returns every rank's `data`, in rank order. Each may have another length.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce). Environment: there is no memory for
    /// what another rank gives.
    #[track_caller]
    pub fn all_gather_v<T: Element>(&self, data: &[T]) -> Result<Vec<Vec<T>>> {
        let data = bytemuck::cast_slice(data);
        self.run(|communicator| communicator.all_gather_variable(T::DTYPE, data))
            .map(elements)
    }

    /// Writes every rank's `data` to rank `root`'s `out`, in rank order. `data`
    /// is as long on every rank, and `out` is `world_size` times as long on the
    /// root; elsewhere it is left alone and may be empty.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`, or its `out` has another length.
    #[track_caller]
    pub fn gather<T: Element>(&self, data: &[T], out: &mut [T], root: usize) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.gather(T::DTYPE, data, out, root))
    }

    /// Writes block *i* of rank `root`'s `data` to rank *i*'s `out`, which is as
    /// long on every rank. `data` is `world_size` times as long on the root;
    /// elsewhere it is ignored and may be empty.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`, or its `data` has another length.
    #[track_caller]
    pub fn scatter<T: Element>(&self, data: &[T], out: &mut [T], root: usize) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.scatter(T::DTYPE, data, out, root))
    }

    /// Sends block *i* of `data` to rank *i*, and writes what rank *i* sends here
    /// to block *i* of `out`. Both are of one length, the same on every rank: a
    /// multiple of `world_size`.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if the lengths differ or
    /// are no such multiple.
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, data: &[T], out: &mut [T]) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.all_to_all(T::DTYPE, data, out))
    }

    /// Sends `parts[i]` to rank *i* and returns what each rank sends here, in rank
    /// order. The parts, one for each rank, may have any lengths.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there are more or
    /// fewer parts. Environment: there is no memory for what another rank sends.
    #[track_caller]
    pub fn all_to_all_v<T: Element>(&self, parts: &[&[T]]) -> Result<Vec<Vec<T>>> {
        let parts: Vec<&[u8]> = parts
            .iter()
            .map(|part| bytemuck::cast_slice(part))
            .collect();
        self.run(|communicator| communicator.all_to_all_variable(T::DTYPE, &parts))
            .map(elements)
    }

    /// Returns when every rank has called this.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.run(Communicator::barrier)
    }

    /// A [`barrier`](Self::barrier) that waits at most `timeout` for any rank, also
    /// for one that is known to be busy: to find out who is missing. On every rank
    /// the error names all ranks that did not call it, and what they were last seen
    /// doing.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if `timeout` is zero.
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        self.run(|communicator| communicator.monitored_barrier(timeout))
    }
}

fn elements<T: Element>(blocks: Vec<Vec<u8>>) -> Vec<Vec<T>> {
    blocks
        .iter()
        .map(|block| bytemuck::pod_collect_to_vec(block))
        .collect()
}
