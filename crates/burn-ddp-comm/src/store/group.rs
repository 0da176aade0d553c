//! One group as the store sees it: its members, its values, and what its ranks
//! wait for.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

use super::protocol::{
    Answer, Hello, MAX_KEY_BYTES, MAX_VALUE_BYTES, MemberStatus, PresenceStatus,
};
use crate::flight_recorder::Activity;

/// Most bytes of keys and values that a group may keep.
const MAX_STORED_BYTES: usize = 256 << 20;

/// How long last words are taken to be the cause of an end.
const LAST_WORDS_COUNT_FOR: Duration = Duration::from_secs(5);

/// An answer on its way: the rank and its request's id.
pub(super) type Reply = (usize, u64, Answer);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Group {
    pub(super) members: Vec<Member>,
    values: HashMap<String, ByteBuf>,
    counters: HashMap<String, i64>,
    stored_bytes: usize,
    waits: Vec<Wait>,
    gathers: HashMap<String, Vec<Option<Contribution>>>,
}

/// One rank of a group.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    pub(super) presence: Presence,
    /// "process 17 on node3"; empty before it has come.
    pub(super) process: String,
    last_words: Option<(Instant, String)>,
    /// How long it may be silent.
    silence_limit: Duration,
    /// What it said it was doing.
    pub(super) activity: Option<Activity>,
}

/// Where a rank is.
#[derive(Clone, Debug, Default)]
pub(super) enum Presence {
    #[default]
    Absent,
    /// Here, and last heard of then.
    Present(Instant),
    /// It has left in good order.
    Left,
    /// It has died, with this message.
    Failed(String),
}

/// A rank that waits for a key.
#[derive(Debug)]
struct Wait {
    rank: usize,
    id: u64,
    key: String,
}

#[derive(Debug)]
struct Contribution {
    id: u64,
    value: ByteBuf,
}

impl Group {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            members: vec![Member::default(); world_size],
            values: HashMap::new(),
            counters: HashMap::new(),
            stored_bytes: 0,
            waits: Vec::new(),
            gathers: HashMap::new(),
        }
    }

    /// The ranks that are here.
    pub(super) fn present(&self) -> impl Iterator<Item = usize> {
        let present = |(_, member): &(usize, &Member)| member.is_present();
        self.members.iter().enumerate().filter(present).map(|m| m.0)
    }

    pub(super) fn set(&mut self, key: String, value: ByteBuf) -> (Answer, Vec<Reply>) {
        let added = key.len() + value.len();
        if let Err(invalid) = check(&key, &value, self.stored_bytes + added) {
            return (invalid, Vec::new());
        }
        let (waiting, others) = std::mem::take(&mut self.waits)
            .into_iter()
            .partition(|wait: &Wait| wait.key == key);
        self.waits = others;
        let replies = waiting
            .into_iter()
            .map(|wait: Wait| (wait.rank, wait.id, Answer::Value(value.clone())))
            .collect();
        self.stored_bytes += added;
        let key_bytes = key.len();
        if let Some(old) = self.values.insert(key, value) {
            self.stored_bytes -= key_bytes + old.len();
        }
        (Answer::Done, replies)
    }

    /// The key's value, or `None` if the rank has to wait for it.
    pub(super) fn get(&mut self, rank: usize, id: u64, key: String) -> Option<Answer> {
        if let Some(value) = self.values.get(&key) {
            return Some(Answer::Value(value.clone()));
        }
        if let Err(invalid) = check(&key, &[], self.stored_bytes) {
            return Some(invalid);
        }
        self.waits.push(Wait { rank, id, key });
        None
    }

    pub(super) fn add(&mut self, key: String, amount: i64) -> Answer {
        let added = match self.counters.contains_key(&key) {
            true => 0,
            false => key.len() + size_of::<i64>(),
        };
        if let Err(invalid) = check(&key, &[], self.stored_bytes + added) {
            return invalid;
        }
        self.stored_bytes += added;
        let sum = self.counters.entry(key).or_default();
        *sum = sum.wrapping_add(amount);
        Answer::Sum(*sum)
    }

    /// Takes `rank`'s part in gathering `key`. Answers, to everyone, when it is
    /// the last, or when a rank is missing that has left.
    pub(super) fn gather(
        &mut self,
        rank: usize,
        id: u64,
        key: String,
        value: ByteBuf,
    ) -> Vec<Reply> {
        let added = key.len() + value.len();
        if let Err(invalid) = check(&key, &value, self.stored_bytes + added) {
            return vec![(rank, id, invalid)];
        }
        let world_size = self.members.len();
        let gather = self
            .gathers
            .entry(key.clone())
            .or_insert_with(|| (0..world_size).map(|_| None).collect());
        if gather[rank].is_some() {
            let twice = format!("rank {rank} is gathering {key:?} already");
            return vec![(rank, id, Answer::Invalid(twice))];
        }
        gather[rank] = Some(Contribution { id, value });
        self.stored_bytes += added;
        self.settle(&key)
    }

    /// Ends the gathering of `key` if it is complete or can't become so.
    fn settle(&mut self, key: &str) -> Vec<Reply> {
        let Some(gather) = self.gathers.get(key) else {
            return Vec::new();
        };
        if gather.iter().all(Option::is_some) {
            let values = gather.iter().flatten().map(|c| c.value.clone());
            let answer = Answer::Values(values.collect());
            return self.end_gather(key, &answer);
        }
        let departed: Vec<usize> = (0..gather.len())
            .filter(|&rank| gather[rank].is_none())
            .filter(|&rank| matches!(self.members[rank].presence, Presence::Left))
            .collect();
        match departed.is_empty() {
            true => Vec::new(),
            false => self.end_gather(key, &Answer::Departed(departed)),
        }
    }

    /// Ends the gathering in which `rank` takes part with its request `id`, if
    /// that has not been answered: everyone is told who is missing.
    pub(super) fn give_up(&mut self, rank: usize, id: u64, now: Instant) -> Vec<Reply> {
        let own = |gather: &[Option<Contribution>]| gather[rank].as_ref().map(|c| c.id);
        let mut gathers = self.gathers.iter();
        let Some((key, gather)) = gathers.find(|(_, gather)| own(gather) == Some(id)) else {
            return Vec::new();
        };
        let (key, answer) = (key.clone(), Answer::Members(self.status(gather, now)));
        self.end_gather(&key, &answer)
    }

    /// Ends the gathering of `key` with `answer` to everyone who takes part.
    fn end_gather(&mut self, key: &str, answer: &Answer) -> Vec<Reply> {
        let gather = self.gathers.remove(key).unwrap_or_default();
        let mut replies = Vec::new();
        for (rank, contribution) in gather.into_iter().enumerate() {
            if let Some(contribution) = contribution {
                self.stored_bytes -= key.len() + contribution.value.len();
                replies.push((rank, contribution.id, answer.clone()));
            }
        }
        replies
    }

    /// Forgets that `rank` waits for a key with its request `id`.
    pub(super) fn cancel(&mut self, rank: usize, id: u64) {
        self.waits.retain(|wait| wait.rank != rank || wait.id != id);
    }

    /// How every rank stands.
    pub(super) fn standing(&self, now: Instant) -> Vec<MemberStatus> {
        let nothing: Vec<Option<Contribution>> = self.members.iter().map(|_| None).collect();
        self.status(&nothing, now)
    }

    /// How every rank stands, with regard to `gather`.
    fn status(&self, gather: &[Option<Contribution>], now: Instant) -> Vec<MemberStatus> {
        let status = |(member, contribution): (&Member, &Option<Contribution>)| MemberStatus {
            presence: match member.presence {
                Presence::Absent => PresenceStatus::Absent,
                Presence::Present(seen) => PresenceStatus::Present {
                    silent_ms: now.saturating_duration_since(seen).as_millis() as u64,
                },
                Presence::Left | Presence::Failed(_) => PresenceStatus::Gone,
            },
            process: Some(member.process.clone()).filter(|process| !process.is_empty()),
            gathered: contribution.is_some(),
            activity: member.activity.clone(),
        };
        self.members.iter().zip(gather).map(status).collect()
    }

    /// Records that `rank` is no longer here, and answers those who gather with
    /// it if it has left for good.
    pub(super) fn depart(&mut self, rank: usize, presence: Presence) -> Vec<Reply> {
        self.members[rank].presence = presence;
        self.waits.retain(|wait| wait.rank != rank);
        let keys: Vec<String> = self.gathers.keys().cloned().collect();
        let replies: Vec<Reply> = keys.iter().flat_map(|key| self.settle(key)).collect();
        replies.into_iter().filter(|r| r.0 != rank).collect()
    }
}

/// Whether a key and a value may be stored.
fn check(key: &str, value: &[u8], stored_bytes: usize) -> Result<(), Answer> {
    let refuse = |why: String| Err(Answer::Invalid(why));
    if key.len() > MAX_KEY_BYTES {
        return refuse(format!("a key may have {MAX_KEY_BYTES} bytes"));
    }
    if value.len() > MAX_VALUE_BYTES {
        return refuse(format!(
            "the value of {key:?} may have {MAX_VALUE_BYTES} bytes"
        ));
    }
    if stored_bytes > MAX_STORED_BYTES {
        return refuse(format!(
            "the store holds {MAX_STORED_BYTES} bytes and is full"
        ));
    }
    Ok(())
}

impl Member {
    /// The member that said `hello`.
    pub(super) fn new(hello: &Hello, now: Instant) -> Self {
        Self {
            presence: Presence::Present(now),
            process: describe_process(hello),
            last_words: None,
            silence_limit: Duration::from_millis(hello.silence_ms),
            activity: None,
        }
    }

    pub(super) fn is_present(&self) -> bool {
        matches!(self.presence, Presence::Present(_))
    }

    /// Records that it was heard of.
    pub(super) fn seen(&mut self, now: Instant) {
        if let Presence::Present(seen) = &mut self.presence {
            *seen = now;
        }
    }

    /// Counts `time` as none: the store itself did not run.
    pub(super) fn forgive(&mut self, time: Duration, now: Instant) {
        if let Presence::Present(seen) = &mut self.presence {
            *seen = now.min(*seen + time);
        }
    }

    /// What to tell the others if it has been silent for too long.
    pub(super) fn silence(&self, rank: usize, now: Instant) -> Option<String> {
        let Presence::Present(seen) = self.presence else {
            return None;
        };
        let silent = now.saturating_duration_since(seen);
        if silent < self.silence_limit {
            return None;
        }
        let last = match &self.activity {
            Some(activity) => format!("; it was last seen {}", activity.text),
            None => String::new(),
        };
        Some(format!(
            "rank {rank} has been silent for {:.1} s (deadline): {} is stopped, or its machine is \
             overloaded or can't be reached{last}",
            silent.as_secs_f64(),
            self.process
        ))
    }

    pub(super) fn say(&mut self, last_words: String, now: Instant) {
        self.last_words = Some((now, last_words));
    }

    /// What to tell the others after its connection ended like `end` says.
    pub(super) fn epitaph(&self, rank: usize, end: &str, now: Instant) -> String {
        let died = format!("rank {rank} died: {} {end}", self.process);
        match &self.last_words {
            Some((said, words)) if now.saturating_duration_since(*said) < LAST_WORDS_COUNT_FOR => {
                format!("rank {rank} {words}")
            }
            Some((said, words)) => {
                let ago = now.saturating_duration_since(*said).as_secs();
                format!("{died}; {ago} s before, it {words}")
            }
            None => died,
        }
    }
}

/// "process 17 on node3".
pub(super) fn describe_process(hello: &Hello) -> String {
    format!("process {} on {}", hello.pid, hello.host)
}
