//! One peer's messages during a collective: where the streams to and from it
//! stand.
//!
//! A message is a header of [`HEADER_BYTES`] and then segments, each padded to a
//! multiple of [`ALIGNMENT`], so that elements can be read where they lie.

use crate::call::{HEADER_BYTES, Header};
use crate::transport::Link;
use crate::{Error, Result};

/// Alignment of every segment in the stream.
pub(crate) const ALIGNMENT: usize = 64;

/// Most bytes that one call moves in one direction, so that the other direction
/// and the other peers get their turn while the bytes are still in cache.
pub(crate) const BURST: usize = 32 << 10;

const PADDING: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// Why a collective stops short.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The link to a rank broke.
    Broken { rank: usize, reason: String },
    /// A rank made a different call.
    Mismatch,
    /// The group has failed elsewhere.
    Fault,
    /// Nothing arrived for the whole time limit.
    Deadline,
    /// These ranks left the group in good order, but are needed.
    Left(Vec<usize>),
    /// Something else, already described.
    Failed(Error),
}

/// Result of a step of a collective: whether anything moved.
pub(crate) type Moved = Result<bool, Stop>;

/// A peer and the state of its streams in the current collective.
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) link: Link,
    /// Number of the last point-to-point call with it; the first is 1.
    pub(crate) pair_sequence: u64,
    /// This rank's header in the current operation.
    own: Header,
    /// The header received from it, when complete.
    header: Header,
    header_complete: bool,
    differs: bool,
    outgoing: Flow,
    incoming: Flow,
}

/// Position in a stream of segments; segment 0 is the header.
#[derive(Clone, Copy)]
struct Flow {
    segment: usize,
    /// Bytes of the segment and its padding that have passed.
    position: usize,
    segments: usize,
}

impl Flow {
    /// No message.
    const NONE: Self = Self {
        segment: 1,
        position: 0,
        segments: 0,
    };

    fn new(segments: usize) -> Self {
        Self {
            segment: 0,
            position: 0,
            segments: 1 + segments,
        }
    }

    fn is_done(&self) -> bool {
        self.segment >= self.segments
    }

    fn next_segment(&mut self) {
        self.segment += 1;
        self.position = 0;
    }
}

impl Peer {
    pub(crate) fn new(rank: usize, link: Link) -> Self {
        Self {
            rank,
            link,
            pair_sequence: 0,
            own: [0; HEADER_BYTES],
            header: [0; HEADER_BYTES],
            header_complete: false,
            differs: false,
            outgoing: Flow::NONE,
            incoming: Flow::NONE,
        }
    }

    /// Begins an operation in which this peer has no part.
    pub(crate) fn stand_by(&mut self) {
        self.header_complete = false;
        self.differs = false;
        self.outgoing = Flow::NONE;
        self.incoming = Flow::NONE;
    }

    /// Whether this peer has a part in the current operation.
    pub(crate) fn takes_part(&self) -> bool {
        self.outgoing.segments > 0
    }

    /// Begins a message of `outgoing` segments to this peer and one of
    /// `incoming` segments from it, both behind the header `own`.
    pub(crate) fn begin(&mut self, own: &Header, outgoing: usize, incoming: usize) {
        self.own = *own;
        self.header_complete = false;
        self.differs = false;
        self.outgoing = Flow::new(outgoing);
        self.incoming = Flow::new(incoming);
    }

    /// Begins a pass and moves the headers both ways. A header that is not this
    /// rank's stops the stream from this peer, see [`differs`](Self::differs).
    pub(crate) fn exchange_headers(&mut self) -> Moved {
        let mut moved = false;
        self.link.begin_pass();
        if self.outgoing.segment == 0 {
            let own = self.own;
            moved |= self.send(&own, HEADER_BYTES)?;
        }
        if self.incoming.segment == 0 && !self.header_complete {
            let n = self
                .link
                .receive(&mut self.header[self.incoming.position..])
                .map_err(|reason| broken(self.rank, reason))?;
            self.incoming.position += n;
            moved |= n > 0;
            if self.incoming.position == HEADER_BYTES {
                self.header_complete = true;
                self.differs = self.header != self.own;
                if !self.differs {
                    self.incoming.next_segment();
                }
            }
        }
        Ok(moved)
    }

    /// Ends a pass; whether everything has passed.
    pub(crate) fn end_pass(&mut self) -> Moved {
        self.link
            .flush()
            .map_err(|reason| broken(self.rank, reason))?;
        Ok(self.is_done() && self.link.is_flushed())
    }

    /// Whether this peer's header is not this rank's.
    pub(crate) fn differs(&self) -> bool {
        self.differs
    }

    /// The header received from this peer in this collective.
    pub(crate) fn header(&self) -> Option<&Header> {
        self.header_complete.then_some(&self.header)
    }

    /// The segment being sent; 1 is the first after the header.
    pub(crate) fn sending(&self) -> usize {
        self.outgoing.segment
    }

    /// The segment being received; 0 until the header has arrived and agreed.
    pub(crate) fn receiving(&self) -> usize {
        self.incoming.segment
    }

    /// Bytes received of the current segment.
    pub(crate) fn received(&self) -> usize {
        self.incoming.position
    }

    /// Whether both messages have passed whole.
    pub(crate) fn is_done(&self) -> bool {
        self.outgoing.is_done() && self.incoming.is_done()
    }

    /// Whether this peer's message is incomplete.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.incoming.is_done()
    }

    /// Sends on in the current segment, `body`, of which the first `ready`
    /// bytes can be sent by now.
    pub(crate) fn send(&mut self, body: &[u8], ready: usize) -> Moved {
        let padded = body.len().next_multiple_of(ALIGNMENT);
        let flow = &mut self.outgoing;
        let mut moved = false;
        if flow.position < ready {
            let end = ready.min(flow.position + BURST);
            let n = self
                .link
                .send(&body[flow.position..end])
                .map_err(|reason| broken(self.rank, reason))?;
            flow.position += n;
            moved |= n > 0;
        }
        if (body.len()..padded).contains(&flow.position) {
            let n = self
                .link
                .send(&PADDING[..padded - flow.position])
                .map_err(|reason| broken(self.rank, reason))?;
            flow.position += n;
            moved |= n > 0;
        }
        if flow.position == padded {
            flow.next_segment();
            moved = true;
        }
        Ok(moved)
    }

    /// Receives on in the current segment, into `body`.
    pub(crate) fn receive(&mut self, body: &mut [u8]) -> Moved {
        let mut moved = false;
        let position = self.incoming.position;
        if position < body.len() {
            let end = body.len().min(position + BURST);
            let n = self
                .link
                .receive(&mut body[position..end])
                .map_err(|reason| broken(self.rank, reason))?;
            self.incoming.position += n;
            moved |= n > 0;
        }
        Ok(moved | self.pass_padding(body.len())?)
    }

    /// Reads on in the current segment, of `len` bytes, without a copy: `take`
    /// gets the position in the segment and whole elements of `element_size`
    /// bytes from there, at most `limit` bytes.
    pub(crate) fn read(
        &mut self,
        len: usize,
        element_size: usize,
        limit: usize,
        take: impl FnOnce(usize, &[u8]),
    ) -> Moved {
        let mut moved = false;
        let position = self.incoming.position;
        let limit = limit.min(len.saturating_sub(position)).min(BURST);
        if limit > 0 {
            let bytes = self
                .link
                .peek(limit)
                .map_err(|reason| broken(self.rank, reason))?;
            let n = bytes.len().min(limit) / element_size * element_size;
            if n > 0 {
                take(position, &bytes[..n]);
                self.link.consume(n);
                self.incoming.position += n;
                moved = true;
            }
        }
        Ok(moved | self.pass_padding(len)?)
    }

    /// Receives the padding behind a segment of `len` bytes and passes on to
    /// the next segment.
    fn pass_padding(&mut self, len: usize) -> Moved {
        let padded = len.next_multiple_of(ALIGNMENT);
        let position = self.incoming.position;
        let mut moved = false;
        if (len..padded).contains(&position) {
            let mut padding = PADDING;
            let n = self
                .link
                .receive(&mut padding[..padded - position])
                .map_err(|reason| broken(self.rank, reason))?;
            self.incoming.position += n;
            moved |= n > 0;
        }
        if self.incoming.position == padded {
            self.incoming.next_segment();
            moved = true;
        }
        Ok(moved)
    }
}

fn broken(rank: usize, reason: String) -> Stop {
    Stop::Broken { rank, reason }
}
