//! Runs `burnrun` with ranks that behave as told, and looks what is left.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

pub(crate) type TestResult = Result<(), Box<dyn std::error::Error>>;

/// Far more than anything takes, even on a loaded machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The program that acts as its arguments say.
pub(crate) fn fixture() -> PathBuf {
    let burnrun = Path::new(env!("CARGO_BIN_EXE_burnrun"));
    let fixture = burnrun.with_file_name("examples").join("fixture_rank");
    assert!(
        fixture.exists(),
        "{} is missing: `cargo build -p burn-ddp-launch --example fixture_rank`",
        fixture.display()
    );
    fixture
}

/// `burnrun` with these options, to run the fixture with these actions.
///
/// Signals do what they do by default, also where the tests run under `nohup`:
/// an ignored signal would be inherited, and stay ignored.
pub(crate) fn burnrun(options: &[&str], actions: &[&str]) -> Command {
    let mut command = Command::new("env");
    command
        .arg("--default-signal=HUP,INT,TERM")
        .arg(env!("CARGO_BIN_EXE_burnrun"))
        .args(options)
        .arg("--")
        .arg(fixture())
        .args(actions);
    for name in [
        "RAYON_NUM_THREADS",
        "OMP_NUM_THREADS",
        "BURN_DDP_THREADS",
        "BURN_DDP_SECRET",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs to the end.
pub(crate) fn run(mut command: Command) -> Result<Finished, Box<dyn std::error::Error>> {
    Running::start(&mut command)?.finish()
}

/// A running command whose output is gathered.
pub(crate) struct Running {
    child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
}

/// What became of a command.
pub(crate) struct Finished {
    pub(crate) code: Option<i32>,
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Finished {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> std::io::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self {
            stdout: child.stdout.take().map(gather),
            stderr: child.stderr.take().map(gather),
            child,
        })
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) -> TestResult {
        Ok(rustix::process::kill_process(self.pid(), signal)?)
    }

    pub(crate) fn finish(mut self) -> Result<Finished, Box<dyn std::error::Error>> {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            assert!(start.elapsed() < DEADLINE, "the launcher hangs");
            std::thread::sleep(Duration::from_millis(5));
        };
        let join = |thread: Option<JoinHandle<Vec<u8>>>| {
            thread.map_or(Ok(Vec::new()), |thread| {
                thread.join().map_err(|_| "panicked")
            })
        };
        let stdout = join(self.stdout.take())?;
        let stderr = String::from_utf8_lossy(&join(self.stderr.take())?).into_owned();
        Ok(Finished {
            code: status.code(),
            status,
            stdout,
            stderr,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only where a test has failed is there still something to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn gather(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is enough to tell what is wrong.
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// A directory in which ranks record their process ids.
pub(crate) struct Records(tempfile::TempDir);

impl Records {
    pub(crate) fn new() -> std::io::Result<Self> {
        tempfile::tempdir().map(Self)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The action with this name, with the directory as its value.
    pub(crate) fn action(&self, name: &str) -> String {
        format!("{name}={}", self.0.path().display())
    }

    /// The action that waits for what is recorded under this name.
    pub(crate) fn awaiting(&self, name: &str) -> String {
        format!("await={}", self.0.path().join(name).display())
    }

    /// Waits until something is recorded under this name; gives the id.
    pub(crate) fn wait(&self, name: &str) -> Result<Pid, Box<dyn std::error::Error>> {
        let path = self.0.path().join(name);
        eventually(&format!("{name} is recorded"), || path.exists());
        let pid = std::fs::read_to_string(path)?.parse()?;
        Ok(Pid::from_raw(pid).ok_or("no pid")?)
    }

    /// All ids recorded.
    pub(crate) fn all(&self) -> Result<Vec<Pid>, Box<dyn std::error::Error>> {
        let mut pids = Vec::new();
        for entry in std::fs::read_dir(self.0.path())? {
            let pid = std::fs::read_to_string(entry?.path())?.parse()?;
            pids.push(Pid::from_raw(pid).ok_or("no pid")?);
        }
        Ok(pids)
    }

    /// Asserts that every process recorded has ended, or does at once.
    pub(crate) fn assert_ended(&self, count: usize) -> TestResult {
        let pids = self.all()?;
        assert_eq!(pids.len(), count, "processes recorded");
        for pid in pids {
            eventually(&format!("process {pid:?} has ended"), || !is_running(pid));
        }
        Ok(())
    }
}

/// Waits for something that is true soon.
pub(crate) fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < DEADLINE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether there is a process with this id that has not ended.
pub(crate) fn is_running(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid()));
    let state = stat.ok().and_then(|stat| {
        let (_, rest) = stat.rsplit_once(") ")?;
        rest.chars().next()
    });
    !matches!(state, None | Some('Z' | 'X'))
}

/// The children of a process.
pub(crate) fn children(pid: Pid) -> Vec<Pid> {
    let parent_of = |pid: i32| -> Option<i32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, rest) = stat.rsplit_once(") ")?;
        rest.split(' ').nth(1)?.parse().ok()
    };
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&child: &i32| parent_of(child) == Some(pid.as_raw_pid()))
        .filter_map(Pid::from_raw)
        .collect()
}

/// Whether a process has a thread of this name.
pub(crate) fn has_thread(pid: Pid, name: &str) -> bool {
    std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_pid()))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok())
        .any(|comm| comm.trim_end() == name)
}
