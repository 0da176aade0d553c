//! Blocks of lengths that only their senders know: each block's length travels
//! ahead of it.

use super::{Exchange, Peers};
use crate::peer::{Moved, Peer, Stop};
use crate::{DType, Error};

/// Most bytes that an encoded object may have: 1 GiB.
pub(crate) const MAX_OBJECT_BYTES: usize = 1 << 30;

/// Bytes of a block's length.
pub(super) const LENGTH_BYTES: usize = size_of::<u64>();

/// A block on its way in.
pub(super) struct Arriving {
    pub(super) length: [u8; LENGTH_BYTES],
    pub(super) body: Vec<u8>,
    /// Most bytes that it may have.
    limit: usize,
    /// It has a multiple of this many bytes.
    element: usize,
}

impl Arriving {
    /// An encoded object.
    pub(super) fn object() -> Self {
        Self {
            length: [0; LENGTH_BYTES],
            body: Vec::new(),
            limit: MAX_OBJECT_BYTES,
            element: 1,
        }
    }

    /// Elements.
    pub(super) fn elements(dtype: DType) -> Self {
        Self {
            limit: isize::MAX as usize,
            element: dtype.size(),
            ..Self::object()
        }
    }

    /// An object that is there.
    pub(super) fn whole(body: Vec<u8>) -> Self {
        Self {
            length: (body.len() as u64).to_le_bytes(),
            body,
            ..Self::object()
        }
    }

    /// Makes room for the body whose length has arrived from `rank`.
    fn allocate(&mut self, rank: usize) -> Result<(), Stop> {
        let length = u64::from_le_bytes(self.length);
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= self.limit && length.is_multiple_of(self.element))
            .ok_or_else(|| Stop::Broken {
                rank,
                reason: format!("it announced a block of {length} bytes"),
            })?;
        self.body.try_reserve_exact(length).map_err(|error| {
            Stop::Failed(Error::environment_from(
                format!("no memory for a block of {length} bytes from rank {rank}"),
                error,
            ))
        })?;
        self.body.resize(length, 0);
        Ok(())
    }

    /// Receives on from `peer`: segment 1 is the length, segment 2 the body.
    pub(super) fn receive(&mut self, peer: &mut Peer) -> Moved {
        let mut moved = false;
        if peer.receiving() == 1 {
            moved |= peer.receive(&mut self.length)?;
            if peer.receiving() == 2 {
                self.allocate(peer.rank)?;
            }
        }
        if peer.receiving() == 2 {
            moved |= peer.receive(&mut self.body)?;
        }
        Ok(moved)
    }
}

/// The data movement of a collective that is made of such blocks.
pub(super) struct Variable<F> {
    /// What each rank gets, if anything.
    pub(super) outgoing: F,
    /// What comes from each rank; `None` where nothing does.
    pub(super) incoming: Vec<Option<Arriving>>,
}

impl<'a, F: Fn(usize) -> Option<&'a [u8]>> Variable<F> {
    /// What arrived from each rank, with `own` in this rank's place.
    pub(super) fn into_bodies(self, own: &[u8]) -> Vec<Vec<u8>> {
        let bodies = self.incoming.into_iter();
        bodies
            .map(|block| block.map_or_else(|| own.to_vec(), |block| block.body))
            .collect()
    }
}

impl<'a, F: Fn(usize) -> Option<&'a [u8]>> Exchange for Variable<F> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let segments = |some: bool| if some { 2 } else { 0 };
        let receives = self.incoming.get(rank).is_some_and(Option::is_some);
        (
            segments((self.outgoing)(rank).is_some()),
            segments(receives),
        )
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            if let Some(body) = (self.outgoing)(rank) {
                if peer.sending() == 1 {
                    let length = (body.len() as u64).to_le_bytes();
                    moved |= peer.send(&length, LENGTH_BYTES)?;
                }
                if peer.sending() == 2 {
                    moved |= peer.send(body, body.len())?;
                }
            }
            if let Some(Some(block)) = self.incoming.get_mut(rank) {
                moved |= block.receive(peer)?;
            }
        }
        Ok(moved)
    }
}
