//! The group of processes that train together.

mod asynchronous;
mod coalesced;
mod collectives;
mod objects;
mod point_to_point;
mod split;

pub use point_to_point::Transfer;

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crate::communicator::Communicator;
use crate::engine::Engine;
use crate::env::LaunchEnv;
use crate::group_config::GroupConfig;
use crate::membership::Membership;
use crate::scope::Scope;
use crate::store::StoreClient;
use crate::transport::mesh::{self, Mesh, Setup};
use crate::transport::rendezvous::AtStore;
use crate::waiter::Waiter;
use crate::work::{Work, work};
use crate::{Error, Result, Secret};

/// How long a group that is being dropped lets queued operations go on.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// How long it then waits for its thread to see that it was given up.
const END_LIMIT: Duration = Duration::from_millis(500);

/// A group of processes, its ranks, that run collective operations together.
///
/// Every rank has to make the same calls in the same order; a difference is an
/// error on all of them. Blocking and asynchronous operations, from whatever
/// threads, run one at a time in the order in which they were called.
///
/// A group that has failed stays failed: every later operation returns the
/// first error at once, on every rank. No wait is without a deadline.
///
/// A clone is another handle of the same group. When the last handle is
/// dropped, this rank leaves the group.
///
/// [`split`](Self::split) makes groups of some of the ranks. They fail together
/// with the group that they come from: a rank that has died is missed in all.
/// Errors name ranks by their number in the job, in every group.
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

struct Inner {
    rank: usize,
    local_rank: usize,
    local_world_size: usize,
    scope: Arc<Scope>,
    membership: Arc<Membership>,
    engine: Engine,
    /// How the job was set up; `None` in a world of one.
    config: Option<GroupConfig>,
    /// How often this group was split.
    splits: AtomicU64,
    transport: String,
    setup_time: Duration,
}

impl ProcessGroup {
    /// A group of this process alone, in which every operation works: no
    /// sockets, no threads.
    pub fn single() -> Self {
        let scope = Arc::new(Scope::world(1));
        Self::alone(scope, Arc::new(Membership::single()), None)
    }

    /// A group of this process alone, in a job that may have other ranks.
    fn alone(scope: Arc<Scope>, membership: Arc<Membership>, config: Option<GroupConfig>) -> Self {
        let communicator = Communicator::single(Arc::clone(&scope), Arc::clone(&membership));
        Self {
            inner: Arc::new(Inner {
                rank: 0,
                local_rank: 0,
                local_world_size: 1,
                scope,
                engine: Engine::new(communicator),
                membership,
                config,
                splits: AtomicU64::new(0),
                transport: "no other ranks".to_owned(),
                setup_time: Duration::ZERO,
            }),
        }
    }

    /// The group of this process's job, told by the environment variables that
    /// `burnrun` and torchrun set (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    /// `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`), or Slurm's and Open MPI's
    /// for the ranks. A world of one if none is set.
    ///
    /// # Errors
    ///
    /// Usage: variables are missing or make no sense; all of them are named. Also
    /// those of [`new`](Self::new).
    pub fn from_env() -> Result<Self> {
        match LaunchEnv::from_env()? {
            Some(env) => Self::new(env.group_config()),
            None => Ok(Self::single()),
        }
    }

    /// The group that `config` describes, as soon as all its ranks are there.
    ///
    /// # Errors
    ///
    /// Usage: the configuration makes no sense, or differs from another rank's.
    /// Peer: ranks did not arrive in time, or failed; they are named.
    /// Environment: the store or a rank can't be reached.
    pub fn new(config: GroupConfig) -> Result<Self> {
        let started = Instant::now();
        config.check()?;
        if config.world_size == 1 {
            return Ok(Self::single());
        }
        let store = StoreClient::connect(&config.store())?;
        let secret = config.secret.clone().unwrap_or_else(Secret::none);
        let deadline = started + config.store_timeout;
        let scope = Arc::new(Scope::world(config.world_size));
        let mesh = mesh::connect(&Setup {
            rank: config.rank,
            scope: &scope,
            secret: &secret,
            timeout: config.timeout,
            force_tcp: config.force_tcp,
            rendezvous: &AtStore {
                store: &store,
                deadline,
            },
            deadline,
        })
        .map_err(|error| store.fail(error))?;
        let membership = Arc::new(Membership::new(config.rank, store));
        let group = Self::connected(config.rank, scope, mesh, membership, config, started)?;
        if group.is_main() {
            tracing::info!(
                "{} ranks; rank 0: {}; set up in {:.1} ms",
                group.world_size(),
                group.inner.transport,
                group.inner.setup_time.as_secs_f64() * 1e3
            );
        }
        Ok(group)
    }

    /// The group of rank `rank` over its links to the others. `config` is the
    /// job's.
    fn connected(
        rank: usize,
        scope: Arc<Scope>,
        mesh: Mesh,
        membership: Arc<Membership>,
        config: GroupConfig,
        started: Instant,
    ) -> Result<Self> {
        let waiter = Waiter::new(
            Arc::clone(membership.fault()),
            mesh.segment,
            mesh.sockets,
            mesh.crowded,
        )
        .map_err(|error| membership.fail(error))?;
        let communicator = Communicator::new(
            rank,
            Arc::clone(&scope),
            mesh.links,
            waiter,
            Arc::clone(&membership),
            config.limits(),
            mesh.topology,
        );
        Ok(Self {
            inner: Arc::new(Inner {
                rank,
                local_rank: config.local_rank,
                local_world_size: config.local_world_size,
                scope,
                engine: Engine::new(communicator),
                membership,
                config: Some(config),
                splits: AtomicU64::new(0),
                transport: mesh.summary,
                setup_time: started.elapsed(),
            }),
        })
    }

    pub(crate) fn membership(&self) -> &Membership {
        &self.inner.membership
    }

    /// This process's number in the group: `0..world_size`.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// The number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.inner.scope.job_ranks.len()
    }

    /// This process's number among those of its host: `0..local_world_size`.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// The number of the group's processes on this host.
    pub fn local_world_size(&self) -> usize {
        self.inner.local_world_size
    }

    /// Whether this is rank 0, which alone writes logs and checkpoints.
    pub fn is_main(&self) -> bool {
        self.inner.rank == 0
    }

    /// Fails the group on every rank: pending and later operations return a
    /// Peer error with this reason. For a rank that can't go on.
    pub fn abort(&self, reason: impl Into<String>) {
        let rank = self.inner.membership.job_rank();
        self.fail(Error::peer(
            [rank],
            format!("rank {rank} aborted the group: {}", reason.into()),
        ));
    }

    /// The error that made the group fail, if it has failed.
    pub fn error(&self) -> Option<Error> {
        self.inner.membership.error()
    }

    /// Which ranks are reached how: `shared memory to ranks 1-3; TCP to ranks
    /// 4-7`.
    pub fn transport_summary(&self) -> String {
        self.inner.transport.clone()
    }

    /// How long it took to set the group up.
    pub fn setup_time(&self) -> Duration {
        self.inner.setup_time
    }

    /// Records that an operation was called at `location`.
    fn enqueue(&self, location: &'static Location<'static>) -> u64 {
        let recorder = self.inner.membership.recorder();
        recorder.enqueue(&self.inner.scope, self.inner.rank, location)
    }

    #[track_caller]
    fn run<R>(&self, operation: impl FnOnce(&mut Communicator) -> Result<R>) -> Result<R> {
        // At once, and not behind the operations that are about to fail.
        self.inner.membership.check()?;
        let flight = self.enqueue(Location::caller());
        self.inner.engine.run(|communicator| {
            communicator.set_flight(flight);
            let result = operation(communicator);
            let recorder = self.inner.membership.recorder();
            recorder.end(flight, result.is_err());
            result
        })
    }

    #[track_caller]
    fn submit<B: Send + 'static>(
        &self,
        mut buffers: B,
        operation: impl FnOnce(&mut Communicator, &mut B) -> Result<()> + Send + 'static,
    ) -> Work<B> {
        let (work, completion) = work();
        if self.world_size() == 1 {
            let result = self.run(|communicator| operation(communicator, &mut buffers));
            completion.complete(result.map(|()| buffers));
            return work;
        }
        let flight = self.enqueue(Location::caller());
        let recorder = Arc::clone(self.inner.membership.recorder());
        let job = Box::new(move |communicator: &mut Communicator| {
            communicator.set_flight(flight);
            let result = operation(communicator, &mut buffers);
            recorder.end(flight, result.is_err());
            completion.complete(result.map(|()| buffers));
        });
        let name = format!("ddp rank {}", self.inner.membership.job_rank());
        if let Err(error) = self.inner.engine.submit(name, job) {
            self.fail(error);
        }
        work
    }

    /// Records that the group has failed and tells the other ranks.
    fn fail(&self, error: Error) -> Error {
        self.inner.membership.fail(error)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let rank = self.membership.job_rank();
        if std::thread::panicking() {
            // Only here: the others learn of the panic, and of its message, by
            // this rank's end.
            let error = Error::peer([rank], format!("rank {rank} panicked"));
            self.membership.fault().set(error);
        } else if self.engine.close(CLOSE_LIMIT) {
            return;
        } else {
            let seconds = CLOSE_LIMIT.as_secs();
            self.membership.fail(Error::peer(
                [rank],
                format!(
                    "rank {rank} dropped its process group while asynchronous operations were \
                     unfinished, and they did not finish within {seconds} s: wait for them first"
                ),
            ));
        }
        self.engine.close(END_LIMIT);
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("rank", &self.inner.rank)
            .field("name", &self.inner.scope.name)
            .field("world_size", &self.world_size())
            .field("transport", &self.inner.transport)
            .field("error", &self.inner.membership.error())
            .finish_non_exhaustive()
    }
}
