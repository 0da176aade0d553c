//! Notices the ends of processes, in the order in which they happen.
//!
//! The order tells which rank failed first, so it is the kernel's: an epoll
//! instance lists its descriptors in the order in which they became ready, and
//! a process's descriptor does so when the process ends. How soon a thread of
//! the launcher gets to run on a busy machine has no part in it.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Result};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, waitid};

use crate::report::ExitStatus;
use crate::supervisor::Event;

/// The processes to watch, and how.
pub(crate) struct ExitWatch {
    epoll: OwnedFd,
    watched: Vec<Watched>,
}

struct Watched {
    pid: Pid,
    /// None before Linux 5.3, which has no descriptors for processes.
    descriptor: Option<OwnedFd>,
}

impl ExitWatch {
    pub(crate) fn new() -> Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(cannot)?;
        let watched = Vec::new();
        Ok(Self { epoll, watched })
    }

    /// Watches a child of this process, at best as soon as it is started. It
    /// must not be waited for as long as the watch goes on.
    pub(crate) fn add(&mut self, pid: Pid) -> Result<()> {
        let descriptor = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => {
                let index = EventData::new_u64(self.watched.len() as u64);
                epoll::add(&self.epoll, &descriptor, index, EventFlags::IN).map_err(cannot)?;
                Some(descriptor)
            }
            Err(Errno::NOSYS) => None,
            Err(error) => return Err(cannot(error)),
        };
        self.watched.push(Watched { pid, descriptor });
        Ok(())
    }

    /// Starts to send an [`Event::Exited`] for each process at its end, with
    /// its index in the order of [`add`](Self::add) and strictly ascending
    /// times.
    pub(crate) fn start(self, events: Sender<Event>) -> Result<()> {
        if self
            .watched
            .iter()
            .any(|watched| watched.descriptor.is_none())
        {
            return self.start_thread_each(&events);
        }
        spawn("launch-exits".into(), move || self.run(&events))
    }

    /// Waits for all of them.
    fn run(mut self, events: &Sender<Event>) {
        let mut left = self.watched.len();
        let mut ready = Vec::with_capacity(left);
        let mut last = Instant::now();
        while left > 0 {
            // Fails only by a signal: the descriptor and the buffer are valid.
            let _ = retry_on_intr(|| epoll::wait(&self.epoll, spare_capacity(&mut ready), None));
            for event in ready.drain(..) {
                let index = event.data.u64() as usize;
                let watched = &mut self.watched[index];
                let Some(descriptor) = watched.descriptor.take() else {
                    continue;
                };
                // So that it is not listed again. Closing it is not enough:
                // another child, not yet past its exec, may have a copy.
                let _ = epoll::delete(&self.epoll, &descriptor);
                left -= 1;
                last = Instant::now().max(last + Duration::from_nanos(1));
                let status = end_of(watched.pid);
                // Nobody listens any more once the job has been given up.
                let _ = events.send(Event::Exited {
                    index,
                    status,
                    at: last,
                });
            }
        }
    }

    /// A thread waits for each of them: the order is that of the threads'
    /// waking up, which is nearly the same.
    fn start_thread_each(&self, events: &Sender<Event>) -> Result<()> {
        for (index, watched) in self.watched.iter().enumerate() {
            let pid = watched.pid;
            let events = events.clone();
            spawn(format!("launch-exit-{index}"), move || {
                let status = end_of(pid);
                let at = Instant::now();
                // As above.
                let _ = events.send(Event::Exited { index, status, at });
            })?;
        }
        Ok(())
    }
}

/// Waits for a child's end, and leaves it to be reaped by its owner.
fn end_of(pid: Pid) -> ExitStatus {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    match retry_on_intr(|| waitid(WaitId::Pid(pid), options)) {
        Ok(Some(status)) => exit_status(&status),
        // Something else in this process has reaped it.
        Ok(None) | Err(_) => ExitStatus::Unknown,
    }
}

fn exit_status(status: &WaitIdStatus) -> ExitStatus {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => ExitStatus::Code(code),
        (None, Some(signal)) => ExitStatus::Signal(signal),
        (None, None) => ExitStatus::Unknown,
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name).spawn(run);
    thread.map(drop).map_err(cannot)
}

fn cannot(error: impl Into<std::io::Error>) -> Error {
    Error::environment_from("can't watch the ranks' processes", error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc;

    type TestResult = std::result::Result<(), Box<dyn std::error::Error>>;

    /// A process that ends when its standard input is closed.
    fn child(script: &str) -> std::io::Result<Child> {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("read x; {script}")]);
        shell.stdin(Stdio::piped()).spawn()
    }

    fn next(events: &mpsc::Receiver<Event>) -> Option<(usize, ExitStatus, Instant)> {
        match events.recv_timeout(Duration::from_secs(60)) {
            Ok(Event::Exited { index, status, at }) => Some((index, status, at)),
            _ => None,
        }
    }

    #[test]
    fn ends_are_seen_in_their_order_even_if_nobody_looked() -> TestResult {
        let mut children = [child("exit 3")?, child("kill -9 $$")?, child("exit 0")?];
        let mut watch = ExitWatch::new()?;
        for child in &children {
            watch.add(Pid::from_child(child))?;
        }
        let order = [1, 2, 0];
        for index in order {
            children[index].stdin = None;
            // Waits for the end and leaves the zombie.
            end_of(Pid::from_child(&children[index]));
        }
        let (sender, events) = mpsc::channel();
        watch.start(sender)?;
        let mut last = None;
        for expected in order {
            let (index, status, at) = next(&events).ok_or("no event")?;
            assert_eq!(index, expected);
            assert_eq!(
                status,
                [
                    ExitStatus::Code(3),
                    ExitStatus::Signal(9),
                    ExitStatus::Code(0)
                ][index]
            );
            assert!(last < Some(at));
            last = Some(at);
        }
        for mut child in children {
            child.wait()?;
        }
        Ok(())
    }

    #[test]
    fn without_descriptors_for_processes() -> TestResult {
        let mut children = [child("exit 3")?, child("kill -9 $$")?];
        let mut watch = ExitWatch::new()?;
        for child in &children {
            let pid = Pid::from_child(child);
            watch.watched.push(Watched {
                pid,
                descriptor: None,
            });
        }
        let (sender, events) = mpsc::channel();
        watch.start(sender)?;
        for (index, status) in [(1, ExitStatus::Signal(9)), (0, ExitStatus::Code(3))] {
            children[index].stdin = None;
            let (ended, how, _) = next(&events).ok_or("no event")?;
            assert_eq!((ended, how), (index, status));
            children[index].wait()?;
        }
        Ok(())
    }
}
