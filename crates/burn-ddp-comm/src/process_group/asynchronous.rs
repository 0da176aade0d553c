//! The collectives, run by the group's communication thread.

use super::ProcessGroup;
use crate::communicator::Communicator;
use crate::work::Work;
use crate::{Element, ReduceOp, Result};

/// Asynchronous collectives: each is run by the group's communication thread while
/// the caller goes on. [`Work::wait`] returns the buffers.
impl ProcessGroup {
    /// [`all_reduce`](Self::all_reduce), asynchronous.
    #[track_caller]
    pub fn all_reduce_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        op: ReduceOp,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            communicator.all_reduce(T::DTYPE, bytemuck::cast_slice_mut(data.as_mut()), op)
        })
    }

    /// [`reduce`](Self::reduce), asynchronous.
    #[track_caller]
    pub fn reduce_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        op: ReduceOp,
        root: usize,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            let data = bytemuck::cast_slice_mut(data.as_mut());
            communicator.reduce(T::DTYPE, data, op, root)
        })
    }

    /// [`reduce_scatter`](Self::reduce_scatter), asynchronous.
    #[track_caller]
    pub fn reduce_scatter_async<T, B, O>(&self, data: B, out: O, op: ReduceOp) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, move |communicator, data, out| {
            communicator.reduce_scatter(T::DTYPE, data, out, op)
        })
    }

    /// [`broadcast`](Self::broadcast), asynchronous.
    #[track_caller]
    pub fn broadcast_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        root: usize,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            communicator.broadcast(T::DTYPE, bytemuck::cast_slice_mut(data.as_mut()), root)
        })
    }

    /// [`all_gather`](Self::all_gather), asynchronous.
    #[track_caller]
    pub fn all_gather_async<T, B, O>(&self, data: B, out: O) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, |communicator, data, out| {
            communicator.all_gather(T::DTYPE, data, out)
        })
    }

    /// [`gather`](Self::gather), asynchronous.
    #[track_caller]
    pub fn gather_async<T, B, O>(&self, data: B, out: O, root: usize) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, move |communicator, data, out| {
            communicator.gather(T::DTYPE, data, out, root)
        })
    }

    /// [`scatter`](Self::scatter), asynchronous.
    #[track_caller]
    pub fn scatter_async<T, B, O>(&self, data: B, out: O, root: usize) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, move |communicator, data, out| {
            communicator.scatter(T::DTYPE, data, out, root)
        })
    }

    /// [`all_to_all`](Self::all_to_all), asynchronous.
    #[track_caller]
    pub fn all_to_all_async<T, B, O>(&self, data: B, out: O) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, |communicator, data, out| {
            communicator.all_to_all(T::DTYPE, data, out)
        })
    }

    /// [`barrier`](Self::barrier), asynchronous.
    #[track_caller]
    pub fn barrier_async(&self) -> Work<()> {
        self.submit((), |communicator, ()| communicator.barrier())
    }

    /// Submits an operation from one buffer to another.
    #[track_caller]
    pub(super) fn submit_pair<T, B, O>(
        &self,
        data: B,
        out: O,
        operation: impl FnOnce(&mut Communicator, &[u8], &mut [u8]) -> Result<()> + Send + 'static,
    ) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit((data, out), move |communicator, (data, out)| {
            let data = bytemuck::cast_slice(data.as_ref());
            let out = bytemuck::cast_slice_mut(out.as_mut());
            operation(communicator, data, out)
        })
    }
}
