//! One rank's process: its start, its end, signals to it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use burn_ddp_comm::{Error, Result};
use rustix::process::{Pid, Signal};

use crate::guardian::Guardian;
use crate::report::ExitStatus;

/// What every rank of a job runs.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) program: OsString,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(OsString, OsString)>,
    pub(crate) directory: Option<PathBuf>,
}

/// A process that has been started and not been reaped.
///
/// It leads a process group of its own. It stays a zombie after its end until
/// it is dropped, so that the group's number is no other group's until then.
pub(crate) struct RankProcess<'g> {
    /// Its rank in the job.
    pub(crate) rank: usize,
    /// When it was started.
    pub(crate) started: Instant,
    /// How and when it ended, once it has.
    pub(crate) end: Option<(ExitStatus, Instant)>,
    /// The last signal that the launcher sent to its group, and when.
    pub(crate) sent: Option<(Signal, Instant)>,
    child: Child,
    pid: Pid,
    // Ends after the processes that it guards.
    _guardian: &'g Guardian,
}

impl<'g> RankProcess<'g> {
    /// Starts the program with these variables as well. Standard input is empty;
    /// `terminal` leaves it the launcher's stderr.
    ///
    /// The process is killed when the calling thread ends.
    ///
    /// # Errors
    /// Usage if there is no such program or it can't be executed; environment
    /// if the machine can't start another process.
    pub(crate) fn start(
        program: &Program,
        rank: usize,
        variables: Vec<(&'static str, String)>,
        terminal: bool,
        guardian: &'g Guardian,
    ) -> Result<Self> {
        let mut command = Command::new(&program.program);
        command
            .args(&program.args)
            .envs(program.env.iter().map(|(name, value)| (name, value)))
            .envs(variables)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(match terminal {
                true => Stdio::inherit(),
                false => Stdio::piped(),
            })
            .process_group(0);
        if let Some(directory) = &program.directory {
            command.current_dir(directory);
        }
        guardian.bind(&mut command);
        let started = Instant::now();
        let child = command
            .spawn()
            .map_err(|error| start_error(program, rank, error))?;
        Ok(Self {
            rank,
            started,
            end: None,
            sent: None,
            pid: Pid::from_child(&child),
            child,
            _guardian: guardian,
        })
    }

    /// The process's number.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// The read ends of its output: stdout, and stderr where it is captured.
    pub(crate) fn take_output(
        &mut self,
    ) -> (
        Option<std::process::ChildStdout>,
        Option<std::process::ChildStderr>,
    ) {
        (self.child.stdout.take(), self.child.stderr.take())
    }

    /// Sends a signal to the rank and everything in its process group.
    pub(crate) fn signal(&mut self, signal: Signal) {
        if self.end.is_none() {
            self.sent = Some((signal, Instant::now()));
        }
        // Fails only where nothing is left to be signalled.
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Kills the rank, if it runs, and whatever it left behind in its group.
    pub(crate) fn kill_group(&self) {
        // Fails only where nothing was left.
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
    }

    /// Lets stopped processes of the group go on, so that they can handle a
    /// signal that was sent before.
    pub(crate) fn resume(&self) {
        // As above.
        let _ = rustix::process::kill_process_group(self.pid, Signal::CONT);
    }
}

impl Drop for RankProcess<'_> {
    fn drop(&mut self) {
        // Kills the rank as well if the job was given up.
        self.kill_group();
        // Fails only if someone else has reaped it.
        let _ = self.child.wait();
    }
}

/// Says why a program could not be started, and what to do.
fn start_error(program: &Program, rank: usize, error: io::Error) -> Error {
    let name = program.program.display();
    if let Some(directory) = &program.directory
        && !directory.is_dir()
    {
        let directory = directory.display();
        return Error::usage(format!(
            "can't start `{name}` in {directory}: there is no such directory"
        ));
    }
    match error.kind() {
        io::ErrorKind::NotFound => Error::usage(not_found(program)),
        io::ErrorKind::PermissionDenied => Error::usage(format!(
            "can't execute `{name}`: {}; is it a program with its execute bit set (`chmod +x`), on a file system that allows execution?",
            describe(error)
        )),
        _ => Error::environment(format!(
            "can't start rank {rank} (`{name}`): {}",
            describe(error)
        )),
    }
}

/// The error's text without Rust's `(os error 2)`.
fn describe(error: io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}

fn not_found(program: &Program) -> String {
    let name = program.program.display();
    let has_slash = program.program.as_encoded_bytes().contains(&b'/');
    let here = in_directory(program, &program.program);
    match (has_slash, here.exists()) {
        (true, true) => format!(
            "can't start `{name}`: the file is there, but the interpreter that it names (its `#!` line or dynamic loader) is not"
        ),
        (true, false) => format!("can't start `{name}`: there is no such file"),
        (false, true) if is_executable(&here) => {
            format!("can't start `{name}`: it is not on the PATH; did you mean `./{name}`?")
        }
        (false, _) => format!("can't start `{name}`: there is no such program on the PATH"),
    }
}

fn in_directory(program: &Program, name: &OsStr) -> PathBuf {
    match &program.directory {
        Some(directory) => directory.join(name),
        None => PathBuf::from(name),
    }
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}
