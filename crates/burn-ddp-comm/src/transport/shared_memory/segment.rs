//! A process's shared memory: an anonymous file with one ring per peer that
//! writes to it, and its doorbell.
//!
//! The file has no name anywhere, so nothing can be left behind. Peers open it
//! through `/proc/PID/fd/FD`, and check before they map it that it is the one
//! announced: its size, its seals (nobody can shrink a file under a mapping),
//! and a random nonce (a process number may be another process's by now).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use serde::{Deserialize, Serialize};

use super::mapping::Mapping;

/// Identifies a segment in a way that can't be guessed or met by chance.
pub(crate) type Nonce = [u8; 32];

/// How a segment is divided. Every rank of a host computes the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) rings: usize,
    /// Capacity of each ring in bytes, a power of two.
    pub(crate) ring_bytes: usize,
}

/// Rings together take about this much of each rank's memory.
const RINGS_BYTES: usize = 4 << 20;
const RING_BYTES: std::ops::RangeInclusive<usize> = (16 << 10)..=(1 << 20);

impl Layout {
    /// For `rings` peers: large rings for few, smaller ones for many.
    pub(crate) fn for_peers(rings: usize) -> Self {
        let share = RINGS_BYTES / rings.max(1);
        Self {
            rings,
            ring_bytes: (1 << share.max(1).ilog2()).clamp(*RING_BYTES.start(), *RING_BYTES.end()),
        }
    }
}

/// How peers find a segment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pid: u32,
    fd: i32,
    nonce: Nonce,
    layout: Layout,
}

/// A segment that this process owns. Peers can open it until this is dropped;
/// the mapping lives on.
pub(crate) struct OwnSegment {
    pub(crate) mapping: Arc<Mapping>,
    file: File,
    nonce: Nonce,
}

impl OwnSegment {
    /// Makes a segment of `layout`.
    pub(crate) fn create(layout: Layout, nonce: Nonce) -> io::Result<Self> {
        let fd =
            rustix::fs::memfd_create("burn-ddp", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, Mapping::bytes(layout) as u64)?;
        rustix::io::pwrite(&fd, &nonce, 0)?;
        rustix::fs::fcntl_add_seals(&fd, seals())?;
        let file = File::from(fd);
        Ok(Self {
            mapping: Arc::new(Mapping::new(&file, layout)?),
            file,
            nonce,
        })
    }

    /// What peers need to open it.
    pub(crate) fn announcement(&self) -> Announcement {
        Announcement {
            pid: std::process::id(),
            fd: self.file.as_raw_fd(),
            nonce: self.nonce,
            layout: self.mapping.layout(),
        }
    }
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// Opens and maps a peer's segment, which has to have `layout`.
pub(crate) fn open(announced: &Announcement, layout: Layout) -> io::Result<Arc<Mapping>> {
    if announced.layout != layout {
        return Err(io::Error::other("its layout is another"));
    }
    let path = format!("/proc/{}/fd/{}", announced.pid, announced.fd);
    // Non-blocking: if the number is another process's by now, this may be a
    // pipe whose opening would wait.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(&path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() != Mapping::bytes(layout) as u64 {
        return Err(io::Error::other(format!("{path} is something else")));
    }
    if !rustix::fs::fcntl_get_seals(&file)?.contains(seals()) {
        return Err(io::Error::other(format!("{path} could be truncated")));
    }
    let mut nonce = Nonce::default();
    if rustix::io::pread(&file, &mut nonce, 0)? != nonce.len() || nonce != announced.nonce {
        return Err(io::Error::other(format!("{path} is another segment")));
    }
    Ok(Arc::new(Mapping::new(&file, layout)?))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        rings: 2,
        ring_bytes: 1 << 14,
    };

    #[test]
    fn few_peers_get_large_rings_and_many_get_smaller_ones() {
        assert_eq!(Layout::for_peers(1).ring_bytes, 1 << 20);
        assert_eq!(Layout::for_peers(3).ring_bytes, 1 << 20);
        assert_eq!(Layout::for_peers(63).ring_bytes, 1 << 16);
        assert_eq!(Layout::for_peers(100_000).ring_bytes, 1 << 14);
    }

    #[test]
    fn an_announced_segment_opens_and_nothing_else_does() {
        let segment = OwnSegment::create(LAYOUT, [7; 32]).unwrap();
        let announced = segment.announcement();
        open(&announced, LAYOUT).unwrap();

        let refused = |announced: &Announcement, layout| match open(announced, layout) {
            Ok(_) => panic!("{announced:?} opened"),
            Err(error) => error.to_string(),
        };
        let other_nonce = Announcement {
            nonce: [8; 32],
            ..announced.clone()
        };
        assert!(refused(&other_nonce, LAYOUT).contains("another segment"));

        let longer = Layout { rings: 3, ..LAYOUT };
        assert!(refused(&announced, longer).contains("layout"));
        let wrong_size = Announcement {
            layout: longer,
            ..announced.clone()
        };
        assert!(refused(&wrong_size, longer).contains("something else"));

        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        let a_pipe = Announcement {
            fd: pipe.as_raw_fd(),
            ..announced.clone()
        };
        refused(&a_pipe, LAYOUT);

        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, Mapping::bytes(LAYOUT) as u64).unwrap();
        let unsealed_one = Announcement {
            fd: unsealed.as_raw_fd(),
            ..announced.clone()
        };
        assert!(refused(&unsealed_one, LAYOUT).contains("truncated"));

        drop(segment);
        refused(&announced, LAYOUT);
    }
}
