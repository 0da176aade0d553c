//! All-reduce, directly between all ranks: for short messages in one hop, for
//! others a reduce-scatter whose results are gathered while it goes on; over
//! several hosts with several ranks see [`hierarchical`](super::hierarchical).

use super::hierarchical::Hierarchical;
use super::slice_fold::SliceFold;
use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::{ALIGNMENT, Moved};
use crate::reduce::Reduction;
use crate::{DType, ReduceOp, Result};

/// Up to this many bytes everybody sends everything to everybody.
const ONE_HOP_BYTES: usize = 32 << 10;

/// Scratch memory for accumulators, aligned for the widest.
pub(crate) type Scratch = Vec<u128>;

/// The first `bytes` of `scratch`, grown where it is too small.
pub(super) fn accumulator(scratch: &mut Scratch, bytes: usize) -> &mut [u8] {
    let words = bytes.div_ceil(size_of::<u128>());
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    &mut bytemuck::cast_slice_mut(scratch)[..bytes]
}

/// What every all-reduce path needs to know.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Bytes of an element.
    pub(super) element: usize,
    pub(super) reduction: Reduction,
}

/// One hop: every rank, or the root, gets all elements of all ranks and folds
/// them itself.
struct OneHop<'a> {
    plan: Plan,
    data: &'a [u8],
    accumulator: &'a mut [u8],
    /// The rank whose elements are being folded.
    turn: usize,
    /// The only rank that gets the result, if not all do.
    root: Option<usize>,
}

impl OneHop<'_> {
    fn gets_result(&self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }
}

impl Exchange for OneHop<'_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let receives = self.gets_result(self.plan.rank);
        (usize::from(self.gets_result(rank)), usize::from(receives))
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for peer in peers.iter_mut().flatten() {
            if peer.sending() == 1 && self.gets_result(peer.rank) {
                moved |= peer.send(self.data, self.data.len())?;
            }
        }
        if !self.gets_result(self.plan.rank) {
            return Ok(moved);
        }
        while self.turn < self.plan.world_size {
            match &mut peers[self.turn] {
                None => fold(&self.plan, self.turn, self.accumulator, 0, self.data),
                Some(peer) => {
                    while peer.receiving() == 1 {
                        let step = peer.read(
                            self.data.len(),
                            self.plan.element,
                            usize::MAX,
                            |at, bytes| fold(&self.plan, self.turn, self.accumulator, at, bytes),
                        )?;
                        moved |= step;
                        if !step {
                            break;
                        }
                    }
                    if peer.receiving() < 2 {
                        break;
                    }
                }
            }
            self.turn += 1;
        }
        Ok(moved)
    }
}

/// Folds `bytes`, which begin at byte `at` of `rank`'s elements, into the
/// accumulator of those elements.
pub(super) fn fold(plan: &Plan, rank: usize, accumulator: &mut [u8], at: usize, bytes: &[u8]) {
    let size = plan.reduction.accumulator_size();
    let (start, len) = (at / plan.element * size, bytes.len() / plan.element * size);
    let accumulator = &mut accumulator[start..start + len];
    if rank == 0 {
        plan.reduction.start(accumulator, bytes);
    } else {
        plan.reduction.fold(accumulator, bytes);
    }
}

/// The bytes of slice `index` of `world_size` of `len` bytes: whole cache
/// lines, but for the end.
pub(super) fn slice(len: usize, world_size: usize, index: usize) -> std::ops::Range<usize> {
    let lines = len.div_ceil(ALIGNMENT);
    let (each, rest) = (lines / world_size, lines % world_size);
    let start = |index: usize| ((index * each + index.min(rest)) * ALIGNMENT).min(len);
    start(index)..start(index + 1)
}

/// Two overlapping halves: rank s gets everyone's slice s and reduces it, and
/// sends the result to everyone, or to the root, piece by piece.
struct Sliced<'a> {
    fold: SliceFold<'a>,
    data: &'a mut [u8],
    /// The only rank that gets the results, if not all do.
    root: Option<usize>,
}

impl Sliced<'_> {
    fn slice(&self, rank: usize) -> std::ops::Range<usize> {
        slice(self.data.len(), self.fold.plan.world_size, rank)
    }

    fn gets_results(&self, rank: usize) -> bool {
        self.root.is_none_or(|root| root == rank)
    }
}

impl Exchange for Sliced<'_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let with_results = |rank: usize| 1 + usize::from(self.gets_results(rank));
        (with_results(rank), with_results(self.fold.plan.rank))
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let own = self.slice(self.fold.plan.rank);
        for peer in peers.iter_mut().flatten() {
            let theirs = self.slice(peer.rank);
            if peer.sending() == 1 {
                moved |= peer.send(&self.data[theirs.clone()], theirs.len())?;
            }
            if peer.sending() == 2 && self.gets_results(peer.rank) {
                moved |= peer.send(&self.data[own.clone()], self.fold.reduced())?;
            }
            // Over elements that have been sent: their results depend on them.
            if peer.receiving() == 2 && self.gets_results(self.fold.plan.rank) {
                moved |= peer.receive(&mut self.data[theirs])?;
            }
        }
        Ok(moved | self.fold.advance(peers, &mut self.data[own])?)
    }
}

impl Communicator {
    /// Replaces every rank's `data` by the reduction of all of them.
    pub(crate) fn all_reduce(&mut self, dtype: DType, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let mut call = Call::with_elements(Collective::AllReduce, dtype, data.len());
        call.op = Some(op);
        self.reduce_to(&call, data, op, None)
    }

    /// Reduces everyone's `data` into everyone's, or into `root`'s, while the
    /// others' is overwritten then.
    pub(super) fn reduce_to(
        &mut self,
        call: &Call,
        data: &mut [u8],
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<()> {
        let plan = self.plan(call, op);
        let mut scratch = std::mem::take(self.scratch());
        let result = self.reduce_with(call, plan, data, root, &mut scratch);
        *self.scratch() = scratch;
        result
    }

    /// What a reduction needs to know about the group.
    pub(super) fn plan(&self, call: &Call, op: ReduceOp) -> Plan {
        Plan {
            rank: self.rank(),
            world_size: self.world_size(),
            element: call.dtype.size(),
            reduction: Reduction::new(call.dtype, op, self.world_size()),
        }
    }

    fn reduce_with(
        &mut self,
        call: &Call,
        plan: Plan,
        data: &mut [u8],
        root: Option<usize>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        if data.len() > ONE_HOP_BYTES && root.is_none() && self.topology().is_hierarchical() {
            let place = self.topology().place(plan.rank);
            let bytes = Hierarchical::accumulator_bytes(&plan, &place, data.len());
            let accumulator = accumulator(scratch, bytes);
            let mut exchange = Hierarchical::new(plan, place, data, accumulator);
            return self.perform(call, &mut exchange);
        }
        if data.len() > ONE_HOP_BYTES && plan.world_size > 1 {
            let fold = SliceFold::new(plan, scratch);
            return self.perform(call, &mut Sliced { fold, data, root });
        }
        let size = plan.reduction.accumulator_size();
        let accumulator = accumulator(scratch, data.len() / plan.element * size);
        let mut exchange = OneHop {
            plan,
            data,
            accumulator,
            turn: 0,
            root,
        };
        let gets_result = exchange.gets_result(plan.rank);
        self.perform(call, &mut exchange)?;
        if gets_result {
            plan.reduction.finish(data, accumulator);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slices_cover_the_data_in_order(len in 0..100_000_usize, world_size in 1..70_usize) {
            let mut end = 0;
            for index in 0..world_size {
                let range = slice(len, world_size, index);
                prop_assert_eq!(range.start, end);
                prop_assert!(range.len() <= len / world_size + 2 * ALIGNMENT);
                end = range.end;
            }
            prop_assert_eq!(end, len);
        }
    }
}
