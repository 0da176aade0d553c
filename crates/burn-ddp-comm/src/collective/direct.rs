//! Blocks of known length, each sent straight from the rank that has it to the
//! rank that wants it: one step, and no copy on the way.

use super::{Exchange, Peers};
use crate::peer::Moved;

/// What a rank sends.
pub(super) struct Outgoing<'a> {
    bytes: &'a [u8],
    /// Bytes of a block.
    len: usize,
    /// Bytes from one rank's block to the next one's.
    stride: usize,
    /// The only rank that gets one, if not all do.
    to: Option<usize>,
}

impl<'a> Outgoing<'a> {
    /// The same to everyone, or to rank `to`.
    pub(super) fn same(bytes: &'a [u8], to: Option<usize>) -> Self {
        Self {
            bytes,
            len: bytes.len(),
            stride: 0,
            to,
        }
    }

    /// The `rank`th of `world_size` equal blocks to each rank.
    pub(super) fn blocks(bytes: &'a [u8], world_size: usize) -> Self {
        let len = bytes.len() / world_size;
        Self {
            bytes,
            len,
            stride: len,
            to: None,
        }
    }

    fn to(&self, rank: usize) -> Option<&'a [u8]> {
        let start = rank * self.stride;
        self.to
            .is_none_or(|to| to == rank)
            .then(|| &self.bytes[start..start + self.len])
    }
}

/// Where a rank puts what it receives.
pub(super) struct Incoming<'a> {
    bytes: &'a mut [u8],
    len: usize,
    stride: usize,
    /// The only rank that sends one, if not all do.
    from: Option<usize>,
}

impl<'a> Incoming<'a> {
    /// From rank `from`.
    pub(super) fn one(bytes: &'a mut [u8], from: usize) -> Self {
        let len = bytes.len();
        Self {
            bytes,
            len,
            stride: 0,
            from: Some(from),
        }
    }

    /// From each rank, as the `rank`th of `world_size` equal blocks.
    pub(super) fn blocks(bytes: &'a mut [u8], world_size: usize) -> Self {
        let len = bytes.len() / world_size;
        Self {
            bytes,
            len,
            stride: len,
            from: None,
        }
    }

    fn is_from(&self, rank: usize) -> bool {
        self.from.is_none_or(|from| from == rank)
    }
}

/// The data movement of a collective that is made of such blocks. A rank's block
/// for itself is its caller's business.
pub(super) struct Direct<'a> {
    pub(super) outgoing: Option<Outgoing<'a>>,
    pub(super) incoming: Option<Incoming<'a>>,
}

impl Exchange for Direct<'_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let sends = self.outgoing.as_ref().is_some_and(|o| o.to(rank).is_some());
        let receives = self.incoming.as_ref().is_some_and(|i| i.is_from(rank));
        (usize::from(sends), usize::from(receives))
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let block = self
                .outgoing
                .as_ref()
                .and_then(|outgoing| outgoing.to(rank));
            if let Some(block) = block.filter(|_| peer.sending() == 1) {
                moved |= peer.send(block, block.len())?;
            }
            let incoming = self.incoming.as_mut().filter(|i| i.is_from(rank));
            if let Some(incoming) = incoming.filter(|_| peer.receiving() == 1) {
                let start = rank * incoming.stride;
                moved |= peer.receive(&mut incoming.bytes[start..start + incoming.len])?;
            }
        }
        Ok(moved)
    }
}
