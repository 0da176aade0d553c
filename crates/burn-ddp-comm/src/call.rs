//! What a collective call is: the identity that every rank's call must agree
//! on, and that errors name.

use crate::{DType, ReduceOp};

/// The header that starts every collective's message, in bytes: one cache line,
/// so that the payload behind it is aligned to one.
pub(crate) const HEADER_BYTES: usize = 64;

/// A message's encoded header.
pub(crate) type Header = [u8; HEADER_BYTES];

const MAGIC: u32 = 0x6264_6470;

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Collective {
    AllReduce = 1,
    Broadcast,
    AllGather,
    Barrier,
    BroadcastObject,
    AllGatherObject,
}

impl Collective {
    const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::Barrier,
        Self::BroadcastObject,
        Self::AllGatherObject,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
            Self::BroadcastObject => "broadcast_object",
            Self::AllGatherObject => "all_gather_object",
        }
    }
}

/// One collective call without its data. Equal on every rank, or the program is
/// wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// Of an all-reduce.
    pub(crate) op: Option<ReduceOp>,
    /// Of a broadcast.
    pub(crate) root: Option<usize>,
    /// Elements that each rank brings; 0 where that is no part of the agreement.
    pub(crate) count: usize,
}

impl Call {
    /// A call that carries no elements.
    pub(crate) fn without_elements(collective: Collective, root: Option<usize>) -> Self {
        Self {
            collective,
            dtype: DType::U8,
            op: None,
            root,
            count: 0,
        }
    }

    /// `all_reduce #12`.
    pub(crate) fn name(&self, sequence: u64) -> String {
        format!("{} #{sequence}", self.collective.name())
    }

    /// `all_reduce #12 (f32 sum, 1048576)`.
    pub(crate) fn describe(&self, sequence: u64) -> String {
        match self.arguments() {
            Some(arguments) => format!("{} ({arguments})", self.name(sequence)),
            None => self.name(sequence),
        }
    }

    fn arguments(&self) -> Option<String> {
        let root = self.root.map(|root| format!("root {root}"));
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::AllGather => {
                let mut text = self.dtype.to_string();
                if let Some(op) = self.op {
                    text += &format!(" {op}");
                }
                text += &format!(", {}", self.count);
                if let Some(root) = root {
                    text += &format!(", {root}");
                }
                Some(text)
            }
            Collective::Barrier | Collective::BroadcastObject | Collective::AllGatherObject => root,
        }
    }

    /// The header of this call's messages in group `group`.
    pub(crate) fn encode(&self, group: u32, sequence: u64) -> Header {
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&group.to_le_bytes());
        header[8..16].copy_from_slice(&sequence.to_le_bytes());
        header[16..24].copy_from_slice(&(self.count as u64).to_le_bytes());
        let root = self.root.map_or(u32::MAX, |root| root as u32);
        header[24..28].copy_from_slice(&root.to_le_bytes());
        header[28] = self.collective as u8;
        header[29] = DTYPES.iter().position(|&d| d == self.dtype).unwrap_or(0) as u8;
        header[30] = self
            .op
            .and_then(|op| OPS.iter().position(|&o| o == op))
            .map_or(u8::MAX, |op| op as u8);
        header
    }

    /// The call and sequence number of a header, or `None` if it is no header
    /// of group `group`.
    pub(crate) fn decode(header: &Header, group: u32) -> Option<(Self, u64)> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u32_at(0) != MAGIC || u32_at(4) != group || header[31..].iter().any(|&byte| byte != 0) {
            return None;
        }
        let collective = Collective::ALL
            .into_iter()
            .find(|&collective| collective as u8 == header[28])?;
        let op = match header[30] {
            u8::MAX => None,
            op => Some(*OPS.get(usize::from(op))?),
        };
        let root = match u32_at(24) {
            u32::MAX => None,
            root => Some(root as usize),
        };
        let call = Self {
            collective,
            dtype: *DTYPES.get(usize::from(header[29]))?,
            op,
            root,
            count: usize::try_from(u64_at(16)).ok()?,
        };
        Some((call, u64_at(8)))
    }
}

const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I64,
    DType::U8,
];

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Mean,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// Says which ranks called what, where they should have called the same:
/// `rank 2 called all_gather #418 (f32, 1024), ranks 0, 1 called all_reduce #418
/// (f32 sum, 2048)`. `calls` holds each known rank's call, ascending by rank;
/// the fewest come first, since they are the likelier culprits.
pub(crate) fn describe_difference(calls: &[(usize, Call, u64)]) -> String {
    let mut parties: Vec<(String, Vec<usize>)> = Vec::new();
    for &(rank, call, sequence) in calls {
        let text = call.describe(sequence);
        match parties.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => parties.push((text, vec![rank])),
        }
    }
    parties.sort_by_key(|(_, ranks)| ranks.len());
    let parties: Vec<String> = parties
        .iter()
        .map(|(text, ranks)| format!("{} called {text}", name_ranks(ranks)))
        .collect();
    format!(
        "{}: every rank has to make the same calls in the same order",
        parties.join(", ")
    )
}

/// `rank 2`, or `ranks 0, 1`.
pub(crate) fn name_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn calls() -> impl Strategy<Value = Call> {
        let op = proptest::option::of(proptest::sample::select(OPS.to_vec()));
        let collective = proptest::sample::select(Collective::ALL.to_vec());
        let dtype = proptest::sample::select(DTYPES.to_vec());
        let root = proptest::option::of(0..1000_usize);
        (collective, dtype, op, root, any::<usize>()).prop_map(
            |(collective, dtype, op, root, count)| Call {
                collective,
                dtype,
                op,
                root,
                count,
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_says_what_was_called(call in calls(), group: u32, sequence: u64) {
            let header = call.encode(group, sequence);
            prop_assert_eq!(Call::decode(&header, group), Some((call, sequence)));
            prop_assert_eq!(Call::decode(&header, group ^ 1), None);
        }

        #[test]
        fn any_bytes_decode_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES), valid_start: bool) {
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&bytes);
            if valid_start {
                header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
                header[4..8].copy_from_slice(&7_u32.to_le_bytes());
                header[31..].fill(0);
            }
            if let Some((call, sequence)) = Call::decode(&header, 7) {
                prop_assert_eq!(call.encode(7, sequence), header);
            }
        }
    }

    #[test]
    fn a_difference_names_ranks_and_calls() {
        let reduce = Call {
            collective: Collective::AllReduce,
            dtype: DType::F32,
            op: Some(ReduceOp::Sum),
            root: None,
            count: 2048,
        };
        let gather = Call {
            collective: Collective::AllGather,
            op: None,
            count: 1024,
            ..reduce
        };
        assert_eq!(
            describe_difference(&[(0, reduce, 418), (1, reduce, 418), (2, gather, 418)]),
            "rank 2 called all_gather #418 (f32, 1024), ranks 0, 1 called all_reduce #418 \
             (f32 sum, 2048): every rank has to make the same calls in the same order"
        );
    }
}
