//! A rank's side of its connection to the store.

use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

use super::missing::{departed_error, missing_error};
use super::protocol::{Answer, ErrorMessage, MemberStatus, PresenceStatus, Request};
use super::server::StoreServer;
use super::session::{SEND_LIMIT, Session, Unanswered, seconds};
use crate::fault::Fault;
use crate::flight_recorder::FlightRecorder;
use crate::liveness::Standing;
use crate::{Error, Result};

/// How long a farewell may take.
const FAREWELL_LIMIT: Duration = Duration::from_secs(1);

/// How long the rank that hosts the store waits for the others to leave.
const HOST_LINGER: Duration = Duration::from_secs(5);

/// The same where the group has failed.
const HOST_LINGER_AFTER_FAILURE: Duration = Duration::from_secs(1);

/// How long the store may take to say who is missing.
const STATUS_LIMIT: Duration = Duration::from_secs(5);

/// The same while something else waits for the answer.
const STANDINGS_LIMIT: Duration = Duration::from_secs(1);

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
    session: Arc<Session>,
    presence: Option<JoinHandle<()>>,
    /// In the rank that hosts the store.
    server: Option<StoreServer>,
}

impl StoreClient {
    pub(super) fn new(
        session: Arc<Session>,
        presence: JoinHandle<()>,
        server: Option<StoreServer>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                session,
                presence: Some(presence),
                server,
            }),
        }
    }

    fn session(&self) -> &Session {
        &self.inner.session
    }

    /// The group's fault, which this sets when another rank dies or makes the
    /// group fail, and when the store is lost.
    pub(crate) fn fault(&self) -> &Arc<Fault> {
        &self.inner.session.fault
    }

    /// The recorder of this rank's operations, of which the store is told.
    pub(crate) fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.inner.session.recorder
    }

    /// Address of this machine by which it reaches the store, and by which
    /// other ranks reach it.
    ///
    /// # Errors
    ///
    /// Environment: the connection is gone.
    pub(crate) fn local_ip(&self) -> Result<IpAddr> {
        let address = self.session().stream.local_addr();
        address
            .map(|address| address.ip())
            .map_err(|error| Error::environment_from("the connection to the store is gone", error))
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
        let session = self.session();
        let (owned, value) = (key.to_owned(), ByteBuf::from(value));
        let make = |id| Request::Gather {
            id,
            key: owned,
            value,
        };
        let answer = session.call(make, |id| {
            match session.await_answer(id, deadline) {
                Err(Unanswered::Deadline) => {
                    // That ends it for all who wait, with the same answer.
                    session.send(&Request::GiveUp { id })?;
                    session.await_answer(id, Instant::now() + STATUS_LIMIT)
                }
                result => result,
            }
        });
        match answer {
            Ok(Answer::Values(values)) if values.len() == session.world_size => {
                Ok(values.into_iter().map(ByteBuf::into_vec).collect())
            }
            Ok(Answer::Departed(ranks)) => Err(self.fail(departed_error(&ranks, key))),
            Ok(Answer::Members(members)) => {
                let waited = seconds(session.started.elapsed());
                Err(self.fail(missing_error(&members, key, &session.store(), &waited)))
            }
            Ok(answer) => Err(session.unexpected(&answer)),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(self.fail(session.silent())),
        }
    }

    /// Records that the group has failed and tells the other ranks, unless it
    /// had failed before; returns the error that made it fail.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let session = self.session();
        if let Some(first) = session.fault.error() {
            return first;
        }
        self.poison(&error);
        session.fault.set(error)
    }

    /// Makes the group fail with `error` on every other rank.
    pub(crate) fn poison(&self, error: &Error) {
        let error = ErrorMessage::new(error);
        // Without the store the others learn of it when this rank is gone.
        let _ = self.session().send(&Request::Poison { error });
    }

    /// How every rank stands, if the store says so soon.
    pub(crate) fn standings(&self) -> Option<Vec<Standing>> {
        let session = self.session();
        let answer = session.call(
            |id| Request::Status { id },
            |id| session.await_answer(id, Instant::now() + STANDINGS_LIMIT),
        );
        let Ok(Answer::Members(members)) = answer else {
            return None;
        };
        let standing = |member: MemberStatus| Standing {
            silent: match member.presence {
                PresenceStatus::Present { silent_ms } => Some(Duration::from_millis(silent_ms)),
                PresenceStatus::Absent | PresenceStatus::Gone => None,
            },
            process: member.process,
            activity: member.activity,
        };
        Some(members.into_iter().map(standing).collect())
    }

    /// Whether `rank` has left the group in good order.
    pub(crate) fn left(&self, rank: usize) -> bool {
        let left = self.session().left.get(rank);
        left.is_some_and(|left| left.load(Ordering::Relaxed))
    }

    /// Sends bytes that need not be a message.
    #[cfg(test)]
    pub(super) fn send_raw(&self, bytes: &[u8]) {
        let deadline = Instant::now() + SEND_LIMIT;
        crate::socket::write_until(&self.session().stream, bytes, deadline)
            .expect("the store reads");
    }
}

/// Keys and values. What the ranks exchange today they gather; these are for what
/// not every rank takes part in.
#[cfg_attr(not(test), expect(dead_code, reason = "no transport needs them yet"))]
impl StoreClient {
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
        let session = self.session();
        let owned = key.to_owned();
        let make = |id| Request::Get { id, key: owned };
        let answer = session.call(make, |id| {
            let result = session.await_answer(id, deadline);
            if let Err(Unanswered::Deadline) = result {
                session.send(&Request::Cancel { id })?;
            }
            result
        });
        match answer {
            Ok(Answer::Value(value)) => Ok(value.into_vec()),
            Ok(answer) => Err(session.unexpected(&answer)),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(Error::environment(format!(
                "nobody has set {key:?} at the {} within {}",
                session.store(),
                seconds(session.started.elapsed())
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
            answer => Err(self.session().unexpected(&answer)),
        }
    }

    /// A request that is answered at once.
    fn answer(&self, make: impl FnOnce(u64) -> Request) -> Result<Answer> {
        let session = self.session();
        match session.call(make, |id| {
            session.await_answer(id, Instant::now() + SEND_LIMIT)
        }) {
            Ok(answer @ Answer::Invalid(_)) => Err(session.unexpected(&answer)),
            Ok(answer) => Ok(answer),
            Err(Unanswered::Error(error)) => Err(error),
            Err(Unanswered::Deadline) => Err(session.silent()),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let session = &self.session;
        session.leaving.store(true, Ordering::SeqCst);
        let panicking = thread::panicking();
        if !panicking && session.send(&Request::Farewell).is_ok() {
            // The store closes the connection when it has taken note.
            session.await_end(Instant::now() + FAREWELL_LIMIT);
        }
        let _ = session.stream.shutdown(Shutdown::Both);
        if let Some(presence) = self.presence.take()
            && presence.thread().id() != thread::current().id()
            && presence.join().is_err()
        {
            tracing::error!("the thread that listens to the store panicked");
        }
        if let Some(server) = &mut self.server {
            let failed = panicking || session.fault.is_set();
            server.finish(if failed {
                HOST_LINGER_AFTER_FAILURE
            } else {
                HOST_LINGER
            });
        }
    }
}
