//! How a process group is set up when not from the environment.

use std::time::Duration;

use crate::liveness::Limits;
use crate::store::StoreConfig;
use crate::{Error, Result, Secret};

/// How many times as long a busy rank is waited for as a silent one.
const PATIENCE_FACTOR: u32 = 12;

/// Several heartbeats: one may be late.
const SHORTEST_SILENCE: Duration = Duration::from_secs(3);

/// The settings of [`ProcessGroup::new`](crate::ProcessGroup::new).
///
/// Every rank gives the same `world_size`, store address, secret and time
/// limits.
///
/// ```no_run
/// # use std::time::Duration;
/// # use burn_ddp_comm::{GroupConfig, ProcessGroup};
/// let config = GroupConfig::new(0, 2, "127.0.0.1:29500").timeout(Duration::from_secs(600));
/// let group = ProcessGroup::new(config)?;
/// # Ok::<(), burn_ddp_comm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    pub(crate) store_addr: String,
    pub(crate) secret: Option<Secret>,
    pub(crate) host_store: bool,
    pub(crate) timeout: Duration,
    pub(crate) patience: Option<Duration>,
    pub(crate) store_timeout: Duration,
    pub(crate) force_tcp: bool,
}

impl GroupConfig {
    /// How long a collective waits without any progress, by default: 30 minutes.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);
    /// How long set-up waits for the other ranks, by default: 5 minutes.
    pub const DEFAULT_STORE_TIMEOUT: Duration = Duration::from_secs(300);

    /// Rank `rank` of `world_size`, meeting the others at `store_addr`
    /// (`host:port`), where rank 0 hosts the store. All ranks are taken to be on
    /// one host; see [`local`](Self::local).
    pub fn new(rank: usize, world_size: usize, store_addr: impl Into<String>) -> Self {
        Self {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            store_addr: store_addr.into(),
            secret: None,
            host_store: rank == 0,
            timeout: Self::DEFAULT_TIMEOUT,
            patience: None,
            store_timeout: Self::DEFAULT_STORE_TIMEOUT,
            force_tcp: false,
        }
    }

    /// This rank's number among the `local_world_size` ranks of its host.
    #[must_use]
    pub fn local(mut self, local_rank: usize, local_world_size: usize) -> Self {
        self.local_rank = local_rank;
        self.local_world_size = local_world_size;
        self
    }

    /// The job's secret, which every connection proves to know. Required unless
    /// the store is on the loopback interface.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Whether this process hosts the store; by default rank 0 does. `false` on
    /// every rank where another process does ([`StoreServer`](crate::StoreServer)).
    #[must_use]
    pub fn host_store(mut self, host_store: bool) -> Self {
        self.host_store = host_store;
        self
    }

    /// How long a collective waits without any progress before it fails and
    /// names the ranks that did not arrive; and how long a rank may be silent, which
    /// otherwise says once a second that it runs, before it is taken to be gone.
    ///
    /// While a rank that is waited for, or for whom that rank waits, is known to be
    /// busy with something else (it compiles, tunes, saves), the wait goes on up to
    /// the [`patience`](Self::patience), and the log says once a minute who is
    /// waited for.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a collective waits without any progress for a rank that is busy
    /// with something else; by default 12 times the [`timeout`](Self::timeout).
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    pub(crate) fn limits(&self) -> Limits {
        let patience = self.patience.unwrap_or(self.timeout * PATIENCE_FACTOR);
        Limits {
            timeout: self.timeout,
            patience: patience.max(self.timeout),
        }
    }

    /// How long set-up waits for the store and for the other ranks.
    #[must_use]
    pub fn store_timeout(mut self, store_timeout: Duration) -> Self {
        self.store_timeout = store_timeout;
        self
    }

    /// Uses TCP between all ranks, also those that could share memory. For
    /// tests.
    #[must_use]
    pub fn force_tcp(mut self, force_tcp: bool) -> Self {
        self.force_tcp = force_tcp;
        self
    }

    /// Usage error if the numbers make no sense.
    pub(crate) fn check(&self) -> Result<()> {
        let within = |what: &str, number: usize, size: usize| match number < size {
            true => Ok(()),
            false => Err(Error::usage(format!(
                "the {what} is {number}, and has to be less than {size}, the number of ranks: \
                 ranks are counted from 0"
            ))),
        };
        if self.world_size == 0 || self.local_world_size == 0 {
            return Err(Error::usage("a process group has at least one rank, not 0"));
        }
        within("rank", self.rank, self.world_size)?;
        within("local rank", self.local_rank, self.local_world_size)?;
        if self.local_world_size > self.world_size {
            return Err(Error::usage(format!(
                "the local world size is {}, and can't exceed the world size, {}",
                self.local_world_size, self.world_size
            )));
        }
        if self.timeout.is_zero() || self.store_timeout.is_zero() {
            return Err(Error::usage("a time limit has to be longer than 0 s"));
        }
        Ok(())
    }

    /// How to find the store.
    pub(crate) fn store(&self) -> StoreConfig {
        StoreConfig {
            address: self.store_addr.clone(),
            secret: self.secret.clone(),
            rank: self.rank,
            world_size: self.world_size,
            host_store: self.host_store,
            timeout: self.store_timeout,
            silence: self.timeout.max(SHORTEST_SILENCE),
        }
    }
}
