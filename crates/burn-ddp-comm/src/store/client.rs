//! A rank's side of its connection to the store.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

use super::frame::encode;
use super::protocol::{
    Answer, ErrorMessage, MAX_TEXT_BYTES, MemberStatus, PresenceStatus, Request, truncated,
};
use super::server::StoreServer;
use crate::fault::Fault;
use crate::panic_message::PanicListener;
use crate::socket::write_until;
use crate::{Error, Result};

/// How long a message may take to be passed to the kernel: one that takes
/// longer finds a store that has stopped reading.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// How long last words may delay the end of the process.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(300);

/// How long a farewell may take.
const FAREWELL_LIMIT: Duration = Duration::from_secs(1);

/// How long the rank that hosts the store waits for the others to leave.
const HOST_LINGER: Duration = Duration::from_secs(5);

/// The same where the group has failed.
const HOST_LINGER_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// How long the store may take to say who is missing.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// A rank's connection to the store, for as long as it is in the group. A clone
/// is another handle of it; with the last, the rank leaves the group in good
/// order, unless it is panicking.
///
/// Every wait ends as soon as the group has failed, with the [fault](Self::fault)'s
/// error.
#[derive(Clone, Debug)]
pub(crate) struct StoreClient {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    presence: Option<JoinHandle<()>>,
    /// In the rank that hosts the store.
    server: Option<StoreServer>,
}

/// What the client shares with the thread that reads from the store.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    /// The rank that hosts the store, if one does.
    pub(super) host: Option<usize>,
    /// When this rank began to connect.
    pub(super) started: Instant,
    pub(super) fault: Arc<Fault>,
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
    left_wakers: Mutex<Vec<Waker>>,
}

type Waker = Box<dyn Fn() + Send + Sync>;

/// The requests that wait for their answers.
#[derive(Default)]
pub(super) struct Calls {
    pub(super) answers: HashMap<u64, Option<Answer>>,
    /// Why there will be no more answers.
    pub(super) ended: Option<Error>,
}

/// Why a request has no answer.
enum Unanswered {
    Deadline,
    Error(Error),
}

impl From<Error> for Unanswered {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl StoreClient {
    pub(super) fn new(
        shared: Arc<Shared>,
        presence: JoinHandle<()>,
        server: Option<StoreServer>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                shared,
                presence: Some(presence),
                server,
            }),
        }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// The group's fault, which this sets when another rank dies or makes the
    /// group fail, and when the store is lost.
    pub(crate) fn fault(&self) -> &Arc<Fault> {
        &self.inner.shared.fault
    }

    /// Address of this machine by which it reaches the store, and by which
    /// other ranks reach it.
    ///
    /// # Errors
    ///
    /// Environment: the connection is gone.
    pub(crate) fn local_ip(&self) -> Result<IpAddr> {
        let address = self.shared().stream.local_addr();
        address
            .map(|address| address.ip())
            .map_err(|error| Error::environment_from("the connection to the store is gone", error))
    }

    /// Sets the value of `key`, of at most 64 KiB.
    ///
    /// # Errors
    ///
    /// The fault's, or Environment: the store does not answer.
    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (key.to_owned(), ByteBuf::from(value));
        self.answer(|id| Request::Set { id, key, value }).map(drop)
    }

    /// The value of `key`, as soon as some rank has set it.
    ///
    /// # Errors
    ///
    /// The fault's, or Environment: it was not set by `deadline`.
    pub(crate) fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let shared = self.shared();
        let owned = key.to_owned();
        match shared.request(deadline, |id| Request::Get { id, key: owned }) {
            Ok(Answer::Value(value)) => Ok(value.into_vec()),
            Ok(answer) => Err(shared.unexpected(&answer)),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(Error::environment(format!(
                "nobody has set {key:?} at the {} within {}",
                shared.store(),
                seconds(shared.started.elapsed())
            ))),
        }
    }

    /// Adds `amount` to the counter `key`, which starts at 0, and returns the
    /// sum. Counters are apart from values.
    ///
    /// # Errors
    ///
    /// The fault's, or Environment: the store does not answer.
    pub(crate) fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let key = key.to_owned();
        match self.answer(|id| Request::Add { id, key, amount })? {
            Answer::Sum(sum) => Ok(sum),
            answer => Err(self.shared().unexpected(&answer)),
        }
    }

    /// Gives `value`, of at most 64 KiB, and returns every rank's, in rank order,
    /// as soon as every rank has called this with this `key`.
    ///
    /// # Errors
    ///
    /// The fault's; Peer: ranks have left, or did not arrive by `deadline`, which
    /// makes the group fail on every rank and names them.
    pub(crate) fn gather(
        &self,
        key: &str,
        value: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let shared = self.shared();
        let (owned, value) = (key.to_owned(), ByteBuf::from(value));
        let make = |id| Request::Gather {
            id,
            key: owned,
            value,
        };
        match shared.request(deadline, make) {
            Ok(Answer::Values(values)) if values.len() == shared.world_size => {
                Ok(values.into_iter().map(ByteBuf::into_vec).collect())
            }
            Ok(Answer::Departed(ranks)) => Err(self.fail(departed_error(&ranks, key))),
            Ok(answer) => Err(shared.unexpected(&answer)),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(self.fail(self.missing_error(key))),
        }
    }

    /// Names the ranks that are missing in gathering `key`.
    fn missing_error(&self, key: &str) -> Error {
        let shared = self.shared();
        let waited = seconds(shared.started.elapsed());
        let (limit, owned) = (Instant::now() + STATUS_LIMIT, key.to_owned());
        match shared.request(limit, |id| Request::Status { id, key: owned }) {
            Ok(Answer::Members(members)) => {
                missing_error(&members, shared.rank, key, &shared.store(), &waited)
            }
            Ok(answer) => shared.unexpected(&answer),
            Err(Unanswered::Error(error)) => error,
            Err(Unanswered::Deadline) => shared.silent(),
        }
    }

    /// Records that the group has failed and tells the other ranks, unless it
    /// had failed before; returns the error that made it fail.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let shared = self.shared();
        if let Some(first) = shared.fault.error() {
            return first;
        }
        self.poison(&error);
        shared.fault.set(error)
    }

    /// Makes the group fail with `error` on every other rank.
    pub(crate) fn poison(&self, error: &Error) {
        let error = ErrorMessage::new(error);
        // Without the store the others learn of it when this rank is gone.
        let _ = self.shared().send(&Request::Poison { error });
    }

    /// Whether `rank` has left the group in good order.
    pub(crate) fn left(&self, rank: usize) -> bool {
        let left = self.shared().left.get(rank);
        left.is_some_and(|left| left.load(Ordering::Relaxed))
    }

    /// Calls `waker` whenever a rank has left.
    pub(crate) fn on_left(&self, waker: impl Fn() + Send + Sync + 'static) {
        lock(&self.shared().left_wakers).push(Box::new(waker));
    }

    /// A request that is answered at once.
    fn answer(&self, make: impl FnOnce(u64) -> Request) -> Result<Answer> {
        let shared = self.shared();
        match shared.request(Instant::now() + SEND_LIMIT, make) {
            Ok(answer @ Answer::Invalid(_)) => Err(shared.unexpected(&answer)),
            Ok(answer) => Ok(answer),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(shared.silent()),
        }
    }
}

/// The error of `own` rank when others are missing in gathering `key`.
fn missing_error(
    members: &[MemberStatus],
    own: usize,
    key: &str,
    store: &str,
    waited: &str,
) -> Error {
    let missing = members
        .iter()
        .enumerate()
        .filter(|(rank, member)| *rank != own && !member.gathered);
    let (absent, late): (Vec<_>, Vec<_>) =
        missing.partition(|(_, member)| member.presence == PresenceStatus::Absent);
    let mut parts = Vec::new();
    let absent_ranks: Vec<usize> = absent.iter().map(|(rank, _)| *rank).collect();
    if !absent_ranks.is_empty() {
        parts.push(format!(
            "{} did not arrive at the {store} within {waited}: were they started, with the same \
             MASTER_ADDR and MASTER_PORT?",
            name_ranks(&absent_ranks)
        ));
    }
    for (rank, member) in &late {
        let process = member.process.as_deref().unwrap_or("unknown process");
        parts.push(match member.presence {
            PresenceStatus::Present { silent_ms } => format!(
                "rank {rank} ({process}) is there, last heard of {:.1} s ago, but did not reach \
                 {key:?} within {waited}",
                silent_ms as f64 / 1000.0
            ),
            _ => format!("rank {rank} ({process}) is gone"),
        });
    }
    if parts.is_empty() {
        parts.push(format!("{key:?} was not complete within {waited}"));
    }
    let late_ranks = late.iter().map(|(rank, _)| *rank);
    Error::peer(absent_ranks.into_iter().chain(late_ranks), parts.join("; "))
}

fn departed_error(ranks: &[usize], key: &str) -> Error {
    let (them, they) = match ranks.len() {
        1 => ("it", "it"),
        _ => ("them", "they"),
    };
    Error::peer(
        ranks.iter().copied(),
        format!(
            "{} left the group: {they} finished while this rank was waiting for {them} in {key:?}",
            name_ranks(ranks)
        ),
    )
}

/// `rank 2`, or `ranks 0, 1`.
fn name_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", list.join(", "))
}

/// `300 s`, or `0.3 s`.
pub(super) fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{seconds} s"),
    }
}

impl Shared {
    pub(super) fn new(
        (rank, world_size): (usize, usize),
        stream: TcpStream,
        address: SocketAddr,
        host: Option<usize>,
        started: Instant,
    ) -> Arc<Self> {
        let shared = Arc::new(Self {
            rank,
            world_size,
            stream,
            address,
            host,
            started,
            fault: Arc::new(Fault::new()),
            calls: Mutex::default(),
            answered: Condvar::new(),
            writer: Mutex::new(()),
            next_id: AtomicU64::new(1),
            last_words_heard: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            left: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            left_wakers: Mutex::default(),
        });
        let weak: Weak<Self> = Arc::downgrade(&shared);
        shared.fault.on_set(move || {
            if let Some(shared) = weak.upgrade() {
                // Under the lock, so that no wait begins unnoticed.
                let _calls = lock(&shared.calls);
                shared.answered.notify_all();
            }
        });
        shared
    }

    /// "store at 10.0.0.1:29500 (rank 0)".
    pub(super) fn store(&self) -> String {
        match self.host {
            Some(host) => format!("store at {} (rank {host})", self.address),
            None => format!("store at {} (launcher)", self.address),
        }
    }

    fn unexpected(&self, answer: &Answer) -> Error {
        match answer {
            Answer::Invalid(why) => Error::usage(format!("the {} refuses: {why}", self.store())),
            _ => Error::environment(format!("the {} gave no sensible answer", self.store())),
        }
    }

    fn silent(&self) -> Error {
        Error::environment(format!(
            "the {} does not answer: is its process stopped, or its machine overloaded?",
            self.store()
        ))
    }

    /// Sends `request`; the error says why that can't be.
    fn send(&self, request: &Request) -> Result<(), Error> {
        let _writer = lock(&self.writer);
        self.write(request, SEND_LIMIT)
    }

    /// Sends `request` unless another thread is about to send something.
    pub(super) fn try_send(&self, request: &Request) {
        if let Ok(_writer) = self.writer.try_lock() {
            // The reading thread notices if the store is gone.
            let _ = self.write(request, SEND_LIMIT);
        }
    }

    fn write(&self, request: &Request, limit: Duration) -> Result<(), Error> {
        let frame = encode(request)
            .map_err(|error| Error::usage(format!("a request can't be encoded: {error}")))?;
        write_until(&self.stream, &frame, Instant::now() + limit).map_err(|error| {
            // A part of the message may be on its way, so that no other can be
            // sent; the reading thread wakes up and takes note.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
            Error::environment_from(format!("can't reach the {} any more", self.store()), error)
        })
    }

    /// Sends a request and waits for its answer.
    fn request(
        &self,
        deadline: Instant,
        make: impl FnOnce(u64) -> Request,
    ) -> Result<Answer, Unanswered> {
        self.fault.check()?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        lock(&self.calls).answers.insert(id, None);
        let result = match self.send(&make(id)) {
            // The cause, where the reading thread has found it.
            Err(error) => Err(self.fault.check().err().unwrap_or(error).into()),
            Ok(()) => self.await_answer(id, deadline),
        };
        lock(&self.calls).answers.remove(&id);
        if let Err(Unanswered::Deadline) = result {
            // If this does not arrive, the answer is ignored.
            let _ = self.send(&Request::Cancel { id });
        }
        result
    }

    fn await_answer(&self, id: u64, deadline: Instant) -> Result<Answer, Unanswered> {
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
            for waker in lock(&self.left_wakers).iter() {
                waker();
            }
        }
    }

    /// Records that the connection has ended; `error` is what requests get from
    /// now on.
    pub(super) fn end(&self, error: Error) {
        // So that the store sees that this side has closed too.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        lock(&self.calls).ended.get_or_insert(error);
        self.answered.notify_all();
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
        let pause = || thread::sleep(Duration::from_millis(1));
        let sent = loop {
            match self.writer.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => pause(),
                Err(TryLockError::WouldBlock) => break false,
                _writer => break self.write(&request, LAST_WORDS_LIMIT).is_ok(),
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

impl PanicListener for Shared {
    fn panicked(&self, text: &str) {
        self.last_words(text);
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreClient")
            .field("rank", &self.rank)
            .field("store", &self.store())
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.leaving.store(true, Ordering::SeqCst);
        let panicking = thread::panicking();
        if !panicking && shared.send(&Request::Farewell).is_ok() {
            let mut calls = lock(&shared.calls);
            let deadline = Instant::now() + FAREWELL_LIMIT;
            while calls.ended.is_none() && Instant::now() < deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                let wait = shared.answered.wait_timeout(calls, left);
                calls = wait.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let _ = shared.stream.shutdown(std::net::Shutdown::Both);
        if let Some(presence) = self.presence.take()
            && presence.thread().id() != thread::current().id()
            && presence.join().is_err()
        {
            tracing::error!("the thread that listens to the store panicked");
        }
        if let Some(server) = &mut self.server {
            let failed = panicking || shared.fault.is_set();
            server.finish(if failed {
                HOST_LINGER_AFTER_FAILURE
            } else {
                HOST_LINGER
            });
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
