//! What the launcher tells this process through environment variables: its
//! rank, and where to meet the others.
//!
//! The variables are torchrun's: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
//! `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`. Where none of the first four
//! is set, Slurm's and Open MPI's tell the ranks, if they tell of more than one.
//!
//! Without `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, all ranks are on one host if
//! `MASTER_ADDR` is on the loopback interface, and each is alone on its host
//! otherwise. With `LOCAL_WORLD_SIZE` only, hosts take ranks in blocks.

use std::ffi::OsString;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use crate::{Error, GroupConfig, Result, Secret};

mod manager;
#[cfg(test)]
mod tests;

/// Longest time limit: a year, which no wait outlasts.
const LONGEST_TIMEOUT_SECONDS: f64 = 366.0 * 24.0 * 3600.0;

/// This process's place in its job.
#[derive(Clone, Debug)]
pub(crate) struct LaunchEnv {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    /// `host:port` of the store; `None` in a world of one that needs none.
    pub(crate) store_addr: Option<String>,
    /// Whether the launcher hosts the store, and not rank 0.
    pub(crate) launcher_hosts_store: bool,
    /// The job's secret.
    pub(crate) secret: Option<Secret>,
    /// How long a collective may wait.
    pub(crate) timeout: Duration,
    /// See [`GroupConfig::patience`].
    pub(crate) patience: Option<Duration>,
    /// How long set-up may wait.
    pub(crate) store_timeout: Duration,
    /// Whether to use TCP between all ranks, for tests.
    pub(crate) force_tcp: bool,
}

/// What the variables of one source tell of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ranks {
    rank: usize,
    world_size: usize,
    local_rank: Option<usize>,
    local_world_size: Option<usize>,
}

impl LaunchEnv {
    /// What this process's environment says; `None` if it says nothing, and
    /// this process is alone.
    ///
    /// # Errors
    ///
    /// Usage: variables are missing or make no sense; the error names all of
    /// them.
    pub(crate) fn from_env() -> Result<Option<Self>> {
        Self::parse(|name| std::env::var_os(name))
    }

    /// [`from_env`](Self::from_env) with the environment that `lookup` knows.
    pub(crate) fn parse(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let mut reader = Reader {
            lookup: &lookup,
            problems: Vec::new(),
        };
        let ranks = if reader.any_set(&["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]) {
            torchrun_ranks(&mut reader)
        } else if let Some(ranks) = manager::ranks(&mut reader) {
            ranks
        } else if reader.problems.is_empty() && reader.any_set(&["MASTER_ADDR", "MASTER_PORT"]) {
            torchrun_ranks(&mut reader)
        } else {
            None
        };
        // A group of one has time limits too, but nothing to wait for.
        let alone = ranks.is_none() && reader.problems.is_empty();
        if alone {
            return Ok(None);
        }
        let needs_store = ranks.is_none_or(|ranks| ranks.world_size > 1);
        let store_addr = reader.store_addr(needs_store);
        let environment = Self {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            launcher_hosts_store: reader.choice("BURN_DDP_STORE", "launcher"),
            secret: reader.secret(),
            timeout: reader.seconds("BURN_DDP_TIMEOUT_SECONDS", GroupConfig::DEFAULT_TIMEOUT),
            patience: reader.optional_seconds("BURN_DDP_PATIENCE_SECONDS"),
            store_timeout: reader.seconds(
                "BURN_DDP_STORE_TIMEOUT_SECONDS",
                GroupConfig::DEFAULT_STORE_TIMEOUT,
            ),
            force_tcp: reader.choice("BURN_DDP_TRANSPORT", "tcp"),
            store_addr: store_addr.as_ref().map(|(host, port)| join(host, *port)),
        };
        let loopback = store_addr.is_none_or(|(host, _)| is_loopback(&host));
        let local = ranks.and_then(|ranks| reader.local_ranks(&ranks, loopback));
        match (ranks, local) {
            (Some(ranks), Some((local_rank, local_world_size))) if reader.problems.is_empty() => {
                Ok(Some(Self {
                    rank: ranks.rank,
                    world_size: ranks.world_size,
                    local_rank,
                    local_world_size,
                    ..environment
                }))
            }
            _ => Err(reader.error()),
        }
    }

    /// The group of all the job's ranks.
    pub(crate) fn group_config(self) -> GroupConfig {
        let config = GroupConfig::new(
            self.rank,
            self.world_size,
            self.store_addr.unwrap_or_default(),
        )
        .local(self.local_rank, self.local_world_size)
        .host_store(self.rank == 0 && !self.launcher_hosts_store)
        .timeout(self.timeout)
        .store_timeout(self.store_timeout)
        .force_tcp(self.force_tcp);
        let config = match self.patience {
            Some(patience) => config.patience(patience),
            None => config,
        };
        match self.secret {
            Some(secret) => config.secret(secret),
            None => config,
        }
    }
}

fn torchrun_ranks(reader: &mut Reader<'_>) -> Option<Ranks> {
    let rank = reader.required("RANK");
    let world_size = reader.required("WORLD_SIZE");
    let local_rank = reader.number("LOCAL_RANK");
    let local_world_size = reader.number("LOCAL_WORLD_SIZE");
    let ranks = Ranks {
        rank: rank?,
        world_size: world_size?,
        local_rank,
        local_world_size,
    };
    reader.check(&ranks, "RANK", "WORLD_SIZE").then_some(ranks)
}

/// Reads variables and collects what is wrong with them.
struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
    problems: Vec<String>,
}

impl Reader<'_> {
    fn is_set(&self, name: &str) -> bool {
        (self.lookup)(name).is_some()
    }

    fn any_set(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.is_set(name))
    }

    fn problem(&mut self, problem: impl Into<String>) {
        self.problems.push(problem.into());
    }

    /// A variable's text; `None` if it is not set, or is no text, which is a
    /// problem.
    fn text(&mut self, name: &str) -> Option<String> {
        match (self.lookup)(name)?.into_string() {
            Ok(text) if text.trim().is_empty() => {
                self.problem(format!("{name} is empty"));
                None
            }
            Ok(text) => Some(text.trim().to_owned()),
            Err(bytes) => {
                self.problem(format!("{name} is not Unicode: {bytes:?}"));
                None
            }
        }
    }

    fn parsed<T: FromStr>(&mut self, name: &str, expected: &str) -> Option<T> {
        let text = self.text(name)?;
        let value = text.parse().ok();
        if value.is_none() {
            self.problem(format!("{name} is {text:?}, which is not {expected}"));
        }
        value
    }

    fn number(&mut self, name: &str) -> Option<usize> {
        self.parsed(name, "a whole number from 0 up")
    }

    fn required(&mut self, name: &str) -> Option<usize> {
        if !self.is_set(name) {
            self.problem(format!("{name} is missing"));
        }
        self.number(name)
    }

    /// Whether rank and world size fit each other.
    fn check(&mut self, ranks: &Ranks, rank: &str, world_size: &str) -> bool {
        if ranks.world_size == 0 {
            self.problem(format!(
                "{world_size} is 0, but a job has at least one rank"
            ));
        } else if ranks.rank >= ranks.world_size {
            self.problem(format!(
                "{rank} is {}, which is not less than {world_size}, {}",
                ranks.rank, ranks.world_size
            ));
        } else {
            return true;
        }
        false
    }

    /// Host and port of the store.
    fn store_addr(&mut self, required: bool) -> Option<(String, u16)> {
        for name in ["MASTER_ADDR", "MASTER_PORT"] {
            if required && !self.is_set(name) {
                self.problem(format!("{name} is missing"));
            }
        }
        let host = self.text("MASTER_ADDR");
        let port: Option<u16> = self.parsed("MASTER_PORT", "a port number (1 to 65535)");
        if port == Some(0) {
            self.problem("MASTER_PORT is 0, which is not a port number (1 to 65535)");
        }
        Some((host?, port?))
    }

    fn secret(&mut self) -> Option<Secret> {
        let text = self.text("BURN_DDP_SECRET")?;
        match Secret::from_hex(&text) {
            Ok(secret) => Some(secret),
            Err(error) => {
                self.problem(format!("BURN_DDP_SECRET is wrong: {error}"));
                None
            }
        }
    }

    fn seconds(&mut self, name: &str, default: Duration) -> Duration {
        self.optional_seconds(name).unwrap_or(default)
    }

    fn optional_seconds(&mut self, name: &str) -> Option<Duration> {
        let seconds = self.parsed::<f64>(name, "a number of seconds")?;
        if seconds > 0.0 && seconds <= LONGEST_TIMEOUT_SECONDS {
            return Some(Duration::from_secs_f64(seconds));
        }
        self.problem(format!(
            "{name} is {seconds}, which is not more than 0 and at most \
             {LONGEST_TIMEOUT_SECONDS} seconds"
        ));
        None
    }

    /// A variable that is `value` or not set.
    fn choice(&mut self, name: &str, value: &str) -> bool {
        match self.text(name) {
            None => false,
            Some(text) if text == value => true,
            Some(text) => {
                self.problem(format!("{name} is {text:?}, which may only be {value:?}"));
                false
            }
        }
    }

    /// Local rank and local world size, see the [module](self).
    fn local_ranks(&mut self, ranks: &Ranks, loopback: bool) -> Option<(usize, usize)> {
        let Ranks {
            rank, world_size, ..
        } = *ranks;
        let (local_rank, local_world_size) = match (ranks.local_rank, ranks.local_world_size) {
            (Some(local_rank), Some(local_world_size)) => (local_rank, local_world_size),
            (None, None) if loopback => (rank, world_size),
            (None, None) => (0, 1),
            (Some(local_rank), None) if loopback => (local_rank, world_size),
            (Some(_), None) => {
                self.problem("LOCAL_WORLD_SIZE is missing, though LOCAL_RANK is set");
                return None;
            }
            (None, Some(0)) => (0, 0),
            (None, Some(local_world_size)) => (rank % local_world_size, local_world_size),
        };
        if local_world_size == 0 || local_world_size > world_size {
            self.problem(format!(
                "LOCAL_WORLD_SIZE is {local_world_size}, which is not from 1 to the world size, \
                 {world_size}"
            ));
        } else if local_rank >= local_world_size {
            self.problem(format!(
                "LOCAL_RANK is {local_rank}, which is not less than the local world size, \
                 {local_world_size}"
            ));
        } else {
            return Some((local_rank, local_world_size));
        }
        None
    }

    fn error(&self) -> Error {
        Error::usage(format!(
            "this process's environment does not say which rank it is: {}. Start it with burnrun \
             or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on every rank (and \
             LOCAL_RANK and LOCAL_WORLD_SIZE where a host has several), or none of them to train \
             in this process alone",
            self.problems.join("; ")
        ))
    }
}

/// `host:port`, with the brackets that an IPv6 address needs.
fn join(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) => format!("[{address}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

fn is_loopback(host: &str) -> bool {
    let literal = host.trim_start_matches('[').trim_end_matches(']');
    match literal.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}
