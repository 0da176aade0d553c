//! A process that outlives the launcher for a moment, to end what the launcher
//! can no longer end.
//!
//! When the launcher is killed with SIGKILL, the kernel ends every rank
//! (`PR_SET_PDEATHSIG`), but not what the ranks have started. The guardian is a
//! fork of the launcher that holds the read end of a pipe. Each rank writes its
//! process group's number into it before it runs its program; the launcher
//! alone keeps the write end open. At the end of file the launcher is gone, and
//! the guardian kills the groups.
//!
//! It is a fork, not a program of its own, so that it works in every program
//! that uses this library, and it does nothing but system calls, since after a
//! fork of a process with several threads nothing else is allowed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use burn_ddp_comm::{Error, Result};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, waitpid};

/// A message to the guardian: a process group, or the one below. A write of four
/// bytes to a pipe is atomic.
type Message = [u8; 4];

/// The job is over, nothing of it is left: go.
const FAREWELL: i32 = 0;

/// The running guardian of one job; ends when dropped, and must outlive the
/// job's processes.
pub(crate) struct Guardian {
    pid: Pid,
    write: Arc<OwnedFd>,
    // Never read from; open so that a write never meets a closed pipe, even if
    // someone has killed the guardian.
    _read: OwnedFd,
}

impl Guardian {
    /// Starts the guardian of a job of `ranks` local ranks.
    ///
    /// # Errors
    /// Environment if the process limit is reached or memory is short.
    pub(crate) fn start(ranks: usize) -> Result<Self> {
        let cannot =
            |error: Errno| Error::environment_from("can't start the launcher's guardian", error);
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(cannot)?;
        // Allocated before the fork, since the child must not.
        let mut groups = Vec::with_capacity(ranks);
        // SAFETY: the child runs `guard` alone, which only makes system calls
        // and writes to memory that is allocated already, and ends in `_exit`:
        // it takes no lock, allocates nothing, and never returns into Rust code
        // of the parent.
        let pid = unsafe { libc::fork() };
        match Pid::from_raw(pid) {
            _ if pid < 0 => Err(Error::environment_from(
                "can't start the launcher's guardian",
                std::io::Error::last_os_error(),
            )),
            None => guard(read.as_fd(), &mut groups),
            Some(pid) => Ok(Self {
                pid,
                write: Arc::new(write),
                _read: read,
            }),
        }
    }

    /// Makes a process that `command` starts die with the calling thread, and
    /// its process group, whose leader it has to be, with this process.
    pub(crate) fn bind(&self, command: &mut Command) {
        let launcher = getpid();
        let write = Arc::clone(&self.write);
        let prepare = move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // A launcher that died before the call above sends no signal.
            if getppid() != Some(launcher) {
                return Err(Errno::SRCH.into());
            }
            tell(&write, getpid().as_raw_pid())?;
            Ok(())
        };
        // SAFETY: the closure runs in the child between fork and exec. It makes
        // four system calls through rustix, which issues them directly, and
        // neither allocates nor takes a lock.
        unsafe { command.pre_exec(prepare) };
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        if tell(&self.write, FAREWELL).is_ok() {
            // Fails only if someone else has waited for it.
            let _ = rustix::io::retry_on_intr(|| waitpid(Some(self.pid), WaitOptions::empty()));
        }
    }
}

/// Writes one message.
fn tell(write: &OwnedFd, message: i32) -> rustix::io::Result<()> {
    let message: Message = message.to_ne_bytes();
    rustix::io::retry_on_intr(|| rustix::io::write(write, &message)).map(drop)
}

/// The guardian's whole life. Only system calls from here on.
fn guard(read: BorrowedFd<'_>, groups: &mut Vec<Pid>) -> ! {
    detach();
    let kept = keep_only(read);
    if kept.is_ok() {
        listen(groups);
    }
    // SAFETY: `_exit` ends the process without running the parent's exit
    // handlers or destructors; it has no precondition.
    unsafe { libc::_exit(0) }
}

/// Leaves the launcher's session, so that neither the terminal's signals nor
/// one to the launcher's process group ends the guardian as well, and blocks
/// all signals, whose handlers belong to the launcher.
fn detach() {
    // SAFETY: `set` is written by `sigfillset` before it is read; both calls
    // are async-signal-safe and touch nothing else.
    unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(set.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut());
    }
    // None of these is needed for the work: a guardian that kept the working
    // directory or its name does the same.
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir(c"/");
    let _ = rustix::thread::set_name(c"burnrun-guard");
}

/// Makes `read` descriptor 0 and closes all others: the pipe's write end, of
/// which the launcher must hold the only one, and the launcher's output, whose
/// readers wait for its end.
fn keep_only(read: BorrowedFd<'_>) -> rustix::io::Result<()> {
    // SAFETY: this process has a descriptor table of its own, and runs nothing
    // after this but `listen`, which uses descriptor 0 alone. So no owner of a
    // descriptor that is closed or replaced here ever uses it again.
    unsafe {
        if libc::dup2(read.as_raw_fd(), 0) < 0 {
            return Err(Errno::BADF);
        }
        if libc::syscall(libc::SYS_close_range, 1u32, u32::MAX, 0u32) != 0 {
            // Before Linux 5.9.
            let mut limit = std::mem::MaybeUninit::<libc::rlimit>::zeroed();
            libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr());
            let open = limit.assume_init().rlim_cur.min(1 << 20) as i32;
            for descriptor in 1..open {
                libc::close(descriptor);
            }
        }
    }
    Ok(())
}

/// Collects groups until the launcher is gone, then kills them.
fn listen(groups: &mut Vec<Pid>) {
    loop {
        let mut message: Message = [0; 4];
        // SAFETY: descriptor 0 is the pipe, open until the process ends.
        let input = unsafe { BorrowedFd::borrow_raw(0) };
        match rustix::io::read(input, &mut message) {
            Ok(4) => match i32::from_ne_bytes(message) {
                FAREWELL => return,
                group => {
                    // More than the capacity would allocate; there are not more
                    // than one per rank.
                    if groups.len() < groups.capacity()
                        && let Some(group) = Pid::from_raw(group)
                    {
                        groups.push(group);
                    }
                }
            },
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    for &group in groups.iter() {
        // A group that is gone already is fine.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}
