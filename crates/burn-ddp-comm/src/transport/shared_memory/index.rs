//! The index logic of a ring with one writer and one reader: which bytes are
//! whose.
//!
//! Counters run freely; a byte's place is its number modulo the capacity. Each
//! side keeps its own counter privately and publishes a copy, so that the other
//! process can at worst lie about its own side: a counter that can't be true is
//! reported as [`Damaged`], and every span lies within the ring.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A published counter on a pair of cache lines of its own (processors fetch
/// lines in pairs).
#[repr(C, align(128))]
struct Published(AtomicU64);

/// The shared part of a ring's state.
#[repr(C)]
pub(crate) struct Indices {
    /// Bytes read so far.
    head: Published,
    /// Bytes written so far.
    tail: Published,
}

/// The other side published a counter that can't be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// A contiguous part of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// One side's view of a ring.
struct Side {
    capacity: u64,
    /// The own counter.
    own: u64,
    /// The other side's, as last seen.
    other: u64,
}

/// The writing side.
pub(crate) struct Producer(Side);

/// The reading side.
pub(crate) struct Consumer(Side);

impl Side {
    fn new(capacity: usize) -> Self {
        assert!(
            capacity.is_power_of_two(),
            "a ring's capacity is a power of two"
        );
        Self {
            capacity: capacity as u64,
            own: 0,
            other: 0,
        }
    }

    /// The first contiguous part of the next `len` bytes.
    fn span(&self, len: u64) -> Span {
        let offset = self.own & (self.capacity - 1);
        Span {
            offset: offset as usize,
            len: len.min(self.capacity - offset) as usize,
        }
    }
}

impl Indices {
    /// Those of an empty ring.
    #[cfg(any(loom, test))]
    pub(crate) fn new() -> Self {
        Self {
            head: Published(AtomicU64::new(0)),
            tail: Published(AtomicU64::new(0)),
        }
    }
}

impl Producer {
    /// The writer of an empty ring of `capacity` bytes, a power of two.
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Side::new(capacity))
    }

    /// Where the next bytes can be written. Looks at the reader's progress only
    /// if less than `wanted` bytes are known to be free.
    pub(crate) fn space(&mut self, indices: &Indices, wanted: usize) -> Result<Span, Damaged> {
        let side = &mut self.0;
        let free = |side: &Side| {
            side.own
                .checked_sub(side.other)
                .and_then(|used| side.capacity.checked_sub(used))
                .ok_or(Damaged)
        };
        let mut known = free(side)?;
        if known < wanted as u64 {
            // Acquire: the reader is done with the bytes that it released.
            side.other = indices.head.0.load(Ordering::Acquire);
            known = free(side)?;
        }
        Ok(side.span(known))
    }

    /// Hands the next `n` bytes, written within the last [`space`](Self::space),
    /// to the reader.
    pub(crate) fn publish(&mut self, indices: &Indices, n: usize) {
        self.0.own += n as u64;
        // Release: the bytes are written before they are announced.
        indices.tail.0.store(self.0.own, Ordering::Release);
    }
}

impl Consumer {
    /// The reader of an empty ring of `capacity` bytes, a power of two.
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Side::new(capacity))
    }

    /// Where the next bytes can be read. Looks at the writer's progress only if
    /// less than `wanted` bytes are known to be there.
    pub(crate) fn available(&mut self, indices: &Indices, wanted: usize) -> Result<Span, Damaged> {
        let side = &mut self.0;
        let filled = |side: &Side| {
            side.other
                .checked_sub(side.own)
                .filter(|&filled| filled <= side.capacity)
                .ok_or(Damaged)
        };
        let mut known = filled(side)?;
        if known < wanted as u64 {
            // Acquire: the bytes announced are seen as they were written.
            side.other = indices.tail.0.load(Ordering::Acquire);
            known = filled(side)?;
        }
        Ok(side.span(known))
    }

    /// Hands the next `n` bytes, read within the last
    /// [`available`](Self::available), back to the writer.
    pub(crate) fn release(&mut self, indices: &Indices, n: usize) {
        self.0.own += n as u64;
        // Release: the bytes have been read before they may be overwritten.
        indices.head.0.store(self.0.own, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Random writes and reads through the ring give what a queue gives.
        #[test]
        fn a_ring_is_a_bounded_queue(
            capacity in (0..9_u32).prop_map(|bits| 1_usize << bits),
            steps in proptest::collection::vec((any::<bool>(), 0..400_usize), 0..200),
        ) {
            let indices = Indices::new();
            let mut ring = vec![0_u8; capacity];
            let (mut producer, mut consumer) = (Producer::new(capacity), Consumer::new(capacity));
            let mut model = VecDeque::new();
            let mut next = 0_u8;
            for (write, wanted) in steps {
                if write {
                    let span = producer.space(&indices, wanted).unwrap();
                    prop_assert!(span.offset + span.len <= capacity);
                    // All that is free, or up to the end of the ring.
                    let free = capacity - model.len();
                    prop_assert!(span.len <= free);
                    prop_assert!(
                        span.len >= wanted.min(free) || span.offset + span.len == capacity
                    );
                    let n = span.len.min(wanted);
                    for byte in &mut ring[span.offset..span.offset + n] {
                        *byte = next;
                        model.push_back(next);
                        next = next.wrapping_add(1);
                    }
                    producer.publish(&indices, n);
                } else {
                    let span = consumer.available(&indices, wanted).unwrap();
                    prop_assert!(span.len <= model.len());
                    prop_assert!(
                        span.len >= wanted.min(model.len()) || span.offset + span.len == capacity
                    );
                    let n = span.len.min(wanted);
                    for &byte in &ring[span.offset..span.offset + n] {
                        prop_assert_eq!(Some(byte), model.pop_front());
                    }
                    consumer.release(&indices, n);
                }
            }
        }

        /// Whatever the other side publishes, spans stay within the ring.
        #[test]
        fn lies_are_noticed_or_harmless(
            published in proptest::collection::vec(
                prop_oneof![any::<u64>(), 0..200_u64, (u64::MAX - 200)..=u64::MAX],
                1..20,
            ),
            moves in proptest::collection::vec(0..100_usize, 20),
        ) {
            let capacity = 64;
            let indices = Indices::new();
            let (mut producer, mut consumer) = (Producer::new(capacity), Consumer::new(capacity));
            for (&lie, &n) in published.iter().zip(&moves) {
                indices.head.0.store(lie, Ordering::Relaxed);
                indices.tail.0.store(lie, Ordering::Relaxed);
                if let Ok(span) = producer.space(&indices, n) {
                    prop_assert!(span.offset + span.len <= capacity);
                    producer.publish(&indices, span.len.min(n));
                }
                indices.tail.0.store(lie, Ordering::Relaxed);
                if let Ok(span) = consumer.available(&indices, n) {
                    prop_assert!(span.offset + span.len <= capacity);
                    consumer.release(&indices, span.len.min(n));
                }
            }
        }
    }

    #[test]
    fn impossible_counters_are_damage() {
        let indices = Indices::new();
        indices.tail.0.store(65, Ordering::Relaxed);
        indices.head.0.store(1, Ordering::Relaxed);
        assert_eq!(Consumer::new(64).available(&indices, 1), Err(Damaged));
        assert_eq!(Producer::new(64).space(&indices, 65), Err(Damaged));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const CAPACITY: usize = 2;
    const BYTES: usize = 4;

    struct Ring {
        indices: Indices,
        bytes: [UnsafeCell<u8>; CAPACITY],
    }

    /// Loom's cells report any access that another thread's could overlap.
    #[test]
    fn no_byte_is_touched_by_both_sides_at_once() {
        loom::model(|| {
            let ring = Arc::new(Ring {
                indices: Indices::new(),
                bytes: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            let writer = {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    let mut producer = Producer::new(CAPACITY);
                    let mut written = 0;
                    while written < BYTES {
                        let span = producer.space(&ring.indices, 1).unwrap();
                        let n = span.len.min(BYTES - written);
                        for cell in &ring.bytes[span.offset..span.offset + n] {
                            written += 1;
                            // SAFETY: the span is the writer's until published.
                            cell.with_mut(|byte| unsafe { *byte = written as u8 });
                        }
                        if n > 0 {
                            producer.publish(&ring.indices, n);
                        } else {
                            thread::yield_now();
                        }
                    }
                })
            };
            let mut consumer = Consumer::new(CAPACITY);
            let mut read = 0;
            while read < BYTES {
                let span = consumer.available(&ring.indices, 1).unwrap();
                for cell in &ring.bytes[span.offset..span.offset + span.len] {
                    read += 1;
                    // SAFETY: the span is the reader's until released.
                    cell.with(|byte| assert_eq!(unsafe { *byte }, read as u8));
                }
                if span.len > 0 {
                    consumer.release(&ring.indices, span.len);
                } else {
                    thread::yield_now();
                }
            }
            writer.join().unwrap();
        });
    }
}
