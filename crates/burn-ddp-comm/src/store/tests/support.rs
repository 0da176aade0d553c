//! Runs the ranks of a test as processes of their own.
//!
//! A rank is this very test binary, started again to run one test, the *entry*,
//! which does nothing unless it finds itself in a rank and then plays the
//! *case* it was started for.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long a rank may take for anything before it is taken to hang.
pub(super) const HANG: Duration = Duration::from_secs(120);

const CASE: &str = "BURN_DDP_TEST_CASE";
/// Marks what ranks say to the test, between what the test harness prints.
const MARK: &str = ">> ";

/// In a rank, the case to play.
pub(super) fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// In a rank, says a line to the test.
pub(super) fn say(text: impl AsRef<str>) {
    let mut out = std::io::stdout().lock();
    // The harness has begun a line without ending it.
    writeln!(out, "\n{MARK}{}", text.as_ref().replace('\n', " ")).expect("the test listens");
    out.flush().expect("the test listens");
}

/// Ranks about to be started.
pub(super) struct Ranks {
    entry: String,
    case: String,
    world_size: usize,
    environment: Vec<(String, String)>,
}

impl Ranks {
    /// `world_size` ranks that play `case` in the test named `entry`, with its
    /// path within the binary.
    pub(super) fn new(entry: &str, case: &str, world_size: usize) -> Self {
        let environment = [
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_WORLD_SIZE", world_size.to_string()),
            ("RUST_BACKTRACE", "0".to_owned()),
        ];
        Self {
            entry: entry.to_owned(),
            case: case.to_owned(),
            world_size,
            environment: environment
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        }
    }

    /// Sets an environment variable of every rank.
    pub(super) fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Has the ranks meet at the store at `address`, as a launcher would.
    pub(super) fn store(self, address: SocketAddr, secret: &str) -> Self {
        self.env("BURN_DDP_STORE", "launcher")
            .meet_at(address)
            .env("BURN_DDP_SECRET", secret)
    }

    /// Has the ranks meet at a free port of the loopback interface, where rank 0
    /// hosts the store.
    pub(super) fn hosted_by_rank_0(self) -> Self {
        self.meet_at(SocketAddr::from(([127, 0, 0, 1], free_port())))
    }

    /// Has the ranks meet at `address`.
    pub(super) fn meet_at(self, address: SocketAddr) -> Self {
        self.env("MASTER_ADDR", address.ip().to_string())
            .env("MASTER_PORT", address.port().to_string())
    }

    /// Starts all ranks.
    pub(super) fn start(&self) -> Vec<Rank> {
        (0..self.world_size)
            .map(|rank| self.start_one(rank))
            .collect()
    }

    /// Starts one rank.
    pub(super) fn start_one(&self, rank: usize) -> Rank {
        let program = std::env::current_exe().expect("this binary has a path");
        let mut child = Command::new(program)
            .args([&self.entry, "--exact", "--nocapture", "--test-threads=1"])
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env(CASE, &self.case)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this binary can be started again");
        let said = Arc::new(Said::default());
        let stdout = child.stdout.take().expect("it is piped");
        let stderr = child.stderr.take().expect("it is piped");
        let to = Arc::clone(&said);
        Rank {
            rank,
            child,
            ended: None,
            said,
            stdout: Some(thread::spawn(move || to.listen(stdout))),
            stderr: Some(thread::spawn(move || read_all(stderr))),
        }
    }
}

/// A port of the loopback interface that nobody listens at now.
pub(super) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// A running rank. It is killed when dropped.
pub(super) struct Rank {
    pub(super) rank: usize,
    child: Child,
    ended: Option<Ended>,
    said: Arc<Said>,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
}

/// How a rank ended.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// What a rank has said, and whether it has finished speaking.
#[derive(Default)]
struct Said {
    lines: Mutex<(Vec<(Instant, String)>, bool)>,
    more: Condvar,
}

impl Said {
    fn listen(&self, stdout: impl Read) -> String {
        let mut text = String::new();
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if let Some(said) = line.strip_prefix(MARK) {
                self.lines
                    .lock()
                    .unwrap()
                    .0
                    .push((Instant::now(), said.to_owned()));
                self.more.notify_all();
            }
            text += &line;
            text.push('\n');
        }
        self.lines.lock().unwrap().1 = true;
        self.more.notify_all();
        text
    }
}

fn read_all(mut stderr: impl Read) -> String {
    let mut bytes = Vec::new();
    // What came before an error is worth having.
    let _ = stderr.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Rank {
    /// The process's number.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that starts with `start`, and returns it.
    pub(super) fn hear(&mut self, start: &str) -> String {
        self.hear_when(start).1
    }

    /// [`hear`](Self::hear), with the time when it was said.
    pub(super) fn hear_when(&mut self, start: &str) -> (Instant, String) {
        let deadline = Instant::now() + HANG;
        let said = Arc::clone(&self.said);
        let mut lines = said.lines.lock().unwrap();
        loop {
            if let Some(line) = lines.0.iter().find(|(_, line)| line.starts_with(start)) {
                return line.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if lines.1 || left.is_zero() {
                drop(lines);
                let _ = self.child.kill();
                let ended = self.wait();
                panic!("rank {} never said {start:?}: {ended:#?}", self.rank);
            }
            lines = said.more.wait_timeout(lines, left).unwrap().0;
        }
    }

    /// A line that starts with `start`, if it has been said.
    pub(super) fn said(&self, start: &str) -> Option<String> {
        let lines = self.said.lines.lock().unwrap();
        let line = lines.0.iter().find(|(_, line)| line.starts_with(start));
        line.map(|(_, line)| line.clone())
    }

    /// Sends it a signal.
    pub(super) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it has not been waited for");
    }

    /// Kills it like `kill -9`, and returns when.
    pub(super) fn kill(&self) -> Instant {
        let now = Instant::now();
        self.signal(Signal::KILL);
        now
    }

    /// Waits for its end.
    pub(super) fn wait(&mut self) -> Ended {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let deadline = Instant::now() + HANG;
        let mut hung = false;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is this process's child") {
                break status;
            }
            if Instant::now() > deadline {
                hung = true;
                let _ = self.child.kill();
            }
            thread::sleep(Duration::from_millis(2));
        };
        let text = |thread: &mut Option<JoinHandle<String>>| {
            let text = thread.take().map(JoinHandle::join);
            text.and_then(Result::ok).unwrap_or_default()
        };
        let ended = Ended {
            status,
            stdout: text(&mut self.stdout),
            stderr: text(&mut self.stderr),
        };
        assert!(!hung, "rank {} hung: {ended:#?}", self.rank);
        self.ended = Some(ended.clone());
        ended
    }

    /// Waits for its end, which has to be a success.
    pub(super) fn succeed(&mut self) -> Ended {
        let ended = self.wait();
        assert!(ended.status.success(), "rank {}: {ended:#?}", self.rank);
        ended
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs `attempt` until the time it returns is below `limit`, three times at
/// most: on a machine under load one attempt may be delayed.
pub(super) fn within(limit: Duration, mut attempt: impl FnMut() -> Duration) {
    let times: Vec<Duration> = (0..3)
        .map(|_| attempt())
        .scan(false, |reached, time| {
            (!std::mem::replace(reached, time < limit)).then_some(time)
        })
        .collect();
    assert!(times.iter().any(|time| *time < limit), "it took {times:?}");
}
