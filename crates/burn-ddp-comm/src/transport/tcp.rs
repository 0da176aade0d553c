//! TCP between ranks that share no memory.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;

use crate::peer::ALIGNMENT;

const INPUT_BYTES: usize = 256 << 10;
/// Shorter messages than this are gathered, so that a header does not travel in
/// a packet of its own.
const SMALL_BYTES: usize = 4 << 10;
const STAGE_BYTES: usize = 16 << 10;

/// A stream each way through one connection.
pub(crate) struct TcpLink {
    stream: TcpStream,
    input: Input,
    /// Bytes to be sent before any others, from `staged_from` on.
    staged: Vec<u8>,
    staged_from: usize,
    /// What the last attempts in this pass ended for want of.
    starved: PollFlags,
}

/// Received bytes. A byte's place in the buffer and its place in the stream
/// agree modulo [`ALIGNMENT`], so that elements lie aligned.
struct Input {
    words: Box<[u128]>,
    start: usize,
    end: usize,
    /// Place in the stream of the byte at `start`.
    position: u64,
}

impl Input {
    fn new() -> Self {
        Self {
            words: vec![0; INPUT_BYTES / size_of::<u128>()].into_boxed_slice(),
            start: 0,
            end: 0,
            position: 0,
        }
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start..self.end]
    }

    fn consume(&mut self, n: usize) {
        self.start += n;
        self.position += n as u64;
    }

    /// Room behind the bytes held, which are moved to the front if there is
    /// none.
    fn room(&mut self) -> &mut [u8] {
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        if self.start == self.end {
            self.start = (self.position % ALIGNMENT as u64) as usize;
            self.end = self.start;
        } else if self.end == buffer.len() {
            let start = (self.position % ALIGNMENT as u64) as usize;
            buffer.copy_within(self.start..self.end, start);
            self.end = start + (self.end - self.start);
            self.start = start;
        }
        &mut buffer[self.end..]
    }
}

impl TcpLink {
    /// Takes an authenticated connection.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        // No limit on unacknowledged time: a peer may be busy for long without
        // reading. The store watches over the peers' hosts.
        // The socket buffers are left to the kernel, which lets them grow to
        // megabytes as needed; one that asks for a size gets less, for good.
        Ok(Self {
            stream,
            input: Input::new(),
            staged: Vec::with_capacity(STAGE_BYTES),
            staged_from: 0,
            starved: PollFlags::empty(),
        })
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<usize, String> {
        if bytes.len() <= SMALL_BYTES && self.staged.len() + bytes.len() <= STAGE_BYTES {
            self.staged.extend_from_slice(bytes);
            return Ok(bytes.len());
        }
        let staged = self.staged.len() - self.staged_from;
        let slices = [
            IoSlice::new(&self.staged[self.staged_from..]),
            IoSlice::new(bytes),
        ];
        let n = attempt(|| (&self.stream).write_vectored(&slices))?;
        if n < staged + bytes.len() {
            self.starved |= PollFlags::OUT;
        }
        self.unstage(n.min(staged));
        Ok(n.saturating_sub(staged))
    }

    fn unstage(&mut self, n: usize) {
        self.staged_from += n;
        if self.staged_from == self.staged.len() {
            self.staged.clear();
            self.staged_from = 0;
        }
    }

    pub(super) fn flush(&mut self) -> Result<(), String> {
        if !self.is_flushed() {
            let staged = &self.staged[self.staged_from..];
            let n = attempt(|| (&self.stream).write(staged))?;
            if n < staged.len() {
                self.starved |= PollFlags::OUT;
            }
            self.unstage(n);
        }
        Ok(())
    }

    /// Whether the kernel has everything that was sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.staged.is_empty()
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        if self.input.len() == 0 && bytes.len() > SMALL_BYTES {
            let n = self.read(bytes)?;
            self.input.position += n as u64;
            return Ok(n);
        }
        let arrived = self.peek(bytes.len())?;
        let n = arrived.len().min(bytes.len());
        bytes[..n].copy_from_slice(&arrived[..n]);
        self.consume(n);
        Ok(n)
    }

    pub(super) fn peek(&mut self, wanted: usize) -> Result<&[u8], String> {
        if self.input.len() < wanted {
            let n = {
                let room = self.input.room();
                read_some(&self.stream, room)?
            };
            self.input.end += n;
            if self.input.len() < wanted {
                self.starved |= PollFlags::IN;
            }
        }
        Ok(self.input.bytes())
    }

    pub(super) fn consume(&mut self, n: usize) {
        self.input.consume(n);
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<usize, String> {
        let n = read_some(&self.stream, bytes)?;
        if n < bytes.len() {
            self.starved |= PollFlags::IN;
        }
        Ok(n)
    }

    /// Forgets what earlier attempts were for want of.
    pub(super) fn begin_pass(&mut self) {
        self.starved = PollFlags::empty();
    }

    /// What a wait has to wait for, since this pass's attempts ended for want of
    /// it.
    pub(super) fn starved(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.stream.as_fd(), self.starved)
    }
}

/// Reads what there is; 0 means nothing yet.
fn read_some(mut stream: &TcpStream, bytes: &mut [u8]) -> Result<usize, String> {
    if bytes.is_empty() {
        return Ok(0);
    }
    let mut ended = false;
    let n = attempt(|| {
        let n = stream.read(bytes)?;
        ended = n == 0;
        Ok(n)
    })?;
    if ended {
        return Err("it closed the connection".to_owned());
    }
    Ok(n)
}

/// The bytes moved by a non-blocking call; 0 if none can move now.
fn attempt(mut call: impl FnMut() -> io::Result<usize>) -> Result<usize, String> {
    loop {
        match call() {
            Ok(n) => return Ok(n),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::TcpListener;

    fn pair() -> (TcpLink, TcpLink) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        (TcpLink::new(one).unwrap(), TcpLink::new(other).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20))]

        /// Sends and receives of any size, copied or peeked at, give the bytes in
        /// order and peeked ones aligned as they lie in the stream.
        #[test]
        fn bytes_pass_in_order_and_aligned(
            sends in proptest::collection::vec(1..50_000_usize, 1..40),
            receives in proptest::collection::vec((any::<bool>(), 1..70_000_usize), 1..20),
        ) {
            let (mut one, mut other) = pair();
            let total: usize = sends.iter().sum();
            let byte = |at: usize| (at * 7 + at / 251) as u8;
            let bytes: Vec<u8> = (0..total).map(byte).collect();
            let mut sends = sends.into_iter();
            let (mut sent, mut end, mut received) = (0, 0, 0);
            let mut receives = receives.into_iter().cycle();
            while received < total {
                if sent == end {
                    end += sends.next().unwrap_or(0);
                }
                sent += one.send(&bytes[sent..end]).unwrap();
                one.flush().unwrap();
                let (copy, wanted) = receives.next().unwrap();
                let n = if copy {
                    let mut buffer = vec![0; wanted];
                    let n = other.receive(&mut buffer).unwrap();
                    prop_assert_eq!(&buffer[..n], &bytes[received..received + n]);
                    n
                } else {
                    let arrived = other.peek(wanted).unwrap();
                    if !arrived.is_empty() {
                        prop_assert_eq!(arrived.as_ptr() as usize % 16, received % 16);
                    }
                    let n = arrived.len().min(wanted);
                    prop_assert_eq!(&arrived[..n], &bytes[received..received + n]);
                    other.consume(n);
                    n
                };
                received += n;
            }
        }
    }

    #[test]
    fn a_closed_connection_is_an_error_once_its_bytes_are_read() {
        let (mut one, mut other) = pair();
        one.send(&[1, 2, 3]).unwrap();
        one.flush().unwrap();
        drop(one);
        let mut bytes = [0; 3];
        let mut received = 0;
        while received < 3 {
            received += other.receive(&mut bytes[received..]).unwrap();
        }
        assert_eq!(bytes, [1, 2, 3]);
        let error = loop {
            match other.receive(&mut bytes) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(error.contains("closed"));
    }

    #[test]
    fn want_of_bytes_and_of_room_is_remembered_for_the_wait() {
        let (mut one, mut other) = pair();
        assert!(other.peek(1).unwrap().is_empty());
        assert_eq!(other.starved().1, PollFlags::IN);
        other.begin_pass();
        assert_eq!(other.starved().1, PollFlags::empty());
        let bytes = vec![0; 64 << 10];
        while one.starved().1.is_empty() {
            one.send(&bytes).unwrap();
        }
        assert_eq!(one.starved().1, PollFlags::OUT);
    }
}
