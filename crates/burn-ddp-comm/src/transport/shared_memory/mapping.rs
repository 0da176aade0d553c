//! Access to mapped shared memory: the only file that touches it through raw
//! pointers.
//!
//! Invariants, on which every `unsafe` block here rests:
//!
//! 1. The mapping is [`Mapping::bytes`] long and stays so: the file is sealed
//!    against shrinking before it is mapped, and unmapped only on drop.
//! 2. Its first page holds the nonce, the doorbell and a flag; then come the indices of
//!    the rings, then, page-aligned, their bytes. These areas don't overlap.
//! 3. Doorbells, flags and indices are atomics, for which any bit pattern is valid.
//! 4. A ring's bytes are accessed by its one [`RingSender`] and its one
//!    [`RingReceiver`] only, each within the span that [`index`](super::index)
//!    gives it, and those spans never overlap while both sides keep to it. A
//!    peer that doesn't can change bytes while they are read here: the values
//!    are garbage then, but every bit pattern is a valid byte, and no access
//!    leaves the ring.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::doorbell::Doorbell;
use super::index::{Consumer, Damaged, Indices, Producer};
use super::segment::Layout;

const PAGE: usize = 4096;
/// Where the doorbell lies, behind the nonce.
const DOORBELL_AT: usize = 128;
/// Where the flag lies that says that the owner has left.
const CLOSED_AT: usize = 256;
const INDICES_AT: usize = PAGE;

/// Up to this many bytes are mapped with all pages present, so that the first
/// collectives don't stop at page faults.
const POPULATE_BYTES: usize = 5 << 20;

/// A mapped segment.
pub(crate) struct Mapping {
    memory: MmapRaw,
    layout: Layout,
    /// For each ring, whether its sender and its receiver have been taken.
    taken: Vec<[AtomicBool; 2]>,
}

impl Mapping {
    /// Size of a segment of `layout`.
    pub(crate) fn bytes(layout: Layout) -> usize {
        Self::data_at(layout, layout.rings)
    }

    /// Where the bytes of `ring` start.
    fn data_at(layout: Layout, ring: usize) -> usize {
        let indices = layout.rings * size_of::<Indices>();
        (INDICES_AT + indices).next_multiple_of(PAGE) + ring * layout.ring_bytes
    }

    /// Maps `file`, which is [`bytes`](Self::bytes) long and sealed.
    pub(crate) fn new(file: &File, layout: Layout) -> io::Result<Self> {
        assert!(layout.ring_bytes.is_power_of_two() && layout.ring_bytes >= PAGE);
        let bytes = Self::bytes(layout);
        let mut options = MmapOptions::new();
        options.len(bytes);
        if bytes <= POPULATE_BYTES {
            options.populate();
        }
        Ok(Self {
            memory: options.map_raw(file)?,
            layout,
            taken: (0..layout.rings).map(|_| Default::default()).collect(),
        })
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// The doorbell of the process that owns the segment.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        const { assert!(DOORBELL_AT.is_multiple_of(align_of::<Doorbell>())) };
        const { assert!(DOORBELL_AT + size_of::<Doorbell>() <= CLOSED_AT) };
        // SAFETY: in bounds and aligned by the assertions above, since mappings
        // are page-aligned; valid and unmoved by invariants 1 to 3.
        unsafe { &*self.memory.as_ptr().add(DOORBELL_AT).cast::<Doorbell>() }
    }

    fn closed(&self) -> &AtomicU32 {
        const { assert!(CLOSED_AT.is_multiple_of(align_of::<AtomicU32>())) };
        const { assert!(CLOSED_AT + size_of::<AtomicU32>() <= INDICES_AT) };
        // SAFETY: as for the doorbell.
        unsafe { &*self.memory.as_ptr().add(CLOSED_AT).cast::<AtomicU32>() }
    }

    /// Says to all who map this segment that its owner uses it no more.
    pub(crate) fn close(&self) {
        // Release: what the owner wrote before is seen by who sees this.
        self.closed().store(1, Ordering::Release);
    }

    /// Whether the owner uses this segment no more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed().load(Ordering::Acquire) != 0
    }

    fn indices(&self, ring: usize) -> &Indices {
        const { assert!(INDICES_AT.is_multiple_of(align_of::<Indices>())) };
        assert!(ring < self.layout.rings);
        let at = INDICES_AT + ring * size_of::<Indices>();
        // SAFETY: in bounds since `ring < rings` and `bytes` counts the indices
        // of all rings; aligned since both terms are multiples of the alignment;
        // valid and unmoved by invariants 1 to 3.
        unsafe { &*self.memory.as_ptr().add(at).cast::<Indices>() }
    }

    /// The address of byte `offset` of `ring`, from which `len` bytes lie in it.
    fn address(&self, ring: usize, offset: usize, len: usize) -> *mut u8 {
        assert!(ring < self.layout.rings);
        assert!(
            offset <= self.layout.ring_bytes && len <= self.layout.ring_bytes - offset,
            "a span lies within its ring"
        );
        let at = Self::data_at(self.layout, ring) + offset;
        // SAFETY: in bounds by the assertions and invariant 1.
        unsafe { self.memory.as_mut_ptr().add(at) }
    }

    /// The sender of `ring`, once.
    pub(crate) fn sender(self: &Arc<Self>, ring: usize) -> Option<RingSender> {
        self.take(ring, 0).then(|| RingSender {
            mapping: Arc::clone(self),
            ring,
            producer: Producer::new(self.layout.ring_bytes),
        })
    }

    /// The receiver of `ring`, once.
    pub(crate) fn receiver(self: &Arc<Self>, ring: usize) -> Option<RingReceiver> {
        self.take(ring, 1).then(|| RingReceiver {
            mapping: Arc::clone(self),
            ring,
            consumer: Consumer::new(self.layout.ring_bytes),
        })
    }

    fn take(&self, ring: usize, side: usize) -> bool {
        self.taken
            .get(ring)
            .is_some_and(|taken| !taken[side].swap(true, Ordering::Relaxed))
    }
}

/// The writing end of a ring.
pub(crate) struct RingSender {
    mapping: Arc<Mapping>,
    ring: usize,
    producer: Producer,
}

impl RingSender {
    /// Writes as much of `bytes` as there is room for; returns how much.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, Damaged> {
        let indices = self.mapping.indices(self.ring);
        let mut sent = 0;
        // Twice, where the ring's end lies in between.
        while sent < bytes.len() {
            let rest = &bytes[sent..];
            let span = self.producer.space(indices, rest.len())?;
            let n = span.len.min(rest.len());
            if n == 0 {
                break;
            }
            let target = self.mapping.address(self.ring, span.offset, n);
            // SAFETY: `target` has `n` bytes; `rest` has as many and is no
            // shared memory of this ring, since a `peek` of it ends before its
            // receiver is used again and the spans differ (invariant 4).
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), target, n) };
            self.producer.publish(indices, n);
            sent += n;
        }
        Ok(sent)
    }

    /// Wakes the receiving process if it sleeps.
    pub(crate) fn ring_doorbell(&self) {
        self.mapping.doorbell().ring();
    }

    /// Whether the receiving process has left.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.mapping.is_closed()
    }
}

/// The reading end of a ring.
pub(crate) struct RingReceiver {
    mapping: Arc<Mapping>,
    ring: usize,
    consumer: Consumer,
}

impl RingReceiver {
    /// Says to all senders to this process that it leaves.
    pub(crate) fn close(&self) {
        self.mapping.close();
    }

    /// Copies what has arrived into `bytes`; returns how much.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Damaged> {
        let mut received = 0;
        while received < bytes.len() {
            let rest = &mut bytes[received..];
            let arrived = self.peek(rest.len())?;
            let n = arrived.len().min(rest.len());
            if n == 0 {
                break;
            }
            rest[..n].copy_from_slice(&arrived[..n]);
            self.consume(n);
            received += n;
        }
        Ok(received)
    }

    /// The bytes that have arrived, up to the ring's end, where they lie. Looks
    /// for more only if fewer than `wanted` are known of.
    pub(crate) fn peek(&mut self, wanted: usize) -> Result<&[u8], Damaged> {
        let indices = self.mapping.indices(self.ring);
        let span = self.consumer.available(indices, wanted)?;
        let start = self.mapping.address(self.ring, span.offset, span.len);
        // SAFETY: `start` has `span.len` bytes, which stay mapped while `self`
        // is borrowed; the writer leaves them alone until they are consumed,
        // which takes `&mut self` (invariant 4).
        Ok(unsafe { std::slice::from_raw_parts(start, span.len) })
    }

    /// Gives the first `n` of the bytes last peeked at back to the writer.
    pub(crate) fn consume(&mut self, n: usize) {
        let indices = self.mapping.indices(self.ring);
        self.consumer.release(indices, n);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::segment::OwnSegment;
    use super::*;

    const LAYOUT: Layout = Layout {
        rings: 2,
        ring_bytes: 1 << 14,
    };

    #[test]
    fn each_end_is_given_out_once() {
        let segment = OwnSegment::create(LAYOUT, [1; 32]).unwrap();
        assert!(segment.mapping.sender(1).is_some());
        assert!(segment.mapping.sender(1).is_none());
        assert!(segment.mapping.receiver(1).is_some());
        assert!(segment.mapping.receiver(1).is_none());
        assert!(segment.mapping.sender(2).is_none());
    }

    #[test]
    fn bytes_pass_between_two_mappings_in_order() {
        const BYTES: usize = 1 << 20;
        let segment = OwnSegment::create(LAYOUT, [2; 32]).unwrap();
        let peers_view = super::super::segment::open(&segment.announcement(), LAYOUT).unwrap();
        let byte = |at: usize| (at * 31 + at / 256) as u8;
        let mut sender = peers_view.sender(1).unwrap();
        let writer = std::thread::spawn(move || {
            let bytes: Vec<u8> = (0..BYTES).map(byte).collect();
            let mut sent = 0;
            while sent < BYTES {
                let end = BYTES.min(sent + 1 + sent % 5000);
                sent += sender.send(&bytes[sent..end]).unwrap();
            }
        });
        let mut receiver = segment.mapping.receiver(1).unwrap();
        let mut received = 0;
        while received < BYTES {
            let mut buffer = [0; 777];
            let n = if received % 2 == 0 {
                receiver.receive(&mut buffer).unwrap()
            } else {
                let arrived = receiver.peek(1).unwrap();
                let n = arrived.len().min(buffer.len());
                buffer[..n].copy_from_slice(&arrived[..n]);
                receiver.consume(n);
                n
            };
            for (i, &got) in buffer[..n].iter().enumerate() {
                assert_eq!(got, byte(received + i));
            }
            received += n;
        }
        writer.join().unwrap();
    }
}
