//! A job of several ranks on this host, of which a test sees every rank's exit
//! status and output.

use std::ffi::OsString;
use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn_ddp_comm::{Secret, StoreServer};

/// How one rank ended.
#[derive(Debug)]
pub struct RankOutput {
    /// Its rank.
    pub rank: usize,
    /// Its exit status.
    pub status: ExitStatus,
    /// What it printed to standard output.
    pub stdout: String,
    /// What it printed to standard error.
    pub stderr: String,
    /// Time from the start of the job to its end.
    pub after: Duration,
}

/// A job about to be run.
pub struct TestJob {
    program: PathBuf,
    ranks: usize,
    arguments: Vec<OsString>,
    environment: Vec<(String, String)>,
    limit: Duration,
}

impl TestJob {
    /// `ranks` processes of `program`.
    pub fn new(program: impl Into<PathBuf>, ranks: usize) -> Self {
        Self {
            program: program.into(),
            ranks,
            arguments: Vec::new(),
            environment: Vec::new(),
            limit: Duration::from_secs(240),
        }
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs the job to its end.
    ///
    /// # Panics
    ///
    /// When a rank can't be started, or the job hangs.
    pub fn run(self) -> Vec<RankOutput> {
        let secret = Secret::generate();
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let store = StoreServer::bind(address, secret.clone(), self.ranks).expect("a free port");
        let started = Instant::now();
        let ranks: Vec<Running> = (0..self.ranks)
            .map(|rank| self.start(rank, &store, &secret))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join(started, self.limit))
            .collect()
    }

    /// Runs the job and fails unless every rank succeeds.
    ///
    /// # Panics
    ///
    /// When a rank fails or the job hangs.
    pub fn succeed(self) -> Vec<RankOutput> {
        let outputs = self.run();
        assert!(
            outputs.iter().all(|output| output.status.success()),
            "{outputs:#?}"
        );
        outputs
    }

    fn start(&self, rank: usize, store: &StoreServer, secret: &Secret) -> Running {
        let address = store.local_addr();
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", self.ranks.to_string())
            .env("LOCAL_WORLD_SIZE", self.ranks.to_string())
            .env("MASTER_ADDR", address.ip().to_string())
            .env("MASTER_PORT", address.port().to_string())
            .env("BURN_DDP_SECRET", secret.to_hex())
            .env("BURN_DDP_STORE", "launcher")
            .env("RUST_BACKTRACE", "0")
            .envs(self.environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("can't start {}: {error}", self.program.display()));
        Running {
            rank,
            stdout: read(child.stdout.take()),
            stderr: read(child.stderr.take()),
            child,
        }
    }
}

fn read(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came before an error is worth having.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

struct Running {
    rank: usize,
    child: Child,
    stdout: JoinHandle<String>,
    stderr: JoinHandle<String>,
}

impl Running {
    fn join(mut self, started: Instant, limit: Duration) -> RankOutput {
        let mut hung = false;
        let status = loop {
            match self.child.try_wait().expect("it is this process's child") {
                Some(status) => break status,
                None if started.elapsed() > limit => {
                    hung = true;
                    let _ = self.child.kill();
                }
                None => {}
            }
            thread::sleep(Duration::from_millis(5));
        };
        let after = started.elapsed();
        let text = |thread: JoinHandle<String>| thread.join().unwrap_or_default();
        let output = RankOutput {
            rank: self.rank,
            status,
            stdout: text(self.stdout),
            stderr: text(self.stderr),
            after,
        };
        assert!(!hung, "it hung for {limit:?}: {output:#?}");
        output
    }
}
