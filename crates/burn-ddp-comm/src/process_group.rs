//! The group of processes that train together.

mod split;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

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
use crate::{Element, Error, ReduceOp, Result, Secret};

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
            config.timeout,
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
            config.timeout,
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

    /// Replaces `data` by the reduction of all ranks' `data`, which is as long
    /// on every rank. The result is bitwise the same on all of them.
    ///
    /// # Errors
    ///
    /// Usage: a rank called something else, or with other arguments. Peer: a
    /// rank failed, left, or did not arrive. `data` is undefined then.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let data = bytemuck::cast_slice_mut(data);
        self.run(|communicator| communicator.all_reduce(T::DTYPE, data, op))
    }

    /// Replaces `data` by rank `root`'s, which is as long.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        let data = bytemuck::cast_slice_mut(data);
        self.run(|communicator| communicator.broadcast(T::DTYPE, data, root))
    }

    /// Writes every rank's `data` to `out`, in rank order. `data` is as long on
    /// every rank, and `out` is `world_size` times as long.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if `out` has another
    /// length.
    pub fn all_gather<T: Element>(&self, data: &[T], out: &mut [T]) -> Result<()> {
        let (data, out) = (bytemuck::cast_slice(data), bytemuck::cast_slice_mut(out));
        self.run(|communicator| communicator.all_gather(T::DTYPE, data, out))
    }

    /// Returns when every rank has called this.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce).
    pub fn barrier(&self) -> Result<()> {
        self.run(Communicator::barrier)
    }

    /// Returns rank `root`'s value, which is `Some` there and ignored on the
    /// other ranks. It may take 1 GiB encoded (MessagePack).
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if the root gives
    /// `None`, or a value that can't be encoded, or decoded as `T`.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<T>,
        root: usize,
    ) -> Result<T> {
        let bytes = match &value {
            Some(value) if root == self.rank() => encode(value).map(Some),
            _ => Ok(None),
        };
        let bytes = self.run(|communicator| communicator.broadcast_bytes(bytes, root))?;
        match value {
            Some(value) if root == self.rank() => Ok(value),
            _ => decode(root, &bytes).map_err(|error| self.fail(error)),
        }
    }

    /// Returns every rank's value, in rank order. Each may take 1 GiB encoded
    /// (MessagePack).
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if a value can't be
    /// encoded, or decoded as `T`.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = encode(value);
        let objects = self.run(|communicator| communicator.all_gather_bytes(bytes))?;
        objects
            .iter()
            .enumerate()
            .map(|(rank, bytes)| decode(rank, bytes))
            .collect::<Result<_>>()
            .map_err(|error| self.fail(error))
    }

    /// [`all_reduce`](Self::all_reduce), run by the group's communication
    /// thread while this one goes on.
    pub fn all_reduce_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        op: ReduceOp,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            communicator.all_reduce(T::DTYPE, bytemuck::cast_slice_mut(data.as_mut()), op)
        })
    }

    /// [`broadcast`](Self::broadcast), run by the group's communication thread
    /// while this one goes on.
    pub fn broadcast_async<T: Element, B: AsMut<[T]> + Send + 'static>(
        &self,
        data: B,
        root: usize,
    ) -> Work<B> {
        self.submit(data, move |communicator, data| {
            communicator.broadcast(T::DTYPE, bytemuck::cast_slice_mut(data.as_mut()), root)
        })
    }

    /// [`all_gather`](Self::all_gather), run by the group's communication
    /// thread while this one goes on.
    pub fn all_gather_async<
        T: Element,
        B: AsRef<[T]> + Send + 'static,
        O: AsMut<[T]> + Send + 'static,
    >(
        &self,
        data: B,
        out: O,
    ) -> Work<(B, O)> {
        self.submit((data, out), |communicator, (data, out)| {
            communicator.all_gather(
                T::DTYPE,
                bytemuck::cast_slice(data.as_ref()),
                bytemuck::cast_slice_mut(out.as_mut()),
            )
        })
    }

    /// [`barrier`](Self::barrier), run by the group's communication thread
    /// while this one goes on.
    pub fn barrier_async(&self) -> Work<()> {
        self.submit((), |communicator, ()| communicator.barrier())
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

    fn run<R>(&self, operation: impl FnOnce(&mut Communicator) -> Result<R>) -> Result<R> {
        // At once, and not behind the operations that are about to fail.
        self.inner.membership.check()?;
        self.inner.engine.run(operation)
    }

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
        let job = Box::new(move |communicator: &mut Communicator| {
            let result = operation(communicator, &mut buffers);
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

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|error| {
        Error::usage(format!(
            "a {} can't be encoded: {error}",
            std::any::type_name::<T>()
        ))
    })
}

fn decode<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| {
        Error::usage(format!(
            "the value from rank {rank} is no {}: {error}",
            std::any::type_name::<T>()
        ))
    })
}
