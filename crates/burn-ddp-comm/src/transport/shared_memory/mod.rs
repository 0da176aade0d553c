//! Shared memory between ranks of one host.

mod doorbell;
mod index;
mod mapping;
mod segment;

use std::sync::Arc;

pub(crate) use mapping::Mapping;
use mapping::{RingReceiver, RingSender};
pub(crate) use segment::{Announcement, Layout, OwnSegment, open};

/// A stream each way through two rings, one in either rank's segment.
pub(crate) struct SharedMemoryLink {
    sender: RingSender,
    receiver: RingReceiver,
    /// Whether the peer has not been told yet of what was written or read.
    untold: bool,
}

impl SharedMemoryLink {
    /// Sends to `to_peer` of the peer's segment, receives from `from_peer` of
    /// the own. `None` if one of these rings is in use.
    pub(crate) fn new(
        (peer, to_peer): (&Arc<Mapping>, usize),
        (own, from_peer): (&Arc<Mapping>, usize),
    ) -> Option<Self> {
        Some(Self {
            sender: peer.sender(to_peer)?,
            receiver: own.receiver(from_peer)?,
            untold: false,
        })
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize, String> {
        let n = self.sender.send(bytes).map_err(damaged)?;
        self.untold |= n > 0;
        Ok(n)
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        let n = self.receiver.receive(bytes).map_err(damaged)?;
        self.untold |= n > 0;
        Ok(n)
    }

    pub(super) fn peek(&mut self, wanted: usize) -> Result<&[u8], String> {
        self.receiver.peek(wanted).map_err(damaged)
    }

    pub(super) fn consume(&mut self, n: usize) {
        self.receiver.consume(n);
        self.untold |= n > 0;
    }

    /// Says to the peer that this side leaves.
    pub(super) fn close(&self) {
        self.receiver.close();
        self.sender.ring_doorbell();
    }

    /// Whether the peer has left.
    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_abandoned()
    }

    pub(super) fn flush(&mut self) {
        if std::mem::take(&mut self.untold) {
            self.sender.ring_doorbell();
        }
    }
}

fn damaged(_: index::Damaged) -> String {
    "its shared memory holds impossible counters".to_owned()
}
