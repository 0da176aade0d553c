//! What two ranks agree on when one sends to the other: the header of
//! point-to-point messages.

use crate::DType;
use crate::call::{Call, DTYPES, HEADER_BYTES, Header, u32_at, u64_at};

/// Unlike a collective's.
const MAGIC: u32 = 0x7064_6470;

/// Stands for no message in that direction.
const NONE: u64 = u64::MAX;

/// The messages between two ranks, as both of them see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairCall {
    pub(crate) dtype: DType,
    /// Elements from the lower rank to the higher one, if it sends.
    pub(crate) up: Option<usize>,
    /// Elements from the higher rank to the lower one, if it sends.
    pub(crate) down: Option<usize>,
}

impl PairCall {
    /// What rank `rank` wants to send to and receive from `peer`, in elements.
    pub(crate) fn new(
        dtype: DType,
        (rank, peer): (usize, usize),
        sends: Option<usize>,
        receives: Option<usize>,
    ) -> Self {
        let (up, down) = if rank < peer {
            (sends, receives)
        } else {
            (receives, sends)
        };
        Self { dtype, up, down }
    }

    /// `send #3 to rank 1`, as a rank calls it whose peer is `peer`. `is_lower`:
    /// whether it has the lower number of the two. `peer` is what errors call
    /// the peer.
    pub(crate) fn name(&self, sequence: u64, is_lower: bool, peer: usize) -> String {
        match self.directions(is_lower) {
            (Some(_), None) => format!("send #{sequence} to rank {peer}"),
            (None, Some(_)) => format!("recv #{sequence} from rank {peer}"),
            _ => format!("send_recv #{sequence} with rank {peer}"),
        }
    }

    /// `send #3 to rank 1 (f32, 1024)`.
    pub(crate) fn describe(&self, sequence: u64, is_lower: bool, peer: usize) -> String {
        let counts = match self.directions(is_lower) {
            (Some(count), None) | (None, Some(count)) => count.to_string(),
            (sent, received) => format!(
                "{} out, {} in",
                sent.unwrap_or_default(),
                received.unwrap_or_default()
            ),
        };
        format!(
            "{} ({}, {counts})",
            self.name(sequence, is_lower, peer),
            self.dtype
        )
    }

    /// What the lower or the higher rank sends and receives.
    fn directions(&self, is_lower: bool) -> (Option<usize>, Option<usize>) {
        if is_lower {
            (self.up, self.down)
        } else {
            (self.down, self.up)
        }
    }

    /// The header of both ranks' messages in group `group`.
    pub(crate) fn encode(&self, group: u32, sequence: u64) -> Header {
        let count = |count: Option<usize>| count.map_or(NONE, |count| count as u64).to_le_bytes();
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&group.to_le_bytes());
        header[8..16].copy_from_slice(&sequence.to_le_bytes());
        header[16..24].copy_from_slice(&count(self.up));
        header[24..32].copy_from_slice(&count(self.down));
        header[32] = self.dtype.code();
        header
    }

    /// The call and sequence number of a header, or `None` if it is none of a
    /// point-to-point message in group `group`.
    pub(crate) fn decode(header: &Header, group: u32) -> Option<(Self, u64)> {
        if u32_at(header, 0) != MAGIC
            || u32_at(header, 4) != group
            || header[33..].iter().any(|&byte| byte != 0)
        {
            return None;
        }
        let count = |at: usize| match u64_at(header, at) {
            NONE => Some(None),
            count => usize::try_from(count).ok().map(Some),
        };
        let call = Self {
            dtype: *DTYPES.get(usize::from(header[32]))?,
            up: count(16)?,
            down: count(24)?,
        };
        (call.up.is_some() || call.down.is_some()).then_some((call, u64_at(header, 8)))
    }
}

/// What the rank called that sent `header` in group `group` to a rank that errors
/// call `to`; `None` if it is no header of that group. `is_lower`: whether it has
/// the lower number of the two.
pub(crate) fn describe_header(
    header: &Header,
    group: u32,
    is_lower: bool,
    to: usize,
) -> Option<String> {
    if let Some((call, sequence)) = Call::decode(header, group) {
        return Some(call.describe(sequence));
    }
    let (call, sequence) = PairCall::decode(header, group)?;
    Some(call.describe(sequence, is_lower, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn calls() -> impl Strategy<Value = PairCall> {
        let count = || proptest::option::of(0..usize::MAX);
        (
            proptest::sample::select(DTYPES.to_vec()),
            count(),
            count(),
            any::<bool>(),
        )
            .prop_map(|(dtype, sends, receives, is_lower)| {
                let ranks = if is_lower { (0, 1) } else { (1, 0) };
                PairCall::new(dtype, ranks, sends, receives)
            })
            .prop_filter("one direction at least", |call| {
                call.up.is_some() || call.down.is_some()
            })
    }

    proptest! {
        #[test]
        fn a_header_says_what_was_called(call in calls(), group: u32, sequence: u64) {
            let header = call.encode(group, sequence);
            prop_assert_eq!(PairCall::decode(&header, group), Some((call, sequence)));
            prop_assert_eq!(PairCall::decode(&header, group ^ 1), None);
            prop_assert_eq!(Call::decode(&header, group), None);
            prop_assert_eq!(
                describe_header(&header, group, true, 7),
                Some(call.describe(sequence, true, 7))
            );
        }

        #[test]
        fn any_bytes_decode_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES), valid_start: bool) {
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&bytes);
            if valid_start {
                header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
                header[4..8].copy_from_slice(&7_u32.to_le_bytes());
                header[32] %= 8;
                header[33..].fill(0);
            }
            if let Some((call, sequence)) = PairCall::decode(&header, 7) {
                prop_assert_eq!(call.encode(7, sequence), header);
            }
        }
    }

    #[test]
    fn both_ranks_agree_and_each_calls_it_by_its_own_name() {
        let sender = PairCall::new(DType::F32, (2, 5), Some(8), None);
        let receiver = PairCall::new(DType::F32, (5, 2), None, Some(8));
        assert_eq!(sender.encode(3, 1), receiver.encode(3, 1));
        assert_eq!(sender.describe(1, true, 5), "send #1 to rank 5 (f32, 8)");
        assert_eq!(
            receiver.describe(1, false, 2),
            "recv #1 from rank 2 (f32, 8)"
        );
        let both = PairCall::new(DType::I64, (5, 2), Some(3), Some(4));
        assert_eq!(
            both.describe(9, false, 2),
            "send_recv #9 with rank 2 (i64, 3 out, 4 in)"
        );
        assert_eq!(
            both.describe(9, true, 5),
            "send_recv #9 with rank 5 (i64, 4 out, 3 in)"
        );
    }
}
