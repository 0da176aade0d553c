//! A rank's connection to the store: the requests on it and their answers.
//!
//! Session by the threads that ask and the [presence](super::presence) thread,
//! which reads the answers.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::encode;
use super::protocol::{Answer, MAX_TEXT_BYTES, Request, truncated};
use crate::fault::Fault;
use crate::flight_recorder::FlightRecorder;
use crate::panic_message::PanicListener;
use crate::socket::write_until;
use crate::{Error, Result};

/// How long a message may take to be passed to the kernel: one that takes
/// longer finds a store that has stopped reading.
pub(super) const SEND_LIMIT: Duration = Duration::from_secs(10);

/// How long last words may delay the end of the process.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(300);

/// How long it may take to find out why nothing can be sent any more.
const END_LIMIT: Duration = Duration::from_secs(1);

/// See the [module](self).
pub(super) struct Session {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    /// The rank that hosts the store, if one does.
    pub(super) host: Option<usize>,
    /// When this rank began to connect.
    pub(super) started: Instant,
    /// How long the store may be silent.
    pub(super) silence: Duration,
    pub(super) fault: Arc<Fault>,
    pub(super) recorder: Arc<FlightRecorder>,
    pub(super) calls: Mutex<Calls>,
    /// Notified when an answer has arrived, and when none will.
    pub(super) answered: Condvar,
    /// Held while a message is written.
    writer: Mutex<()>,
    next_id: AtomicU64,
    /// Id of the last words that have reached the store.
    pub(super) last_words_heard: AtomicU64,
    /// Whether this rank has begun to leave.
    pub(super) leaving: AtomicBool,
    pub(super) left: Vec<AtomicBool>,
}

/// The requests that wait for their answers.
#[derive(Default)]
pub(super) struct Calls {
    pub(super) answers: HashMap<u64, Option<Answer>>,
    /// Why there will be no more answers.
    pub(super) ended: Option<Error>,
}

/// Why a request has no answer.
pub(super) enum Unanswered {
    Deadline,
    Error(Error),
}

impl From<Error> for Unanswered {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// `300 s`, or `0.3 s`.
pub(super) fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{seconds} s"),
    }
}

impl Session {
    pub(super) fn new(
        (rank, world_size): (usize, usize),
        stream: TcpStream,
        address: SocketAddr,
        host: Option<usize>,
        started: Instant,
        silence: Duration,
    ) -> Arc<Self> {
        let session = Arc::new(Self {
            rank,
            world_size,
            stream,
            address,
            host,
            started,
            silence,
            fault: Arc::new(Fault::new()),
            recorder: Arc::new(FlightRecorder::new(rank, world_size)),
            calls: Mutex::default(),
            answered: Condvar::new(),
            writer: Mutex::new(()),
            next_id: AtomicU64::new(1),
            last_words_heard: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            left: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
        });
        let weak: Weak<Self> = Arc::downgrade(&session);
        session.fault.on_set(move || {
            if let Some(session) = weak.upgrade() {
                // Under the lock, so that no wait begins unnoticed.
                let _calls = lock(&session.calls);
                session.answered.notify_all();
            }
        });
        session
    }

    /// "store at 10.0.0.1:29500 (rank 0)".
    pub(super) fn store(&self) -> String {
        match self.host {
            Some(host) => format!("store at {} (rank {host})", self.address),
            None => format!("store at {} (launcher)", self.address),
        }
    }

    pub(super) fn unexpected(&self, answer: &Answer) -> Error {
        match answer {
            Answer::Invalid(why) => Error::usage(format!("the {} refuses: {why}", self.store())),
            _ => Error::environment(format!("the {} gave no sensible answer", self.store())),
        }
    }

    pub(super) fn silent(&self) -> Error {
        Error::environment(format!(
            "the {} does not answer: is its process stopped, or its machine overloaded?",
            self.store()
        ))
    }

    /// Sends `request`. The error is the reason for which the store is lost.
    pub(super) fn send(&self, request: &Request) -> Result<()> {
        let frame = encode(request)
            .map_err(|error| Error::usage(format!("a request can't be encoded: {error}")))?;
        let sent = {
            let _writer = lock(&self.writer);
            self.write(&frame, SEND_LIMIT)
        };
        let Err(error) = sent else {
            return Ok(());
        };
        if error.kind() == io::ErrorKind::TimedOut {
            return Err(self.end(self.fault.set(self.silent())));
        }
        // The reading thread finds out what happened.
        let deadline = Instant::now() + END_LIMIT;
        let gone = format!("can't reach the {} any more", self.store());
        Err(self
            .await_end(deadline)
            .unwrap_or_else(|| Error::environment_from(gone, error)))
    }

    /// Shows the store that this rank is running, unless that would take time.
    pub(super) fn send_heartbeat(&self) {
        let activity = self.recorder.activity();
        let Ok(frame) = encode(&Request::Heartbeat { activity }) else {
            return;
        };
        if let Ok(_writer) = self.writer.try_lock()
            && let Ok(sent) = (&self.stream).write(&frame)
            && sent < frame.len()
        {
            // No other message can follow a part of one.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Writes a frame; the caller is the one that writes.
    fn write(&self, frame: &[u8], limit: Duration) -> io::Result<()> {
        let written = write_until(&self.stream, frame, Instant::now() + limit);
        if written.is_err() {
            // No other message can follow a part of one. The reading thread
            // wakes up and takes note.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        written
    }

    /// Sends a request and has `wait` wait for its answer.
    pub(super) fn call(
        &self,
        make: impl FnOnce(u64) -> Request,
        wait: impl FnOnce(u64) -> Result<Answer, Unanswered>,
    ) -> Result<Answer, Unanswered> {
        self.fault.check()?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        lock(&self.calls).answers.insert(id, None);
        let sent = self.send(&make(id)).map_err(Unanswered::Error);
        let result = sent.and_then(|()| wait(id));
        lock(&self.calls).answers.remove(&id);
        result
    }

    pub(super) fn await_answer(&self, id: u64, deadline: Instant) -> Result<Answer, Unanswered> {
        let mut calls = lock(&self.calls);
        loop {
            if let Some(answer) = calls.answers.get_mut(&id).and_then(Option::take) {
                return Ok(answer);
            }
            self.fault.check()?;
            if let Some(error) = &calls.ended {
                return Err(error.clone().into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Unanswered::Deadline);
            }
            calls = self
                .answered
                .wait_timeout(calls, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Records that `rank` has left.
    pub(super) fn record_left(&self, rank: usize) {
        if let Some(left) = self.left.get(rank) {
            left.store(true, Ordering::SeqCst);
        }
    }

    /// Records that the connection has ended; what this returns is what requests
    /// get from now on: the first `error`.
    pub(super) fn end(&self, error: Error) -> Error {
        // So that the store sees that this side has closed too.
        let _ = self.stream.shutdown(Shutdown::Both);
        let first = lock(&self.calls).ended.get_or_insert(error).clone();
        self.answered.notify_all();
        first
    }

    /// Waits for the end of the connection: why it has ended, if it has by
    /// `deadline`.
    pub(super) fn await_end(&self, deadline: Instant) -> Option<Error> {
        let mut calls = lock(&self.calls);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if calls.ended.is_some() || left.is_zero() {
                return calls.ended.clone();
            }
            calls = self
                .answered
                .wait_timeout(calls, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Says what the others should be told if this rank dies now, and waits a
    /// moment for them to have been told: the process may be about to abort.
    /// Takes no lock that its thread could hold.
    fn last_words(&self, text: &str) {
        let deadline = Instant::now() + LAST_WORDS_LIMIT;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let request = Request::LastWords {
            id,
            text: truncated(text, MAX_TEXT_BYTES).to_owned(),
        };
        let Ok(frame) = encode(&request) else {
            return;
        };
        let pause = || thread::sleep(Duration::from_millis(1));
        let sent = loop {
            match self.writer.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => pause(),
                Err(TryLockError::WouldBlock) => break false,
                _writer => break self.write(&frame, LAST_WORDS_LIMIT).is_ok(),
            }
        };
        let own_thread = thread::current().name() == Some(super::presence::THREAD_NAME);
        while sent
            && !own_thread
            && self.last_words_heard.load(Ordering::Acquire) < id
            && Instant::now() < deadline
        {
            pause();
        }
    }
}

impl PanicListener for Session {
    fn panicked(&self, text: &str) {
        self.last_words(text);
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreClient")
            .field("rank", &self.rank)
            .field("store", &self.store())
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
