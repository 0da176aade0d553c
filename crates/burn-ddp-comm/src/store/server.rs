//! The store's server: one thread that waits for all its connections at once.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::connection::Connection;
use super::protocol::PURPOSE;
use super::state::{ConnectionId, Output, RankFailure, State};
use crate::reception::Reception;
use crate::socket::poll_until;
use crate::{Error, Result, Secret};

/// How many connections the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// How often ranks are looked at that say nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// If more time passes between two looks, this process was stopped meanwhile.
const LONGEST_GAP: Duration = Duration::from_secs(1);

/// How long the last events may take on their way when the store ends.
const LAST_EVENTS_LIMIT: Duration = Duration::from_millis(500);

/// The store of a job: where its ranks meet, and from which each learns at once
/// what became of the others.
///
/// Every rank keeps a connection to it, which proves to know the job's secret.
/// When one ends without a farewell, that rank has died, and all others are
/// told. It serves on a thread of its own until it is dropped.
#[derive(Debug)]
pub struct StoreServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Written to when there is an order.
    wake: OwnedFd,
    status: Mutex<Status>,
}

#[derive(Debug, Default)]
struct Status {
    first_failure: Option<RankFailure>,
    /// Order to end: as soon as no rank is here, and then at the latest.
    end_by: Option<Instant>,
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoreServer {
    /// Starts the store of a job of `world_size` ranks at `addr`, whose port may
    /// be 0 for any free one. Ranks can connect when this returns.
    ///
    /// # Errors
    ///
    /// Usage: `world_size` is 0. Environment: the address is not this machine's,
    /// the port is taken, or the thread can't be started.
    pub fn bind(addr: SocketAddr, secret: Secret, world_size: usize) -> Result<Self> {
        Self::bind_hosted(&[addr], secret, world_size, None)
    }

    /// [`bind`](Self::bind) to the first of `addrs` that works, in the process of
    /// rank `host`, if it is a rank's.
    pub(super) fn bind_hosted(
        addrs: &[SocketAddr],
        secret: Secret,
        world_size: usize,
        host: Option<usize>,
    ) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::usage("a store needs a world size of at least 1"));
        }
        let listener = TcpListener::bind(addrs).map_err(|error| bind_error(addrs, error))?;
        let failed = |error| Error::environment_from("can't set the store up", error);
        // Again, with more room than the standard library gives.
        rustix::net::listen(&listener, BACKLOG).map_err(|error| failed(error.into()))?;
        let address = listener.local_addr().map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let shared = Arc::new(Shared {
            wake,
            status: Mutex::default(),
        });
        let server = Server {
            reception: Some(Reception::new(listener, secret, PURPOSE).map_err(failed)?),
            connections: BTreeMap::new(),
            next_id: 0,
            state: State::new(world_size, host),
            shared: Arc::clone(&shared),
            last_look: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("ddp store".to_owned())
            .spawn(move || server.run())
            .map_err(failed)?;
        Ok(Self {
            address,
            shared,
            thread: Some(thread),
        })
    }

    /// Where the store listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The first rank that failed: its connection ended without a farewell, or
    /// it was named as the cause when the group was made to fail.
    pub fn first_failure(&self) -> Option<RankFailure> {
        self.shared.status().first_failure.clone()
    }

    /// Ends the store once no rank is connected any more, after `linger` at the
    /// latest. New ranks are not let in meanwhile.
    ///
    /// For a host whose own part in the job is over, while ranks elsewhere may
    /// still need the store.
    pub fn finish(&mut self, linger: Duration) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.shared.status().end_by = Some(Instant::now() + linger);
        // The thread is woken; that can fail only if it has been.
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the store's thread panicked");
        }
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.finish(Duration::ZERO);
    }
}

fn bind_error(addrs: &[SocketAddr], error: io::Error) -> Error {
    let names: Vec<String> = addrs.iter().map(SocketAddr::to_string).collect();
    let addr = names.join(" or ");
    let port = addrs.first().map_or(0, SocketAddr::port);
    let hint = match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "port {port} is taken by another program or another job: set MASTER_PORT to a free \
             port, the same on every rank"
        ),
        io::ErrorKind::AddrNotAvailable => {
            "that address is not this machine's: MASTER_ADDR has to name the machine of rank 0"
                .to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            format!("port {port} needs privileges: set MASTER_PORT to one above 1023")
        }
        _ => "check MASTER_ADDR and MASTER_PORT".to_owned(),
    };
    Error::environment_from(format!("can't host the store at {addr}: {hint}"), error)
}

struct Server {
    /// `None` when no more ranks are let in.
    reception: Option<Reception>,
    connections: BTreeMap<ConnectionId, Connection>,
    next_id: ConnectionId,
    state: State,
    shared: Arc<Shared>,
    /// When the ranks' silence was last looked at.
    last_look: Instant,
}

impl Server {
    fn run(mut self) {
        loop {
            let end_by = self.shared.status().end_by;
            if let Some(end_by) = end_by {
                self.reception = None;
                if !self.state.has_members() || Instant::now() >= end_by {
                    break;
                }
            }
            self.serve(end_by);
        }
        self.state.say_goodbye();
        self.carry_out();
        let limit = Instant::now() + LAST_EVENTS_LIMIT;
        while self.has_last_events() && Instant::now() < limit {
            self.serve(Some(limit));
        }
    }

    /// Whether there are connections that have not been closed by both sides.
    fn has_last_events(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Waits until there is something to do, at most until `until`, and does it.
    fn serve(&mut self, until: Option<Instant>) {
        let ready = match self.wait(until) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!("the store can't wait for its connections: {error}");
                // Not so often that it takes a core.
                thread::sleep(Duration::from_millis(50));
                return;
            }
        };
        let now = Instant::now();
        for id in ready {
            self.attend(id, now);
        }
        if let Some(reception) = &mut self.reception {
            for guest in reception.process() {
                let id = self.next_id;
                self.next_id += 1;
                self.connections.insert(id, Connection::new(guest.stream));
                self.state.join(id, &guest.hello, now);
            }
        }
        self.look_for_silence(now);
        self.carry_out();
        self.connections
            .retain(|_, connection| connection.closes_at().is_none_or(|at| at > now));
    }

    /// Looks for ranks that have been silent for too long. Time in which this process was stopped itself, and could hear nobody, counts as
    /// none.
    fn look_for_silence(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_look);
        if since < LOOK_INTERVAL {
            return;
        }
        self.last_look = now;
        if since > LONGEST_GAP {
            self.state.forgive(since, now);
        }
        self.state.check_silence(now);
    }

    /// The connections that have something to read or can be written to.
    fn wait(&self, until: Option<Instant>) -> io::Result<Vec<ConnectionId>> {
        let mut fds = vec![PollFd::from_borrowed_fd(
            self.shared.wake.as_fd(),
            // The wake-up is for good, so that it is looked at but once.
            match until {
                None => PollFlags::IN,
                Some(_) => PollFlags::empty(),
            },
        )];
        fds.extend(self.connections.values().map(Connection::poll_fd));
        if let Some(reception) = &self.reception {
            reception.add_poll_fds(&mut fds);
        }
        let closings = self.connections.values().filter_map(Connection::closes_at);
        let due = self.reception.as_ref().and_then(Reception::due);
        let look = self
            .state
            .has_members()
            .then(|| self.last_look + LOOK_INTERVAL);
        let deadline = closings.chain(due).chain(until).chain(look).min();
        poll_until(&mut fds, deadline)?;
        let ready =
            |(fd, &id): (&PollFd<'_>, &ConnectionId)| (!fd.revents().is_empty()).then_some(id);
        let connections = fds[1..].iter().zip(self.connections.keys());
        Ok(connections.filter_map(ready).collect())
    }

    /// Writes to and reads from a connection.
    fn attend(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.flush();
        let state = &mut self.state;
        if let Err(end) = connection.receive(|message| state.receive(id, message, now)) {
            self.connections.remove(&id);
            self.state.lose(id, &end, now);
        }
        self.carry_out();
    }

    /// Does what the state has decided.
    fn carry_out(&mut self) {
        let now = Instant::now();
        for output in self.state.take_outputs() {
            let (Output::Send(id, _) | Output::Close(id)) = &output;
            let Some(connection) = self.connections.get_mut(id) else {
                continue;
            };
            match output {
                Output::Send(_, frame) => connection.send(frame),
                Output::Close(_) => connection.close(now),
            }
        }
        if let Some(failure) = self.state.first_failure() {
            let mut status = self.shared.status();
            if status.first_failure.is_none() {
                status.first_failure = Some(failure.clone());
            }
        }
    }
}
