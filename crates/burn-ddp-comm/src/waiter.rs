//! How a rank waits for its peers: awake at first, since falling asleep and
//! being woken takes longer than most waits last, and asleep when it lasts.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use crate::collective::Peers;
use crate::fault::{Fault, WakerId};
use crate::peer::{Peer, Stop};
use crate::transport::shared_memory::Mapping;
use crate::{Error, Result};

/// Longest sleep before looking around.
const SLICE: Duration = Duration::from_millis(50);
/// Longest sleep where peers are reached both ways: a sleep on sockets is not
/// ended by a doorbell.
const MIXED_SLICE: Duration = Duration::from_millis(1);

/// Passes without a look at the clock.
const PASSES_PER_LOOK: u32 = 32;

/// How long to stay awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience {
    /// Keeping the core.
    spin: Duration,
    /// Letting others have the core in between.
    yielding: Duration,
}

/// The thread has nothing else to do, and there is a core for every rank.
const FOREGROUND: Patience = Patience {
    spin: Duration::from_micros(200),
    yielding: Duration::from_micros(200),
};
/// Other ranks need this core.
const CROWDED: Patience = Patience {
    spin: Duration::ZERO,
    yielding: Duration::from_micros(200),
};
/// A thread that computes needs this core.
const BACKGROUND: Patience = Patience {
    spin: Duration::from_micros(10),
    yielding: Duration::ZERO,
};

/// Between two looks at the clock there are no more than a sleep and a question to
/// the store: if more time has passed, this process was stopped meanwhile.
const LONGEST_GAP: Duration = Duration::from_millis(1500);

/// After how long without progress a wait is looked at first.
const FIRST_LOOK: Duration = Duration::from_millis(250);

/// The state of one rank's waiting.
pub(crate) struct Waiter {
    fault: Arc<Fault>,
    /// What the fault wakes this waiter by.
    waker: WakerId,
    /// This rank's segment, whose doorbell its local peers ring.
    segment: Option<Arc<Mapping>>,
    /// Ends a sleep on sockets when the group fails.
    wake: Option<Arc<OwnedFd>>,
    crowded: bool,
    background: bool,
    /// Passes since anything moved.
    idle_passes: u32,
    idle_since: Option<Instant>,
    /// When the clock was last looked at while nothing moved.
    last_look: Option<Instant>,
    /// After how long without progress the wait is looked at next.
    look_at: Duration,
    /// Set while the doorbell is armed: the number to sleep with.
    armed: Option<u32>,
    /// Awaited ranks that had left before the last pass began.
    left: Vec<usize>,
    /// Whether the group had failed before the last pass began.
    failed: bool,
}

impl Waiter {
    /// A waiter that `fault` wakes. `segment`: this rank's, if it has peers in shared memory. `sockets`: whether it has peers
    /// over TCP. `crowded`: whether the host has more ranks than cores.
    ///
    /// # Errors
    ///
    /// Environment: no file descriptor to be had.
    pub(crate) fn new(
        fault: Arc<Fault>,
        segment: Option<Arc<Mapping>>,
        sockets: bool,
        crowded: bool,
    ) -> Result<Self> {
        let wake = sockets
            .then(|| rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK))
            .transpose()
            .map_err(|error| Error::environment_from("could not create an eventfd", error))?
            .map(Arc::new);
        let (bell, event) = (segment.clone(), wake.clone());
        let waker = fault.on_set(move || {
            if let Some(segment) = &bell {
                segment.doorbell().ring_always();
            }
            if let Some(event) = &event {
                // It fails only when the counter is full, and readable then.
                let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
            }
        });
        Ok(Self {
            fault,
            waker,
            segment,
            wake,
            crowded,
            background: false,
            idle_passes: 0,
            idle_since: None,
            last_look: None,
            look_at: FIRST_LOOK,
            armed: None,
            left: Vec::new(),
            failed: false,
        })
    }

    /// Says whether this thread works beside one that computes.
    pub(crate) fn set_background(&mut self, background: bool) {
        self.background = background;
    }

    /// Ends the waiting: something moved. Whether the wait had been looked at.
    pub(crate) fn moved(&mut self) -> bool {
        let looked = self.look_at != FIRST_LOOK;
        self.look_at = FIRST_LOOK;
        self.idle_passes = 0;
        self.idle_since = None;
        self.last_look = None;
        self.left.clear();
        self.failed = false;
        if self.armed.take().is_some()
            && let Some(segment) = &self.segment
        {
            segment.doorbell().disarm();
        }
        looked
    }

    /// Says after how long without progress, in all, to look at the wait again.
    pub(crate) fn look_again(&mut self, at: Duration) {
        self.look_at = at;
    }

    /// Waits a little after a pass in which nothing moved. `has_left` says
    /// whether a peer has left the group. Returns for how long nothing has moved,
    /// when that is to be looked at.
    ///
    /// # Errors
    ///
    /// The group failed, or an awaited rank has left.
    pub(crate) fn idle(
        &mut self,
        peers: &Peers,
        has_left: impl Fn(&Peer) -> bool,
    ) -> Result<Option<Duration>, Stop> {
        // One more pass follows: what a rank sent before it died completes a
        // collective that it had completed.
        if self.fault.is_set() {
            return match std::mem::replace(&mut self.failed, true) {
                true => Err(Stop::Fault),
                false => Ok(None),
            };
        }
        let patience = self.patience();
        self.idle_passes += 1;
        if !patience.spin.is_zero() && !self.idle_passes.is_multiple_of(PASSES_PER_LOOK) {
            std::hint::spin_loop();
            return Ok(None);
        }
        let waited = self.waited();
        if waited < patience.spin {
            return Ok(None);
        }
        if waited < patience.spin + patience.yielding {
            std::thread::yield_now();
            return Ok(None);
        }
        // One more pass follows an arming, and so does one that finds that a
        // rank has left: what it sent before must not be overlooked.
        if let Some(armed) = self.armed {
            if !self.left.is_empty() {
                return Err(Stop::Left(std::mem::take(&mut self.left)));
            }
            if waited >= self.look_at {
                return Ok(Some(waited));
            }
            self.sleep(peers, armed, self.look_at - waited)?;
            // Every pass to the next sleep is a look around.
            self.idle_passes = PASSES_PER_LOOK - 1;
        }
        self.armed = Some(match &self.segment {
            Some(segment) => segment.doorbell().arm(),
            None => 0,
        });
        self.left.extend(
            peers
                .iter()
                .flatten()
                .filter(|peer| Self::can_miss_end(peer) && has_left(peer))
                .map(|peer| peer.rank),
        );
        Ok(None)
    }

    /// For how long nothing has moved, but for the time in which this process was
    /// stopped.
    fn waited(&mut self) -> Duration {
        let now = Instant::now();
        let since = self.idle_since.get_or_insert(now);
        let gap = now - self.last_look.replace(now).unwrap_or(now);
        if gap > LONGEST_GAP {
            *since += gap;
        }
        now - *since
    }

    /// Whether only the store says that this peer, which is needed, is gone. A
    /// connection ends by itself, behind its last bytes.
    fn can_miss_end(peer: &Peer) -> bool {
        !peer.is_done() && peer.link.starved().is_none()
    }

    fn patience(&self) -> Patience {
        if self.background {
            BACKGROUND
        } else if self.crowded {
            CROWDED
        } else {
            FOREGROUND
        }
    }

    fn sleep(&self, peers: &Peers, armed: u32, left: Duration) -> Result<(), Stop> {
        let Some(wake) = &self.wake else {
            match &self.segment {
                Some(segment) => segment.doorbell().sleep(armed, left.min(SLICE)),
                None => std::thread::sleep(left.min(MIXED_SLICE)),
            }
            return Ok(());
        };
        let limit = if self.segment.is_some() {
            MIXED_SLICE
        } else {
            SLICE
        };
        let limit = left.min(limit);
        let mut files = vec![PollFd::new(wake, PollFlags::IN)];
        for peer in peers.iter().flatten() {
            if let Some((file, events)) = peer.link.starved()
                && !events.is_empty()
            {
                files.push(PollFd::from_borrowed_fd(file, events));
            }
        }
        let limit = Timespec {
            tv_sec: limit.as_secs() as _,
            tv_nsec: limit.subsec_nanos() as _,
        };
        match rustix::event::poll(&mut files, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Stop::Failed(Error::environment_from(
                "could not wait for the other ranks' sockets",
                error,
            ))),
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.fault.forget(self.waker);
        self.moved();
    }
}
