//! The thread that listens to the store for as long as its rank is in the
//! group: it passes answers on, and records what became of the other ranks.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::frame::FrameBuffer;
use super::protocol::{Event, MAX_EVENT_BYTES};
use super::session::{Session, lock};
use crate::Error;
use crate::socket::{is_transient, poll_until};

/// The thread's name; the kernel shows 15 characters.
pub(super) const THREAD_NAME: &str = "ddp presence";

/// How often a rank shows that it is running.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// When it shows that for the first time: soon, so that little is unknown of a rank
/// that is stopped early.
const FIRST_HEARTBEAT: Duration = Duration::from_millis(250);

/// Starts the thread; `received` is what has arrived already.
pub(super) fn start(session: Arc<Session>, received: FrameBuffer) -> io::Result<JoinHandle<()>> {
    thread::Builder::new()
        .name(THREAD_NAME.to_owned())
        .spawn(move || {
            let mut presence = Presence {
                session,
                received,
                goodbye: false,
                host_last_words: None,
            };
            let end = presence.listen();
            presence.record_end(&end);
        })
}

/// How a connection ends that nobody meant to end.
enum End {
    /// For this reason.
    Broken(String),
    /// The store has said nothing for so long.
    Silent(Duration),
}

struct Presence {
    session: Arc<Session>,
    received: FrameBuffer,
    /// Whether the store has ended in good order.
    goodbye: bool,
    /// Last words of the rank that hosts the store: nobody tells of its death.
    host_last_words: Option<String>,
}

impl Presence {
    /// Listens to the end of the connection, and returns how it ended.
    fn listen(&mut self) -> End {
        let mut buffer = vec![0; 64 << 10];
        let mut heartbeat = Instant::now() + FIRST_HEARTBEAT;
        let mut heard = Instant::now();
        let mut last_pass = heard;
        loop {
            if let Err(error) = self.take_events() {
                return End::Broken(error);
            }
            let mut fds = [PollFd::from_borrowed_fd(
                self.session.stream.as_fd(),
                PollFlags::IN,
            )];
            if let Err(error) = poll_until(&mut fds, Some(heartbeat)) {
                return End::Broken(error.to_string());
            }
            let now = Instant::now();
            // Time in which this process was stopped counts as none.
            if now - last_pass > 2 * HEARTBEAT_INTERVAL {
                heard = now.min(heard + (now - last_pass));
            }
            last_pass = now;
            if now >= heartbeat {
                self.session.send_heartbeat();
                heartbeat = now + HEARTBEAT_INTERVAL;
            }
            match (&self.session.stream).read(&mut buffer) {
                Ok(0) => return End::Broken("it closed the connection".to_owned()),
                Ok(n) => {
                    self.received.extend(&buffer[..n]);
                    heard = now;
                }
                Err(error) if is_transient(&error) && now - heard >= self.session.silence => {
                    return End::Silent(now - heard);
                }
                Err(error) if is_transient(&error) => {}
                Err(error) => return End::Broken(error.to_string()),
            }
        }
    }

    fn take_events(&mut self) -> Result<(), String> {
        loop {
            let message = self
                .received
                .next(MAX_EVENT_BYTES)
                .map_err(|long| format!("it sent a message of {} bytes", long.0))?;
            let Some(message) = message else {
                return Ok(());
            };
            let event = rmp_serde::from_slice(message)
                .map_err(|error| format!("it sent a damaged message ({error})"))?;
            self.take(event)?;
        }
    }

    fn take(&mut self, event: Event) -> Result<(), String> {
        let session = &self.session;
        match event {
            Event::Answer { id, answer } => {
                // For last words nobody waits in the usual way.
                session.last_words_heard.fetch_max(id, Ordering::AcqRel);
                if let Some(slot) = lock(&session.calls).answers.get_mut(&id) {
                    *slot = Some(answer);
                }
                session.answered.notify_all();
            }
            Event::Failed { rank, message } => {
                session.fault.set(Error::peer([rank], message));
            }
            Event::Poisoned { rank, error } => {
                session.fault.set(error.into_error(rank));
            }
            Event::Left { rank } => session.record_left(rank),
            Event::LastWords { rank, text } => {
                if Some(rank) == session.host {
                    self.host_last_words = Some(text);
                }
            }
            Event::Heartbeat => {}
            Event::Goodbye => {
                self.goodbye = true;
                if let Some(host) = session.host {
                    session.record_left(host);
                }
            }
            Event::Welcome { .. } | Event::Refused { .. } => {
                return Err("it sent an unexpected message".to_owned());
            }
        }
        Ok(())
    }

    fn record_end(&self, end: &End) {
        let session = &self.session;
        if session.leaving.load(Ordering::SeqCst) {
            session.end(Error::usage("this rank has left the group"));
        } else if self.goodbye {
            let store = session.store();
            session.end(match session.host {
                Some(host) => Error::peer(
                    [host],
                    format!("rank {host} left the group, and with it the {store} is gone"),
                ),
                None => Error::environment(format!("the {store} has ended")),
            });
        } else {
            let error = self.lost(end);
            let first = session.end(error);
            session.fault.set(first);
        }
    }

    /// The store is gone without a goodbye.
    fn lost(&self, end: &End) -> Error {
        let store = self.session.store();
        let end = match end {
            End::Broken(end) => end,
            End::Silent(time) => {
                let text = format!(
                    "the {store} has been silent for {:.1} s (deadline): its process is stopped, \
                     or its machine is overloaded or can't be reached",
                    time.as_secs_f64()
                );
                return match self.session.host {
                    Some(host) => Error::peer([host], text),
                    None => Error::environment(text),
                };
            }
        };
        match (self.session.host, &self.host_last_words) {
            (Some(host), Some(words)) => Error::peer([host], format!("rank {host} {words}")),
            (Some(host), None) => Error::peer(
                [host],
                format!(
                    "rank {host} died, and with it the {store} is gone ({end}): it was killed, \
                     crashed, or exited without dropping its ProcessGroup"
                ),
            ),
            (None, _) => Error::environment(format!(
                "the {store} is gone ({end}): the launcher has ended or was killed"
            )),
        }
    }
}
