//! What a rank and the store say to each other: messages in MessagePack, each
//! in a [frame](super::frame).

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::flight_recorder::Activity;
use crate::{Error, ErrorKind};

/// Version of what is said; both sides have to have the same.
pub(super) const VERSION: u32 = 2;

/// What store connections are for, in the handshake.
pub(super) const PURPOSE: &[u8] = b"store";

/// Most bytes of a value.
pub(super) const MAX_VALUE_BYTES: usize = 64 << 10;

/// Most bytes of a key.
pub(super) const MAX_KEY_BYTES: usize = 256;

/// Most bytes of a text: last words, an error.
pub(super) const MAX_TEXT_BYTES: usize = 16 << 10;

/// Most bytes of a request's frame.
pub(super) const MAX_REQUEST_BYTES: usize = 128 << 10;

/// Most bytes of an event's frame: the values of all ranks.
pub(super) const MAX_EVENT_BYTES: usize = 128 << 20;

/// A rank's first message, within the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) pid: u32,
    pub(super) host: String,
    /// How long it may be silent before it is taken to be gone.
    pub(super) silence_ms: u64,
}

/// From a rank to the store. Requests with an `id` get one [`Event::Answer`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// Sets a key's value.
    Set {
        id: u64,
        key: String,
        value: ByteBuf,
    },
    /// The key's value, as soon as it is set.
    Get { id: u64, key: String },
    /// Adds to a counter, which starts at 0, and returns the sum.
    Add { id: u64, key: String, amount: i64 },
    /// Every rank's value, as soon as every rank has made this request.
    Gather {
        id: u64,
        key: String,
        value: ByteBuf,
    },
    /// Takes a [`Get`](Self::Get) back that has not been answered.
    Cancel { id: u64 },
    /// Ends a [`Gather`](Self::Gather) that has not been answered, on every rank
    /// that waits for it, with [`Answer::Members`].
    GiveUp { id: u64 },
    /// What the others should be told if this rank now dies.
    LastWords { id: u64, text: String },
    /// Fails the group on every other rank.
    Poison { error: ErrorMessage },
    /// Shows that the rank is running, and what it is doing. The store returns it.
    Heartbeat { activity: Activity },
    /// How every rank stands.
    Status { id: u64 },
    /// The rank leaves in good order. The store closes the connection.
    Farewell,
}

/// From the store to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Event {
    /// The rank is in the group; `host` is the rank that hosts the store, if
    /// one does.
    Welcome { host: Option<usize> },
    /// The rank is not let in.
    Refused { message: String },
    /// The answer to request `id`.
    Answer { id: u64, answer: Answer },
    /// A rank has died.
    Failed { rank: usize, message: String },
    /// A rank has left in good order.
    Left { rank: usize },
    /// A rank has made the group fail.
    Poisoned { rank: usize, error: ErrorMessage },
    /// What a rank said that may be about to die.
    LastWords { rank: usize, text: String },
    /// The store has got a heartbeat.
    Heartbeat,
    /// The store ends in good order; the group goes on without it.
    Goodbye,
}

/// What a request gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Done,
    Value(ByteBuf),
    Sum(i64),
    Values(Vec<ByteBuf>),
    /// Who is here, and who takes part.
    Members(Vec<MemberStatus>),
    /// These ranks have left and will not take part.
    Departed(Vec<usize>),
    /// The request can't be served.
    Invalid(String),
}

/// How one rank stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemberStatus {
    pub(super) presence: PresenceStatus,
    /// "process 17 on node3", where known.
    pub(super) process: Option<String>,
    /// Whether it has given its value.
    pub(super) gathered: bool,
    /// What it was doing when it was last heard of.
    pub(super) activity: Option<Activity>,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PresenceStatus {
    /// It has not come.
    Absent,
    /// It is here, and was last heard of so long ago.
    Present { silent_ms: u64 },
    /// It has left or died.
    Gone,
}

/// An error on its way to another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ErrorMessage {
    kind: Kind,
    pub(super) ranks: Vec<usize>,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Usage,
    Peer,
    Environment,
}

impl ErrorMessage {
    /// `error` with its text cut to what may be sent.
    pub(super) fn new(error: &Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::Usage => Kind::Usage,
            ErrorKind::Peer => Kind::Peer,
            ErrorKind::Environment => Kind::Environment,
        };
        Self {
            kind,
            ranks: error.ranks().iter().copied().take(1024).collect(),
            message: truncated(&error.to_string(), MAX_TEXT_BYTES).to_owned(),
        }
    }

    /// The error on a rank other than `from`, where it arose. What was wrong
    /// with `from`'s machine is to the others a failure of their peer.
    pub(super) fn into_error(self, from: usize) -> Error {
        match self.kind {
            Kind::Usage => Error::usage(self.message),
            Kind::Peer => Error::peer(self.ranks, self.message),
            Kind::Environment => {
                Error::peer([from], format!("rank {from} failed: {}", self.message))
            }
        }
    }
}

/// The longest start of `text` that has at most `bytes` bytes.
pub(super) fn truncated(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_error_is_the_same_on_the_other_ranks() {
        for error in [
            Error::usage("rank 2 called all_gather"),
            Error::peer([1, 3], "ranks 1, 3 did not arrive"),
        ] {
            let arrived = ErrorMessage::new(&error).into_error(2);
            assert_eq!(arrived.kind(), error.kind());
            assert_eq!(arrived.ranks(), error.ranks());
            assert_eq!(arrived.to_string(), error.to_string());
        }
        let disk = Error::environment("no space left");
        let arrived = ErrorMessage::new(&disk).into_error(2);
        assert_eq!(arrived.ranks(), [2]);
        assert_eq!(arrived.to_string(), "rank 2 failed: no space left");
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(truncated("aé", 2), "a");
        assert_eq!(truncated("aé", 3), "aé");
        let error = Error::usage("é".repeat(MAX_TEXT_BYTES));
        assert!(ErrorMessage::new(&error).message.len() <= MAX_TEXT_BYTES);
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = rmp_serde::from_slice::<Request>(&bytes);
            let _ = rmp_serde::from_slice::<Event>(&bytes);
            let _ = rmp_serde::from_slice::<Hello>(&bytes);
        }

        /// Valid messages with some bytes changed get deeper than noise does.
        #[test]
        fn damaged_messages_are_decoded_or_refused(
            id: u64,
            key in ".{0,20}",
            values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..5),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let values: Vec<ByteBuf> = values.into_iter().map(ByteBuf::from).collect();
            let request = Request::Gather { id, key, value: values.first().cloned().unwrap_or_default() };
            let event = Event::Answer { id, answer: Answer::Values(values) };
            let mut request_bytes = rmp_serde::to_vec(&request).unwrap();
            let mut event_bytes = rmp_serde::to_vec(&event).unwrap();
            prop_assert_eq!(&rmp_serde::from_slice::<Request>(&request_bytes).unwrap(), &request);
            prop_assert_eq!(&rmp_serde::from_slice::<Event>(&event_bytes).unwrap(), &event);
            for (at, byte) in damage {
                let position = at.index(request_bytes.len());
                request_bytes[position] = byte;
                let position = at.index(event_bytes.len());
                event_bytes[position] = byte;
            }
            let _ = rmp_serde::from_slice::<Request>(&request_bytes);
            let _ = rmp_serde::from_slice::<Event>(&event_bytes);
        }
    }
}
