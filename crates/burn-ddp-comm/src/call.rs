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
    Reduce,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    AllGatherVariable,
    AllToAllVariable,
    GatherObject,
}

impl Collective {
    const ALL: [Self; 14] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::Barrier,
        Self::BroadcastObject,
        Self::AllGatherObject,
        Self::Reduce,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::AllGatherVariable,
        Self::AllToAllVariable,
        Self::GatherObject,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::Barrier => "barrier",
            Self::BroadcastObject => "broadcast_object",
            Self::AllGatherObject => "all_gather_object",
            Self::Reduce => "reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::AllGatherVariable => "all_gather_v",
            Self::AllToAllVariable => "all_to_all_v",
            Self::GatherObject => "gather_object",
        }
    }
}

/// One collective call without its data. Equal on every rank, or the program is
/// wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    /// Of a collective that reduces.
    pub(crate) op: Option<ReduceOp>,
    /// Of a collective that has one.
    pub(crate) root: Option<usize>,
    /// Elements that each rank brings; 0 where that is no part of the agreement.
    pub(crate) count: usize,
    /// Of a coalesced call.
    pub(crate) buffers: Option<Buffers>,
}

/// How the elements of a coalesced call are spread over buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buffers {
    pub(crate) count: u32,
    /// FNV-1a hash of their lengths: what ranks have to agree on is more than fits
    /// into a header.
    pub(crate) layout: u32,
}

impl Buffers {
    /// Buffers of these lengths in bytes.
    pub(crate) fn new(lengths: impl Iterator<Item = usize>) -> Self {
        let (mut count, mut layout) = (0, 0x811c_9dc5_u32);
        for length in lengths {
            count += 1;
            for byte in (length as u64).to_le_bytes() {
                layout = (layout ^ u32::from(byte)).wrapping_mul(0x0100_0193);
            }
        }
        Self { count, layout }
    }
}

impl Call {
    /// A call on `len` bytes of elements from each rank.
    pub(crate) fn with_elements(collective: Collective, dtype: DType, len: usize) -> Self {
        Self {
            collective,
            dtype,
            op: None,
            root: None,
            count: len / dtype.size(),
            buffers: None,
        }
    }

    /// A call that carries no elements.
    pub(crate) fn without_elements(collective: Collective, root: Option<usize>) -> Self {
        Self {
            collective,
            dtype: DType::U8,
            op: None,
            root,
            count: 0,
            buffers: None,
        }
    }

    /// `all_reduce #12`.
    pub(crate) fn name(&self, sequence: u64) -> String {
        let coalesced = self.buffers.map_or("", |_| "_coalesced");
        format!("{}{coalesced} #{sequence}", self.collective.name())
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
        let elements = match self.collective {
            Collective::Barrier
            | Collective::BroadcastObject
            | Collective::AllGatherObject
            | Collective::GatherObject => return root,
            Collective::AllGatherVariable | Collective::AllToAllVariable => self.dtype.to_string(),
            _ => match self.op {
                Some(op) => format!("{} {op}, {}", self.dtype, self.count),
                None => format!("{}, {}", self.dtype, self.count),
            },
        };
        let elements = match self.buffers {
            Some(Buffers { count, layout }) => {
                format!("{elements} in {count} buffers of layout {layout:08x}")
            }
            None => elements,
        };
        Some(match root {
            Some(root) => format!("{elements}, {root}"),
            None => elements,
        })
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
        header[29] = self.dtype.code();
        header[30] = self
            .op
            .and_then(|op| OPS.iter().position(|&o| o == op))
            .map_or(u8::MAX, |op| op as u8);
        if let Some(Buffers { count, layout }) = self.buffers {
            header[31] = 1;
            header[32..36].copy_from_slice(&count.to_le_bytes());
            header[36..40].copy_from_slice(&layout.to_le_bytes());
        }
        header
    }

    /// The call and sequence number of a header, or `None` if it is no header
    /// of group `group`.
    pub(crate) fn decode(header: &Header, group: u32) -> Option<(Self, u64)> {
        if u32_at(header, 0) != MAGIC
            || u32_at(header, 4) != group
            || header[40..].iter().any(|&byte| byte != 0)
        {
            return None;
        }
        let collective = Collective::ALL
            .into_iter()
            .find(|&collective| collective as u8 == header[28])?;
        let op = match header[30] {
            u8::MAX => None,
            op => Some(*OPS.get(usize::from(op))?),
        };
        let root = match u32_at(header, 24) {
            u32::MAX => None,
            root => Some(root as usize),
        };
        let buffers = match header[31] {
            0 if u64_at(header, 32) == 0 => None,
            1 => Some(Buffers {
                count: u32_at(header, 32),
                layout: u32_at(header, 36),
            }),
            _ => return None,
        };
        let call = Self {
            collective,
            buffers,
            dtype: *DTYPES.get(usize::from(header[29]))?,
            op,
            root,
            count: usize::try_from(u64_at(header, 16)).ok()?,
        };
        Some((call, u64_at(header, 8)))
    }
}

/// By their [code](DType::code) in headers.
pub(crate) const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::I64,
    DType::U8,
];

impl DType {
    /// What stands for it in headers.
    pub(crate) fn code(self) -> u8 {
        DTYPES.iter().position(|&d| d == self).unwrap_or(0) as u8
    }
}

/// The number at byte `at` of a header.
pub(crate) fn u32_at(header: &Header, at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

/// The number at byte `at` of a header.
pub(crate) fn u64_at(header: &Header, at: usize) -> u64 {
    u64::from(u32_at(header, at)) | u64::from(u32_at(header, at + 4)) << 32
}

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
pub(crate) fn describe_difference(calls: &[(usize, String)]) -> String {
    let mut parties: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, text) in calls {
        match parties.iter_mut().find(|(known, _)| known == text) {
            Some((_, ranks)) => ranks.push(*rank),
            None => parties.push((text, vec![*rank])),
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
        let buffers = proptest::option::of(any::<(u32, u32)>());
        (collective, dtype, op, root, any::<usize>(), buffers).prop_map(
            |(collective, dtype, op, root, count, buffers)| Call {
                collective,
                dtype,
                op,
                root,
                count,
                buffers: buffers.map(|(count, layout)| Buffers { count, layout }),
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
                header[31] %= 3;
                header[40..].fill(0);
            }
            if let Some((call, sequence)) = Call::decode(&header, 7) {
                prop_assert_eq!(call.encode(7, sequence), header);
            }
        }
    }

    #[test]
    fn buffers_are_told_apart_by_their_lengths() {
        let layouts = [
            vec![3, 5],
            vec![5, 3],
            vec![8],
            vec![0, 8],
            vec![8, 0],
            vec![],
        ];
        let buffers: Vec<_> = layouts
            .into_iter()
            .map(|lengths| Buffers::new(lengths.into_iter()))
            .collect();
        for (i, one) in buffers.iter().enumerate() {
            assert!(buffers[..i].iter().all(|other| other != one));
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
            buffers: None,
        };
        let gather = Call {
            collective: Collective::AllGather,
            op: None,
            count: 1024,
            ..reduce
        };
        assert_eq!(
            describe_difference(&[
                (0, reduce.describe(418)),
                (1, reduce.describe(418)),
                (2, gather.describe(418))
            ]),
            "rank 2 called all_gather #418 (f32, 1024), ranks 0, 1 called all_reduce #418 \
             (f32 sum, 2048): every rank has to make the same calls in the same order"
        );
    }
}
