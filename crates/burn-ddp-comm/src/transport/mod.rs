//! Byte streams between pairs of ranks.

pub(crate) mod mesh;
pub(crate) mod rendezvous;
pub(crate) mod shared_memory;
pub(crate) mod tcp;

use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;

use shared_memory::SharedMemoryLink;
use tcp::TcpLink;

/// A byte stream to and from one peer. Nothing here waits; an error says what
/// happened to the stream, which is of no use any more then.
pub(crate) enum Link {
    SharedMemory(SharedMemoryLink),
    Tcp(Box<TcpLink>),
}

impl Link {
    /// Sends as much of `bytes` as there is room for; returns how much.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, String> {
        match self {
            Self::SharedMemory(link) => link.send(bytes),
            Self::Tcp(link) => link.send(bytes),
        }
    }

    /// Moves what has arrived into `bytes`; returns how much.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        match self {
            Self::SharedMemory(link) => link.receive(bytes),
            Self::Tcp(link) => link.receive(bytes),
        }
    }

    /// What has arrived, or a part of it, where it lies. Looks for more if it
    /// knows of fewer than `wanted` bytes.
    pub(crate) fn peek(&mut self, wanted: usize) -> Result<&[u8], String> {
        match self {
            Self::SharedMemory(link) => link.peek(wanted),
            Self::Tcp(link) => link.peek(wanted),
        }
    }

    /// Passes over the first `n` of the bytes last peeked at.
    pub(crate) fn consume(&mut self, n: usize) {
        match self {
            Self::SharedMemory(link) => link.consume(n),
            Self::Tcp(link) => link.consume(n),
        }
    }

    /// Begins a pass of attempts to move something.
    pub(crate) fn begin_pass(&mut self) {
        match self {
            Self::SharedMemory(_) => {}
            Self::Tcp(link) => link.begin_pass(),
        }
    }

    /// Ends a pass: lets the peer see what was sent and received in it.
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        match self {
            Self::SharedMemory(link) => {
                link.flush();
                Ok(())
            }
            Self::Tcp(link) => link.flush(),
        }
    }

    /// Whether everything sent is on its way to the peer.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Self::SharedMemory(_) => true,
            Self::Tcp(link) => link.is_flushed(),
        }
    }

    /// Says to the peer that this side leaves, where the end of the link does
    /// not say so by itself.
    pub(crate) fn close(&self) {
        if let Self::SharedMemory(link) = self {
            link.close();
        }
    }

    /// Whether the peer said so. There may still be bytes from it to read.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::SharedMemory(link) => link.is_closed(),
            Self::Tcp(_) => false,
        }
    }

    /// What to wait for, where that is a file.
    pub(crate) fn starved(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match self {
            Self::SharedMemory(_) => None,
            Self::Tcp(link) => Some(link.starved()),
        }
    }
}
