//! The last operations of a rank, always recorded: what it is doing, and what it
//! did before it failed.

mod activity;
mod record;

use std::panic::Location;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

pub(crate) use activity::Activity;
#[cfg(test)]
pub(crate) use activity::Waiting;
pub use record::{FlightEntry, FlightRecord, FlightState};

use crate::operation::Operation;
use crate::scope::Scope;

/// How many operations are kept.
const CAPACITY: usize = 1024;

/// A ring of operations, shared by all groups that a rank is in. Recording takes
/// a lock that nobody holds for long, and no memory once the ring is full.
pub(crate) struct FlightRecorder {
    rank: usize,
    world_size: usize,
    started: Instant,
    started_at: SystemTime,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// The number of the next operation; the first is 0.
    next: u64,
    slots: Vec<Slot>,
    waits: Vec<Wait>,
}

#[derive(Clone)]
struct Slot {
    number: u64,
    scope: Arc<Scope>,
    /// The rank in that group.
    rank: usize,
    location: &'static Location<'static>,
    /// `None` until it begins.
    operation: Option<Operation>,
    enqueued: Instant,
    started: Option<Instant>,
    ended: Option<Instant>,
    failed: bool,
}

/// An operation in which nothing moves.
struct Wait {
    number: u64,
    /// The awaited ranks, by their number in the job.
    ranks: Vec<usize>,
    since: Instant,
}

impl FlightRecorder {
    /// The recorder of rank `rank` of a job of `world_size`.
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            world_size,
            started: Instant::now(),
            started_at: SystemTime::now(),
            ring: Mutex::default(),
        }
    }

    /// Records that an operation was called at `location`; returns its number.
    pub(crate) fn enqueue(
        &self,
        scope: &Arc<Scope>,
        rank: usize,
        location: &'static Location<'static>,
    ) -> u64 {
        let mut ring = self.lock();
        let number = ring.next;
        ring.next += 1;
        let slot = Slot {
            number,
            scope: Arc::clone(scope),
            rank,
            location,
            operation: None,
            enqueued: Instant::now(),
            started: None,
            ended: None,
            failed: false,
        };
        let index = number as usize % CAPACITY;
        match ring.slots.get_mut(index) {
            Some(old) => *old = slot,
            None => ring.slots.push(slot),
        }
        number
    }

    /// Records that operation `number` begins.
    pub(crate) fn begin(&self, number: u64, operation: &Operation) {
        if let Some(slot) = self.lock().slot(number) {
            slot.operation = Some(operation.clone());
            slot.started = Some(Instant::now());
        }
    }

    /// Records that operation `number` has ended.
    pub(crate) fn end(&self, number: u64, failed: bool) {
        let mut ring = self.lock();
        ring.waits.retain(|wait| wait.number != number);
        if let Some(slot) = ring.slot(number) {
            slot.ended = Some(Instant::now());
            slot.failed = failed;
        }
    }

    /// Records that nothing has moved in operation `number` since `since`, for want
    /// of these ranks of the job.
    pub(crate) fn waits(&self, number: u64, ranks: Vec<usize>, since: Instant) {
        let mut ring = self.lock();
        ring.waits.retain(|wait| wait.number != number);
        ring.waits.push(Wait {
            number,
            ranks,
            since,
        });
    }

    /// Records that something has moved in operation `number` after a wait.
    pub(crate) fn moved(&self, number: u64) {
        self.lock().waits.retain(|wait| wait.number != number);
    }

    /// What this rank is doing.
    pub(crate) fn activity(&self) -> Activity {
        let (ring, now) = (self.lock(), Instant::now());
        let running = ring
            .slots
            .iter()
            .filter(|slot| slot.started.is_some() && slot.ended.is_none())
            .max_by_key(|slot| slot.number);
        if let Some(slot) = running {
            let wait = ring.waits.iter().find(|wait| wait.number == slot.number);
            let still = wait.map_or(Duration::ZERO, |wait| now - wait.since);
            return Activity::in_operation(
                &slot.describe(),
                wait.map(|wait| wait.ranks.clone()).unwrap_or_default(),
                still,
            );
        }
        let ended = |slot: &&Slot| slot.ended.is_some() && slot.started.is_some();
        let last = ring.slots.iter().filter(ended).max_by_key(|s| s.ended);
        Activity::outside(last.map(|slot| {
            let ago = slot.ended.map_or(Duration::ZERO, |ended| now - ended);
            (slot.describe(), ago)
        }))
    }

    /// All that is known, with the reason for telling it.
    pub(crate) fn record(&self, reason: &str) -> FlightRecord {
        let slots = self.lock().in_order();
        let time = |at: Instant| {
            let since_start = at.saturating_duration_since(self.started);
            record::unix_us(self.started_at + since_start)
        };
        let mut record = FlightRecord::new(self.rank, self.world_size, reason);
        for slot in &slots {
            record.add(slot, time);
        }
        record
    }

    /// Writes the [record](Self::record) to `rank-<rank>.flight.json` in
    /// `directory`.
    pub(crate) fn write(&self, directory: &Path, reason: &str) -> std::io::Result<()> {
        self.record(reason).write(directory)
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(number as usize % CAPACITY)?;
        (slot.number == number).then_some(slot)
    }

    fn in_order(&self) -> Vec<Slot> {
        let mut slots = self.slots.clone();
        slots.sort_by_key(|slot| slot.number);
        slots
    }
}

impl Slot {
    /// `all_reduce #12 (f32 sum, 8), called at src/main.rs:7:5`.
    fn describe(&self) -> String {
        let operation = match &self.operation {
            Some(operation) => {
                let text = operation.describe(&self.scope, self.rank);
                self.scope.located(&text)
            }
            None => "an operation".to_owned(),
        };
        format!("{operation}, called at {}", self.location)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
