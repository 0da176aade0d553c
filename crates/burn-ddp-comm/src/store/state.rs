//! What the store knows, and how it answers: everything of the server but its
//! connections.
//!
//! A store serves one group at a time, but a rank that has left may come back
//! while others have still to leave, so that it holds as many groups as there
//! are with a rank in them.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use super::frame::{Frame, encode};
use super::group::{Group, Member, Presence, Reply, describe_process};
use super::protocol::{
    Answer, ErrorMessage, Event, Hello, MAX_TEXT_BYTES, Request, VERSION, truncated,
};

/// A connection, by a number that is never used again.
pub(super) type ConnectionId = u64;

/// The first failure of a rank.
#[derive(Clone, Debug)]
pub struct RankFailure {
    /// The rank that failed.
    pub rank: usize,
    /// How, with the message and location of a panic, where it told them.
    pub message: String,
    /// When the store noticed.
    pub at: Instant,
}

/// What the server has to do.
#[derive(Debug)]
pub(super) enum Output {
    Send(ConnectionId, Frame),
    /// Close the connection once everything is sent.
    Close(ConnectionId),
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct State {
    world_size: usize,
    /// The rank that hosts this store, if one does.
    host: Option<usize>,
    /// The newest has the largest number, and is where new ranks go.
    groups: BTreeMap<u64, Group>,
    seats: HashMap<ConnectionId, Seat>,
    outputs: Vec<Output>,
    first_failure: Option<RankFailure>,
}

/// Whose connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seat {
    group: u64,
    rank: usize,
}

impl State {
    pub(super) fn new(world_size: usize, host: Option<usize>) -> Self {
        Self {
            world_size,
            host,
            groups: BTreeMap::from([(0, Group::new(world_size))]),
            seats: HashMap::new(),
            outputs: Vec::new(),
            first_failure: None,
        }
    }

    /// What there is to do since the last call, in order.
    pub(super) fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    pub(super) fn first_failure(&self) -> Option<&RankFailure> {
        self.first_failure.as_ref()
    }

    /// Whether any rank is here.
    pub(super) fn has_members(&self) -> bool {
        !self.seats.is_empty()
    }

    /// Lets in the rank that said `hello`, or tells it why not.
    pub(super) fn join(&mut self, id: ConnectionId, hello: &[u8], now: Instant) {
        let admitted = match rmp_serde::from_slice::<Hello>(hello) {
            Ok(hello) => self.admit(id, &hello, now),
            Err(error) => Err(format!("its version of burn-ddp is another one ({error})")),
        };
        if let Err(message) = admitted {
            tracing::warn!("refused a rank: {message}");
            self.send(id, &Event::Refused { message });
            self.outputs.push(Output::Close(id));
        }
    }

    fn admit(&mut self, id: ConnectionId, hello: &Hello, now: Instant) -> Result<(), String> {
        self.check(hello)?;
        let rank = hello.rank;
        let newest = self.groups.keys().next_back().copied().unwrap_or_default();
        let newcomer = describe_process(hello);
        let number = match self.groups.get(&newest).map(|group| &group.members[rank]) {
            None => newest,
            Some(member) => match &member.presence {
                Presence::Absent => newest,
                Presence::Left => newest + 1,
                Presence::Present(_) => {
                    return Err(format!(
                        "two processes claim rank {rank}: {} has it, and {newcomer} came second: \
                         give every process a RANK of its own",
                        member.process
                    ));
                }
                Presence::Failed(message) => {
                    return Err(format!(
                        "{newcomer} came too late to be rank {rank}, since the group has failed \
                         ({message}): start all ranks again"
                    ));
                }
            },
        };
        let group = self
            .groups
            .entry(number)
            .or_insert_with(|| Group::new(self.world_size));
        group.members[rank] = Member::new(hello, now);
        let gone: Vec<Event> = group
            .members
            .iter()
            .enumerate()
            .filter_map(|(rank, member)| match &member.presence {
                Presence::Left => Some(Event::Left { rank }),
                Presence::Failed(message) => Some(Event::Failed {
                    rank,
                    message: message.clone(),
                }),
                Presence::Absent | Presence::Present(_) => None,
            })
            .collect();
        let seat = Seat {
            group: number,
            rank,
        };
        self.seats.insert(id, seat);
        self.send(id, &Event::Welcome { host: self.host });
        for event in gone {
            self.send(id, &event);
        }
        Ok(())
    }

    fn check(&self, hello: &Hello) -> Result<(), String> {
        let Hello {
            version,
            rank,
            world_size,
            ..
        } = *hello;
        let who = format!("rank {rank} ({})", describe_process(hello));
        let host = match self.host {
            Some(host) => format!("rank {host}"),
            None => "the launcher".to_owned(),
        };
        if version != VERSION {
            return Err(format!(
                "{who} speaks version {version} of burn-ddp's protocol and {host}, which hosts \
                 the store, version {VERSION}: build all ranks from the same version"
            ));
        }
        if world_size != self.world_size {
            return Err(format!(
                "{who} was started with a world size of {world_size} and {host}, which hosts the \
                 store, with {}: start every rank with the same WORLD_SIZE",
                self.world_size
            ));
        }
        if rank >= world_size {
            return Err(format!(
                "{who} is not in 0..{world_size}: RANK must be less than WORLD_SIZE"
            ));
        }
        Ok(())
    }

    /// Takes a message from connection `id`. The error says why the connection
    /// can't go on.
    pub(super) fn receive(
        &mut self,
        id: ConnectionId,
        message: &[u8],
        now: Instant,
    ) -> Result<(), String> {
        let request: Request = rmp_serde::from_slice(message).map_err(|error| error.to_string())?;
        let Some(&seat) = self.seats.get(&id) else {
            // Refused, or already gone: nobody is waiting for an answer.
            return Ok(());
        };
        let Some(group) = self.groups.get_mut(&seat.group) else {
            return Ok(());
        };
        let rank = seat.rank;
        group.members[rank].seen(now);
        let replies: Vec<Reply> = match request {
            Request::Heartbeat { mut activity } => {
                let text = truncated(&activity.text, MAX_TEXT_BYTES).to_owned();
                activity.text = text;
                group.members[rank].activity = Some(activity);
                self.send(id, &Event::Heartbeat);
                Vec::new()
            }
            Request::Status { id } => {
                vec![(rank, id, Answer::Members(group.standing(now)))]
            }
            Request::Set { id, key, value } => {
                let (answer, mut replies) = group.set(key, value);
                replies.push((rank, id, answer));
                replies
            }
            Request::Get { id, key } => {
                let answer = group.get(rank, id, key);
                answer
                    .into_iter()
                    .map(|answer| (rank, id, answer))
                    .collect()
            }
            Request::Add { id, key, amount } => vec![(rank, id, group.add(key, amount))],
            Request::Gather { id, key, value } => group.gather(rank, id, key, value),
            Request::Cancel { id } => {
                group.cancel(rank, id);
                Vec::new()
            }
            Request::GiveUp { id } => group.give_up(rank, id, now),
            Request::LastWords { id, text } => {
                let text = truncated(&text, MAX_TEXT_BYTES).to_owned();
                group.members[rank].say(text.clone(), now);
                // Everybody is told now, since this may be the process that
                // hosts the store.
                self.tell_others(seat, &Event::LastWords { rank, text });
                vec![(rank, id, Answer::Done)]
            }
            Request::Poison { error } => {
                self.poison(seat, error, now);
                Vec::new()
            }
            Request::Farewell => {
                self.leave(id, seat);
                Vec::new()
            }
        };
        self.reply(seat.group, replies);
        Ok(())
    }

    fn poison(&mut self, seat: Seat, error: ErrorMessage, now: Instant) {
        let culprit = error.ranks.first().copied();
        self.record_failure(RankFailure {
            rank: culprit
                .filter(|&r| r < self.world_size)
                .unwrap_or(seat.rank),
            message: error.message.clone(),
            at: now,
        });
        let rank = seat.rank;
        self.tell_others(seat, &Event::Poisoned { rank, error });
    }

    fn leave(&mut self, id: ConnectionId, seat: Seat) {
        self.seats.remove(&id);
        self.tell_others(seat, &Event::Left { rank: seat.rank });
        self.depart(seat, Presence::Left);
        self.outputs.push(Output::Close(id));
    }

    /// Records that connection `id` has ended like `end` says, which was not
    /// expected if the rank is still in the group.
    pub(super) fn lose(&mut self, id: ConnectionId, end: &str, now: Instant) {
        let Some(seat) = self.seats.remove(&id) else {
            return;
        };
        let rank = seat.rank;
        let Some(group) = self.groups.get(&seat.group) else {
            return;
        };
        let message = group.members[rank].epitaph(rank, end, now);
        self.fail(seat, message, now);
    }

    /// Records that a rank has failed, and tells the others.
    fn fail(&mut self, seat: Seat, message: String, now: Instant) {
        let rank = seat.rank;
        tracing::debug!("{message}");
        self.record_failure(RankFailure {
            rank,
            message: message.clone(),
            at: now,
        });
        let event = Event::Failed {
            rank,
            message: message.clone(),
        };
        self.tell_others(seat, &event);
        self.depart(seat, Presence::Failed(message));
    }

    /// Tells every rank that the store ends.
    pub(super) fn say_goodbye(&mut self) {
        let mut seats: Vec<ConnectionId> = self.seats.drain().map(|(id, _)| id).collect();
        seats.sort_unstable();
        for id in seats {
            self.send(id, &Event::Goodbye);
            self.outputs.push(Output::Close(id));
        }
    }

    /// Takes ranks that have been silent for too long to be gone.
    pub(super) fn check_silence(&mut self, now: Instant) {
        let silent: Vec<(ConnectionId, Seat, String)> = self
            .seats
            .iter()
            .filter_map(|(&id, &seat)| {
                let member = &self.groups.get(&seat.group)?.members[seat.rank];
                Some((id, seat, member.silence(seat.rank, now)?))
            })
            .collect();
        for (id, seat, message) in silent {
            // It may only have been stopped: then it learns what has become of it.
            let event = Event::Failed {
                rank: seat.rank,
                message: message.clone(),
            };
            self.send(id, &event);
            self.outputs.push(Output::Close(id));
            self.seats.remove(&id);
            self.fail(seat, message, now);
        }
    }

    /// Counts `time`, in which the store did not run, as none.
    pub(super) fn forgive(&mut self, time: Duration, now: Instant) {
        for group in self.groups.values_mut() {
            for member in &mut group.members {
                member.forgive(time, now);
            }
        }
    }

    fn record_failure(&mut self, failure: RankFailure) {
        self.first_failure.get_or_insert(failure);
    }

    fn depart(&mut self, seat: Seat, presence: Presence) {
        if let Some(group) = self.groups.get_mut(&seat.group) {
            let replies = group.depart(seat.rank, presence);
            self.reply(seat.group, replies);
        }
        let newest = self.groups.keys().next_back().copied();
        self.groups
            .retain(|number, group| Some(*number) == newest || group.present().next().is_some());
    }

    fn reply(&mut self, group: u64, replies: Vec<Reply>) {
        for (rank, id, answer) in replies {
            let seat = Seat { group, rank };
            if let Some(connection) = self.connection(seat) {
                self.send(connection, &Event::Answer { id, answer });
            }
        }
    }

    fn connection(&self, seat: Seat) -> Option<ConnectionId> {
        self.seats
            .iter()
            .find_map(|(&id, &other)| (other == seat).then_some(id))
    }

    /// Sends `event` to the other ranks of a rank's group.
    fn tell_others(&mut self, seat: Seat, event: &Event) {
        let others: Vec<ConnectionId> = self
            .seats
            .iter()
            .filter(|(_, other)| other.group == seat.group && other.rank != seat.rank)
            .map(|(&id, _)| id)
            .collect();
        match encode(event) {
            Ok(frame) => {
                let sends = others
                    .into_iter()
                    .map(|id| Output::Send(id, Frame::clone(&frame)));
                self.outputs.extend(sends);
            }
            Err(error) => tracing::error!("an event can't be sent: {error}"),
        }
    }

    fn send(&mut self, id: ConnectionId, event: &Event) {
        match encode(event) {
            Ok(frame) => self.outputs.push(Output::Send(id, frame)),
            Err(error) => {
                tracing::error!("an event can't be sent: {error}");
                self.outputs.push(Output::Close(id));
            }
        }
    }
}

#[cfg(test)]
mod tests;
