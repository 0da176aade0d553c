//! Runs a test's ranks as processes: the test binary starts itself again, once
//! a rank, for that test alone.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, ErrorKind, GroupConfig, ProcessGroup, Secret, StoreServer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// After how long a job is taken to hang. Far longer than any takes.
const HANG: Duration = Duration::from_secs(240);

/// What a job looks like.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) world_size: usize,
    /// Uses TCP between all ranks.
    pub(crate) tcp: bool,
    /// Limit of a wait in a collective.
    pub(crate) timeout: Duration,
    /// The same for a rank that is known to be busy.
    pub(crate) patience: Duration,
    /// Rank 0 hosts the store, not the parent.
    pub(crate) rank_0_hosts: bool,
    /// A rank that can't make shared memory.
    pub(crate) memoryless: Option<usize>,
    /// Tells jobs of one test apart that are alike otherwise.
    pub(crate) case: usize,
}

impl Spec {
    pub(crate) fn new(world_size: usize, tcp: bool) -> Self {
        Self {
            world_size,
            tcp,
            timeout: Duration::from_secs(120),
            patience: Duration::from_secs(120),
            rank_0_hosts: false,
            memoryless: None,
            case: 0,
        }
    }
}

/// In a rank's process: what it needs to know.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) spec: Spec,
    address: String,
    secret: String,
    dir: PathBuf,
}

impl Rank {
    pub(crate) fn config(&self) -> GroupConfig {
        GroupConfig::new(self.rank, self.spec.world_size, &*self.address)
            .secret(Secret::from_hex(&self.secret).unwrap())
            .host_store(self.spec.rank_0_hosts && self.rank == 0)
            .timeout(self.spec.timeout)
            .patience(self.spec.patience)
            .store_timeout(Duration::from_secs(120))
            .force_tcp(self.spec.tcp)
    }

    pub(crate) fn group(&self) -> ProcessGroup {
        ProcessGroup::new(self.config()).unwrap()
    }

    /// Tells the parent that this rank has come to `point`.
    pub(crate) fn reach(&self, point: &str) {
        std::fs::write(self.dir.join(format!("{point}-{}", self.rank)), "").unwrap();
    }

    /// Whether rank `rank` has come to `point`.
    pub(crate) fn has_reached(&self, rank: usize, point: &str) -> bool {
        self.dir.join(format!("{point}-{rank}")).exists()
    }
}

/// An error as a rank reports it to the parent, and when it had it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Reported {
    pub(crate) kind: String,
    pub(crate) ranks: Vec<usize>,
    pub(crate) text: String,
    /// On the monotonic clock, which all processes share.
    pub(crate) at: Duration,
}

impl From<Error> for Reported {
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Usage => "usage",
            ErrorKind::Peer => "peer",
            ErrorKind::Environment => "environment",
        };
        Self {
            kind: kind.to_owned(),
            ranks: error.ranks().to_vec(),
            text: error.to_string(),
            at: now(),
        }
    }
}

/// Time on the monotonic clock.
pub(crate) fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// In the parent: the ranks of a running job.
pub(crate) struct Job {
    children: Vec<Option<Child>>,
    dir: tempfile::TempDir,
    pub(crate) store: Option<StoreServer>,
    started: Instant,
}

const VARIABLE: &str = "BURN_DDP_TEST_RANK";

/// Runs test `name` as a job: `rank_main` in each rank's process, whose result
/// goes to the parent, and `parent` there. A test can run several jobs, of
/// different `spec`s, one after the other; in a rank's process, all but its own
/// do nothing.
pub(crate) fn job<R: Serialize>(
    name: &str,
    spec: Spec,
    rank_main: impl FnOnce(&Rank) -> R,
    parent: impl FnOnce(&mut Job),
) {
    if let Ok(rank) = std::env::var(VARIABLE) {
        let rank: Rank = serde_json::from_str(&rank).unwrap();
        if rank.spec != spec {
            return;
        }
        let name = format!("result-{}", rank.rank);
        let result = rank_main(&rank);
        std::fs::write(rank.dir.join(name), serde_json::to_vec(&result).unwrap()).unwrap();
        return;
    }
    parent(&mut Job::start(name, &spec));
}

impl Job {
    fn start(name: &str, spec: &Spec) -> Self {
        let secret = Secret::generate();
        let loopback = ([127, 0, 0, 1], 0).into();
        let store = (!spec.rank_0_hosts)
            .then(|| StoreServer::bind(loopback, secret.clone(), spec.world_size).unwrap());
        let address = match &store {
            Some(store) => store.local_addr(),
            // Free now, and hardly taken by another within milliseconds.
            None => std::net::TcpListener::bind(loopback)
                .and_then(|listener| listener.local_addr())
                .unwrap(),
        };
        let dir = tempfile::tempdir().unwrap();
        let program = &std::env::current_exe().unwrap();
        let children = (0..spec.world_size)
            .map(|rank| {
                let rank = Rank {
                    rank,
                    spec: spec.clone(),
                    address: address.to_string(),
                    secret: secret.to_hex(),
                    dir: dir.path().to_owned(),
                };
                let mut command = match spec.memoryless {
                    // A limit on the size of files holds for anonymous ones too.
                    Some(memoryless) if memoryless == rank.rank => {
                        let mut shell = Command::new("sh");
                        let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
                        shell.args(["-c", script, "sh"]).arg(program);
                        shell
                    }
                    _ => Command::new(program),
                };
                let child = command
                    .args(["--exact", name, "--nocapture"])
                    .env("BURN_DDP_FLIGHT_DIR", dir.path())
                    .env(VARIABLE, serde_json::to_string(&rank).unwrap())
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .spawn();
                Some(child.unwrap())
            })
            .collect();
        Self {
            children,
            dir,
            store,
            started: Instant::now(),
        }
    }

    /// Waits until `rank` has come to `point`.
    pub(crate) fn await_point(&mut self, rank: usize, point: &str) {
        let path = self.dir.path().join(format!("{point}-{rank}"));
        while !path.exists() {
            self.check_hang(&format!("rank {rank} did not come to {point:?}"));
            if let Some(child) = &mut self.children[rank]
                && let Some(status) = child.try_wait().unwrap()
            {
                panic!("rank {rank} ended before {point:?}: {status}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills `rank` (SIGKILL); returns when.
    pub(crate) fn kill(&mut self, rank: usize) -> Duration {
        let mut child = self.children[rank].take().unwrap();
        let at = now();
        child.kill().unwrap();
        child.wait().unwrap();
        at
    }

    /// Where ranks leave their flight records.
    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Sends a signal to `rank`.
    pub(crate) fn signal(&self, rank: usize, signal: rustix::process::Signal) -> Duration {
        let child = self.children[rank].as_ref().unwrap();
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, signal).unwrap();
        now()
    }

    /// Waits until `rank` has ended.
    pub(crate) fn end(&mut self, rank: usize) -> ExitStatus {
        let mut child = self.children[rank].take().unwrap();
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if self.started.elapsed() > HANG {
                let _ = child.kill();
                let _ = child.wait();
            }
            self.check_hang(&format!("rank {rank} did not end"));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What `rank`'s main returned, when it has ended well.
    pub(crate) fn result<R: DeserializeOwned>(&mut self, rank: usize) -> R {
        let status = self.end(rank);
        assert!(status.success(), "rank {rank}: {status}");
        let path = self.dir.path().join(format!("result-{rank}"));
        let bytes = std::fs::read(path).expect("the rank's process ran the test");
        serde_json::from_slice(&bytes).unwrap()
    }

    /// What every rank's main returned.
    pub(crate) fn results<R: DeserializeOwned>(&mut self) -> Vec<R> {
        (0..self.children.len())
            .map(|rank| self.result(rank))
            .collect()
    }

    fn check_hang(&self, what: &str) {
        assert!(self.started.elapsed() < HANG, "{what}");
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
