//! Messages between two ranks.

use super::ProcessGroup;
use crate::work::Work;
use crate::{Element, Result};

/// One message of a [`batch`](ProcessGroup::batch_send_recv).
#[derive(Debug)]
pub enum Transfer<'a, T> {
    /// To another rank.
    Send {
        /// What is sent.
        data: &'a [T],
        /// The rank that receives it.
        to: usize,
    },
    /// From another rank.
    Recv {
        /// Where it goes; as long as what is sent.
        data: &'a mut [T],
        /// The rank that sends it.
        from: usize,
    },
}

/// Messages between two ranks. Only these two take part; the others go on. The two
/// make their calls to each other in the same order, each `send` matched by a
/// `recv` of the same element type and length: anything else is an error on every
/// rank, also where both would wait for each other.
///
/// A `send` returns when its receiver has called `recv`.
impl ProcessGroup {
    /// Sends `data` to rank `to`, which calls [`recv`](Self::recv).
    ///
    /// # Errors
    ///
    /// Usage: there is no such other rank, or it called something else. Peer: a
    /// rank failed, left, or did not arrive.
    #[track_caller]
    pub fn send<T: Element>(&self, data: &[T], to: usize) -> Result<()> {
        self.batch_send_recv(&mut [Transfer::Send { data, to }])
    }

    /// Receives what rank `from` [sends](Self::send), `data.len()` elements.
    ///
    /// # Errors
    ///
    /// See [`send`](Self::send). `data` is undefined then.
    #[track_caller]
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize) -> Result<()> {
        self.batch_send_recv(&mut [Transfer::Recv { data, from }])
    }

    /// Sends `data` to rank `to` while it receives `out` from rank `from`, as the
    /// ranks of a ring do. Where both are one rank, that one calls `send_recv`
    /// too. A rank may send to itself.
    ///
    /// # Errors
    ///
    /// See [`send`](Self::send). `out` is undefined then.
    #[track_caller]
    pub fn send_recv<T: Element>(
        &self,
        data: &[T],
        to: usize,
        out: &mut [T],
        from: usize,
    ) -> Result<()> {
        self.batch_send_recv(&mut [
            Transfer::Send { data, to },
            Transfer::Recv { data: out, from },
        ])
    }

    /// Sends and receives several messages at once, at most one to and one from
    /// each rank. Two ranks that send to each other do so in one batch on both.
    ///
    /// ```
    /// # use burn_ddp_comm::{ProcessGroup, Transfer};
    /// # let group = ProcessGroup::single();
    /// # let (left, right) = (0, 0);
    /// // Swap edges with both neighbours.
    /// let (first, mut before) = ([1.0_f32], [0.0]);
    /// group.batch_send_recv(&mut [
    ///     Transfer::Send { data: &first, to: left },
    ///     Transfer::Recv { data: &mut before, from: right },
    /// ])?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`send`](Self::send). What is received is undefined then.
    #[track_caller]
    pub fn batch_send_recv<T: Element>(&self, transfers: &mut [Transfer<'_, T>]) -> Result<()> {
        let mut outgoing: Vec<(usize, &[u8])> = Vec::new();
        let mut incoming: Vec<(usize, &mut [u8])> = Vec::new();
        for transfer in transfers {
            match transfer {
                Transfer::Send { data, to } => outgoing.push((*to, bytemuck::cast_slice(data))),
                Transfer::Recv { data, from } => {
                    incoming.push((*from, bytemuck::cast_slice_mut(data)));
                }
            }
        }
        self.run(|communicator| communicator.transfer(T::DTYPE, &outgoing, &mut incoming))
    }

    /// [`send`](Self::send), run by the group's communication thread while this
    /// one goes on.
    #[track_caller]
    pub fn send_async<T: Element, B: AsRef<[T]> + Send + 'static>(
        &self,
        data: B,
        to: usize,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            let data = bytemuck::cast_slice(data.as_ref());
            communicator.transfer(T::DTYPE, &[(to, data)], &mut [])
        })
    }

    /// [`recv`](Self::recv), run by the group's communication thread while this
    /// one goes on.
    #[track_caller]
    pub fn recv_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        from: usize,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            let data = bytemuck::cast_slice_mut(data.as_mut());
            communicator.transfer(T::DTYPE, &[], &mut [(from, data)])
        })
    }

    /// [`send_recv`](Self::send_recv), run by the group's communication thread
    /// while this one goes on.
    #[track_caller]
    pub fn send_recv_async<T, B, O>(&self, data: B, to: usize, out: O, from: usize) -> Work<(B, O)>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    {
        self.submit_pair(data, out, move |communicator, data, out| {
            communicator.transfer(T::DTYPE, &[(to, data)], &mut [(from, out)])
        })
    }
}
