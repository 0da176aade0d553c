//! A flight recorder's contents, as they are written to a file.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::Slot;
use crate::host;
use crate::operation::Operation;

/// One rank's last operations, oldest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The rank in the job.
    pub rank: usize,
    /// Ranks of the job.
    pub world_size: usize,
    /// Its process.
    pub pid: u32,
    /// Name of its machine.
    pub host: String,
    /// Why this was written.
    pub reason: String,
    /// When, in microseconds since 1970.
    pub written_at_us: u64,
    /// The numbers in the job of each group's ranks, by the group's name.
    pub groups: BTreeMap<String, Vec<usize>>,
    /// The operations.
    pub entries: Vec<FlightEntry>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightEntry {
    /// Counts this rank's calls, in all groups; the first is 0.
    pub number: u64,
    /// The group's name: `world`, or `split 1, color 0`.
    pub group: String,
    /// What was called, with its arguments: `all_reduce #12 (f32 sum, 8)`. `None`
    /// until it begins.
    pub operation: Option<String>,
    /// The number of a collective in its group, which is the same on every rank;
    /// `None` for messages between two ranks.
    pub sequence: Option<u64>,
    /// The other ranks of point-to-point messages, by their number in the job.
    pub peers: Vec<usize>,
    /// How it stands.
    pub state: FlightState,
    /// File, line and column of the call.
    pub called_at: String,
    /// When it was called, in microseconds since 1970.
    pub enqueued_at_us: u64,
    /// When it began.
    pub started_at_us: Option<u64>,
    /// When it ended.
    pub ended_at_us: Option<u64>,
}

/// How an operation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlightState {
    /// It waits for earlier ones.
    Queued,
    /// It has begun.
    Started,
    /// It has ended well.
    Completed,
    /// It has ended with an error.
    Failed,
}

impl FlightRecord {
    pub(super) fn new(rank: usize, world_size: usize, reason: &str) -> Self {
        Self {
            rank,
            world_size,
            pid: std::process::id(),
            host: host::name(),
            reason: reason.to_owned(),
            written_at_us: unix_us(SystemTime::now()),
            groups: BTreeMap::new(),
            entries: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, slot: &Slot, time: impl Fn(Instant) -> u64) {
        let scope = &slot.scope;
        if !self.groups.contains_key(&scope.name) {
            let ranks = scope.job_ranks.clone();
            self.groups.insert(scope.name.clone(), ranks);
        }
        let (sequence, peers) = match &slot.operation {
            Some(Operation::Collective(_, sequence)) => (Some(*sequence), Vec::new()),
            Some(Operation::Pairs(pairs)) => {
                let peers: Vec<usize> = pairs.iter().map(|pair| pair.peer).collect();
                (None, scope.in_job(&peers))
            }
            None => (None, Vec::new()),
        };
        self.entries.push(FlightEntry {
            number: slot.number,
            group: scope.name.clone(),
            operation: slot
                .operation
                .as_ref()
                .map(|operation| operation.describe(scope, slot.rank)),
            sequence,
            peers,
            state: match (slot.started, slot.ended) {
                (_, Some(_)) if slot.failed => FlightState::Failed,
                (_, Some(_)) => FlightState::Completed,
                (Some(_), None) => FlightState::Started,
                (None, None) => FlightState::Queued,
            },
            called_at: slot.location.to_string(),
            enqueued_at_us: time(slot.enqueued),
            started_at_us: slot.started.map(&time),
            ended_at_us: slot.ended.map(&time),
        });
    }

    /// The name of rank `rank`'s file.
    pub fn file_name(rank: usize) -> String {
        format!("rank-{rank}.flight.json")
    }

    /// Writes it to its file in `directory`, whole or not at all.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        std::fs::create_dir_all(directory)?;
        let name = Self::file_name(self.rank);
        let aside = directory.join(format!(".{name}.{}", self.pid));
        let mut file = std::fs::File::create(&aside)?;
        serde_json::to_writer(&mut file, self)?;
        file.flush()?;
        std::fs::rename(&aside, directory.join(name))
    }

    /// Reads a rank's file.
    ///
    /// # Errors
    ///
    /// It can't be read, or is no flight record.
    pub fn read(path: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }
}

pub(super) fn unix_us(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as u64)
}
