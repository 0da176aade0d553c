//! A listener that lets in only who completes the [handshake], while strangers,
//! silent or slow, delay nobody.
//!
//! [handshake]: crate::handshake

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::Secret;
use crate::handshake::{Acceptor, Failure, Step};
use crate::socket::poll_until;

/// How long a connection may take for its handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Most handshakes at a time. A rank's takes milliseconds, so when one more
/// arrives, it is the oldest that is given up: with any number of silent
/// strangers the newest connection is served.
const MAX_PENDING: usize = 256;

/// How long no connection is accepted after that failed for want of a resource.
const PAUSE: Duration = Duration::from_millis(50);

/// A peer that proved to know the job's secret.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The connection, non-blocking, and sending without delay.
    pub(crate) stream: TcpStream,
    /// What it said of itself.
    pub(crate) hello: Vec<u8>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Reception {
    listener: TcpListener,
    secret: Secret,
    purpose: Vec<u8>,
    /// Oldest first.
    pending: VecDeque<Pending>,
    paused_until: Option<Instant>,
}

#[derive(Debug)]
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    acceptor: Acceptor,
    since: Instant,
}

impl Reception {
    /// Serves `listener`, for connections with this `secret` and `purpose`.
    pub(crate) fn new(listener: TcpListener, secret: Secret, purpose: &[u8]) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            secret,
            purpose: purpose.to_vec(),
            pending: VecDeque::new(),
            paused_until: None,
        })
    }

    /// Adds what has to be waited for before [`process`](Self::process) has
    /// anything to do.
    pub(crate) fn add_poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if self.paused_until.is_none() {
            fds.push(PollFd::from_borrowed_fd(
                self.listener.as_fd(),
                PollFlags::IN,
            ));
        }
        for pending in &self.pending {
            fds.push(PollFd::from_borrowed_fd(
                pending.stream.as_fd(),
                PollFlags::IN,
            ));
        }
    }

    /// When [`process`](Self::process) has something to do at the latest.
    pub(crate) fn due(&self) -> Option<Instant> {
        let oldest = self.pending.front().map(|p| p.since + HANDSHAKE_LIMIT);
        oldest.into_iter().chain(self.paused_until).min()
    }

    /// Goes on with every handshake as far as it goes without waiting, and
    /// returns those that are complete.
    pub(crate) fn process(&mut self) -> Vec<Guest> {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        let mut guests = Vec::new();
        // Before strangers that are accepted now can push them out.
        self.advance(now, &mut guests);
        if self.paused_until.is_none() {
            self.accept_all(now, &mut guests);
        }
        guests
    }

    /// Waits for the next peer. `None` when `deadline` has passed or `stop`,
    /// asked every `interval`, says so.
    pub(crate) fn next(
        &mut self,
        deadline: Instant,
        interval: Duration,
        stop: impl Fn() -> bool,
        ready: &mut VecDeque<Guest>,
    ) -> io::Result<Option<Guest>> {
        loop {
            if let Some(guest) = ready.pop_front() {
                return Ok(Some(guest));
            }
            let now = Instant::now();
            if now >= deadline || stop() {
                return Ok(None);
            }
            let mut fds = Vec::new();
            self.add_poll_fds(&mut fds);
            let until = (now + interval).min(deadline);
            poll_until(&mut fds, Some(self.due().unwrap_or(until).min(until)))?;
            ready.extend(self.process());
        }
    }

    fn accept_all(&mut self, now: Instant, guests: &mut Vec<Guest>) {
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => self.admit(stream, peer, now, guests),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // Out of file descriptors, most likely: whoever is silent
                    // gives one back.
                    tracing::warn!("can't accept a connection: {error}");
                    self.pending.pop_front();
                    self.paused_until = Some(now + PAUSE);
                    return;
                }
            }
        }
    }

    fn admit(
        &mut self,
        stream: TcpStream,
        peer: SocketAddr,
        now: Instant,
        guests: &mut Vec<Guest>,
    ) {
        let configured = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true));
        if let Err(error) = configured {
            tracing::debug!("connection from {peer} lost: {error}");
            return;
        }
        let acceptor = Acceptor::new(self.secret.clone(), self.purpose.clone());
        let pending = Pending {
            stream,
            peer,
            acceptor,
            since: now,
        };
        match pending.advance() {
            Progress::Pending(pending) => {
                if self.pending.len() >= MAX_PENDING {
                    self.pending.pop_front();
                }
                self.pending.push_back(pending);
            }
            Progress::Done(guest) => guests.push(guest),
            Progress::Failed => {}
        }
    }

    fn advance(&mut self, now: Instant, guests: &mut Vec<Guest>) {
        for pending in std::mem::take(&mut self.pending) {
            let expired = now >= pending.since + HANDSHAKE_LIMIT;
            match pending.advance() {
                Progress::Pending(pending) if expired => {
                    tracing::debug!("{} did not complete the handshake", pending.peer);
                }
                Progress::Pending(pending) => self.pending.push_back(pending),
                Progress::Done(guest) => guests.push(guest),
                Progress::Failed => {}
            }
        }
    }
}

enum Progress {
    Pending(Pending),
    Done(Guest),
    Failed,
}

impl Pending {
    fn advance(mut self) -> Progress {
        match self.receive() {
            Ok(None) => Progress::Pending(self),
            Ok(Some(hello)) => Progress::Done(Guest {
                stream: self.stream,
                hello,
            }),
            Err(failure @ Failure::Io(_)) => {
                tracing::debug!("handshake with {}: {failure}", self.peer);
                Progress::Failed
            }
            Err(failure) => {
                tracing::warn!("refused a connection from {}: {failure}", self.peer);
                Progress::Failed
            }
        }
    }

    /// The hello, once there.
    fn receive(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        let mut buffer = [0; 256];
        loop {
            let wanted = self.acceptor.wanted().min(buffer.len());
            let n = match self.stream.read(&mut buffer[..wanted]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            match self.acceptor.receive(&buffer[..n])? {
                Step::Read => {}
                // Nothing was sent before, so that this fits the socket's buffer.
                Step::Send(bytes) => self.stream.write_all(&bytes)?,
                Step::Done(hello) => return Ok(Some(hello)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake;
    use std::thread;

    fn reception(secret: &Secret) -> (Reception, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let reception = Reception::new(listener, secret.clone(), b"test").unwrap();
        (reception, address)
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn connect(address: SocketAddr, secret: &Secret) -> thread::JoinHandle<TcpStream> {
        let secret = secret.clone();
        thread::spawn(move || {
            let stream = TcpStream::connect(address).unwrap();
            handshake::connect(&stream, &secret, b"test", b"friend", later()).unwrap();
            stream
        })
    }

    fn next(reception: &mut Reception) -> Option<Guest> {
        let mut ready = VecDeque::new();
        reception
            .next(later(), Duration::from_millis(50), || false, &mut ready)
            .unwrap()
    }

    #[test]
    fn silent_strangers_delay_nobody_and_are_bounded() {
        let secret = Secret::generate();
        let (mut reception, address) = reception(&secret);
        let mut strangers = Vec::new();
        for i in 0..2 * MAX_PENDING {
            let mut stranger = TcpStream::connect(address).unwrap();
            // Some have begun a handshake.
            if i % 2 == 0 {
                stranger.write_all(b"bddp").unwrap();
            }
            strangers.push(stranger);
            reception.process();
        }
        assert!(reception.pending.len() <= MAX_PENDING);
        let friend = connect(address, &secret);
        let guest = next(&mut reception).unwrap();
        assert_eq!(guest.hello, b"friend");
        friend.join().unwrap();
    }

    #[test]
    fn strangers_that_talk_are_sent_away() {
        let secret = Secret::generate();
        let (mut reception, address) = reception(&secret);
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let friend = connect(address, &secret);
        assert_eq!(next(&mut reception).unwrap().hello, b"friend");
        friend.join().unwrap();
        stranger
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        // It is told nothing: the end, or a reset since its bytes were not read.
        let mut bytes = Vec::new();
        let _ = stranger.read_to_end(&mut bytes);
        assert_eq!(bytes, b"");
        assert!(reception.pending.is_empty());
    }

    #[test]
    fn a_wait_for_nobody_ends() {
        let (mut reception, _) = reception(&Secret::generate());
        let mut ready = VecDeque::new();
        let soon = Instant::now() + Duration::from_millis(20);
        let slice = Duration::from_millis(5);
        let none = reception.next(soon, slice, || false, &mut ready).unwrap();
        assert!(none.is_none());
        let none = reception.next(later(), slice, || true, &mut ready).unwrap();
        assert!(none.is_none());
    }
}
