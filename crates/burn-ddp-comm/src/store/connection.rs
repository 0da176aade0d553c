//! One rank's connection at the store: non-blocking, with what is still to be
//! sent.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::frame::{Frame, FrameBuffer};
use super::protocol::MAX_REQUEST_BYTES;
use crate::socket::{is_transient, notice_silence};

/// How long a rank may take to close a connection that the store has closed.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);

/// Most bytes that wait to be sent to a rank which does not read them.
const MAX_UNSENT_BYTES: usize = 256 << 20;

/// Most bytes read in one go, so that the other ranks get their turn.
const MAX_READ_BYTES: usize = 256 << 10;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    incoming: FrameBuffer,
    unsent: VecDeque<Frame>,
    /// Bytes of the first unsent frame that are sent.
    sent: usize,
    unsent_bytes: usize,
    closing: Option<Closing>,
    /// Why nothing more can be sent.
    broken: Option<String>,
}

#[derive(Debug)]
struct Closing {
    /// When it is closed whatever the rank does.
    until: Instant,
    /// Whether the rank has been told.
    shut_down: bool,
}

impl Connection {
    /// Takes a non-blocking connection.
    pub(super) fn new(stream: TcpStream) -> Self {
        if let Err(error) = notice_silence(&stream) {
            tracing::warn!("a rank whose host vanishes will be noticed late: {error}");
        }
        Self {
            stream,
            incoming: FrameBuffer::default(),
            unsent: VecDeque::new(),
            sent: 0,
            unsent_bytes: 0,
            closing: None,
            broken: None,
        }
    }

    /// What to wait for before [`flush`](Self::flush) or
    /// [`receive`](Self::receive) can do anything.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let mut events = PollFlags::IN;
        if !self.unsent.is_empty() {
            events |= PollFlags::OUT;
        }
        PollFd::from_borrowed_fd(self.stream.as_fd(), events)
    }

    /// Sends `frame` now as far as possible, and the rest when
    /// [`flush`](Self::flush) is called. That a connection is broken shows when
    /// it is [read](Self::receive): what the rank said before still counts.
    pub(super) fn send(&mut self, frame: Frame) {
        if self.broken.is_some() {
            return;
        }
        self.unsent_bytes += frame.len();
        self.unsent.push_back(frame);
        self.flush();
        if self.unsent_bytes > MAX_UNSENT_BYTES {
            self.break_off("does not read what the store sends it".to_owned());
        }
    }

    /// Sends what can be sent without waiting.
    pub(super) fn flush(&mut self) {
        while let Some(frame) = self.unsent.front() {
            match self.stream.write(&frame[self.sent..]) {
                Ok(n) => {
                    self.sent += n;
                    self.unsent_bytes -= n;
                    if self.sent == frame.len() {
                        self.unsent.pop_front();
                        self.sent = 0;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.break_off(describe_end(&error)),
            }
        }
        if let Some(closing) = &mut self.closing
            && !closing.shut_down
        {
            closing.shut_down = true;
            // That it is closed already is as good.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    fn break_off(&mut self, why: String) {
        self.broken = Some(why);
        self.unsent.clear();
        self.unsent_bytes = 0;
        // Ends the next read; that it is closed already is as good.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Closes the connection as soon as everything is sent and the rank has
    /// closed it too: one that is closed with bytes unread is reset, and what
    /// was sent through it may be lost.
    pub(super) fn close(&mut self, now: Instant) {
        self.closing.get_or_insert(Closing {
            until: now + CLOSING_LIMIT,
            shut_down: false,
        });
        self.flush();
    }

    /// When to give the connection up.
    pub(super) fn closes_at(&self) -> Option<Instant> {
        self.closing.as_ref().map(|closing| closing.until)
    }

    /// Passes what has arrived to `take`, message by message. The error says how
    /// the connection ended, as in "process 17 on node3 ...".
    pub(super) fn receive(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut buffer = [0; 16 << 10];
        let mut received = 0;
        while received < MAX_READ_BYTES {
            let n = match self.stream.read(&mut buffer) {
                Ok(0) => return Err(self.broken.clone().unwrap_or_else(|| CLOSED.to_owned())),
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if is_transient(&error) => return Ok(()),
                Err(error) => return Err(describe_end(&error)),
            };
            received += n;
            if self.closing.is_some() {
                continue;
            }
            self.incoming.extend(&buffer[..n]);
            loop {
                let message = self.incoming.next(MAX_REQUEST_BYTES).map_err(|long| {
                    format!(
                        "sent the store a message of {} bytes, which is too long",
                        long.0
                    )
                })?;
                let Some(message) = message else { break };
                take(message)
                    .map_err(|error| format!("sent the store a damaged message ({error})"))?;
            }
        }
        Ok(())
    }
}

const CLOSED: &str = "ended without leaving the group (it was killed, crashed, or exited without \
                      dropping its ProcessGroup)";

/// How a process ended whose connection ended with `error`.
fn describe_end(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => CLOSED.to_owned(),
        _ => format!("can't be reached any more ({error})"),
    }
}
