//! How a process that has something for another wakes it, if it sleeps.
//!
//! The sleeper says that it will sleep and looks once more; the waker publishes
//! and then looks whether the other sleeps. With a sequentially consistent fence
//! between the two steps on either side, at least one of them sees the other.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Lies in a process's own segment, where its peers can ring it.
#[repr(C, align(128))]
pub(crate) struct Doorbell {
    /// 1 while the process sleeps or is about to.
    sleeping: AtomicU32,
    /// Counts the rings; the futex that the process sleeps on.
    rings: AtomicU32,
}

impl Doorbell {
    /// One that nobody sleeps at.
    #[cfg(any(loom, test))]
    pub(crate) fn new() -> Self {
        Self {
            sleeping: AtomicU32::new(0),
            rings: AtomicU32::new(0),
        }
    }

    /// Says that this process is about to sleep. It has to look once more for
    /// work after this, and then may [`sleep`](Self::sleep) with the number
    /// returned.
    pub(crate) fn arm(&self) -> u32 {
        // The number first: a ring that takes the flag below back comes later
        // than it, and so keeps this process from sleeping without the flag.
        let rings = self.rings.load(Ordering::Acquire);
        self.sleeping.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        rings
    }

    /// Says that this process is awake.
    pub(crate) fn disarm(&self) {
        self.sleeping.store(0, Ordering::Relaxed);
    }

    /// To be called after something was published for this doorbell's process:
    /// counts a ring if it sleeps, and says whether it has to be woken.
    fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) == 0 {
            return false;
        }
        // Of several that ring at once, one makes the system call.
        let first = self.sleeping.swap(0, Ordering::Relaxed) != 0;
        if first {
            self.rings.fetch_add(1, Ordering::Release);
        }
        first
    }
}

#[cfg(not(loom))]
mod system {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use rustix::fs::Timespec;
    use rustix::thread::futex;

    use super::Doorbell;

    impl Doorbell {
        /// Wakes the process of this doorbell if it sleeps. To be called after
        /// something was published for it.
        pub(crate) fn ring(&self) {
            if self.must_wake() {
                self.wake();
            }
        }

        /// Wakes this process's own sleeper, or keeps it from sleeping.
        pub(crate) fn ring_always(&self) {
            self.rings.fetch_add(1, Ordering::SeqCst);
            self.wake();
        }

        fn wake(&self) {
            // It fails only for a bad address, which this is not.
            let _ = futex::wake(&self.rings, futex::Flags::empty(), u32::MAX >> 1);
        }

        /// Sleeps until rung since [`arm`](Self::arm) returned `armed`, or for
        /// `limit`. May return early.
        pub(crate) fn sleep(&self, armed: u32, limit: Duration) {
            let limit = Timespec {
                tv_sec: limit.as_secs() as _,
                tv_nsec: limit.subsec_nanos() as _,
            };
            // Rung already, timed out, or interrupted: the caller looks again in
            // any case.
            let _ = futex::wait(&self.rings, futex::Flags::empty(), armed, Some(&limit));
        }
    }
}

/// Models have no system to sleep in: they check what surrounds the sleep.
#[cfg(loom)]
mod system {
    impl super::Doorbell {
        pub(crate) fn ring(&self) {
            self.must_wake();
        }

        pub(crate) fn ring_always(&self) {
            self.rings.fetch_add(1, super::Ordering::SeqCst);
        }

        pub(crate) fn sleep(&self, _armed: u32, _limit: std::time::Duration) {}
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_ring_after_arming_prevents_the_sleep() {
        let bell = Doorbell::new();
        let start = Instant::now();
        let armed = bell.arm();
        bell.ring();
        bell.sleep(armed, LONG);
        let armed = bell.arm();
        bell.ring_always();
        bell.sleep(armed, LONG);
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn a_sleeper_is_woken() {
        let bell = std::sync::Arc::new(Doorbell::new());
        let start = Instant::now();
        let armed = bell.arm();
        let ringer = {
            let bell = std::sync::Arc::clone(&bell);
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                bell.ring();
            })
        };
        bell.sleep(armed, LONG);
        ringer.join().unwrap();
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn nobody_is_woken_who_is_awake() {
        let bell = Doorbell::new();
        assert!(!bell.must_wake());
        bell.arm();
        bell.disarm();
        assert!(!bell.must_wake());
        bell.arm();
        assert!(bell.must_wake());
        assert!(!bell.must_wake());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn no_ring_is_missed() {
        loom::model(|| {
            let shared = Arc::new((Doorbell::new(), AtomicU32::new(0)));
            let waker = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    shared.1.store(1, Ordering::Release);
                    shared.0.must_wake()
                })
            };
            let armed = shared.0.arm();
            let found = shared.1.load(Ordering::Acquire) == 1;
            waker.join().unwrap();
            // Would sleep with nobody left to wake it?
            let sleeps = !found && shared.0.rings.load(Ordering::Acquire) == armed;
            assert!(!sleeps);
        });
    }

    #[test]
    fn two_wakers_miss_nothing_either() {
        loom::model(|| {
            let shared = Arc::new((Doorbell::new(), [AtomicU32::new(0), AtomicU32::new(0)]));
            let wakers: Vec<_> = (0..2)
                .map(|i| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        shared.1[i].store(1, Ordering::Release);
                        shared.0.must_wake()
                    })
                })
                .collect();
            let armed = shared.0.arm();
            let found = shared
                .1
                .iter()
                .all(|word| word.load(Ordering::Acquire) == 1);
            for waker in wakers {
                waker.join().unwrap();
            }
            assert!(found || shared.0.rings.load(Ordering::Acquire) != armed);
        });
    }
}
