//! All-reduce, directly between all ranks: for short messages in one hop, for
//! others a reduce-scatter whose results are gathered while it goes on; over
//! several hosts with several ranks see [`hierarchical`](super::hierarchical).

use super::hierarchical::Hierarchical;
use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::{ALIGNMENT, BURST, Moved};
use crate::reduce::Reduction;
use crate::{DType, ReduceOp, Result};

/// Up to this many bytes everybody sends everything to everybody.
const ONE_HOP_BYTES: usize = 32 << 10;

/// Scratch memory for accumulators, aligned for the widest.
pub(crate) type Scratch = Vec<u128>;

/// The first `bytes` of `scratch`, grown where it is too small.
fn accumulator(scratch: &mut Scratch, bytes: usize) -> &mut [u8] {
    let words = bytes.div_ceil(size_of::<u128>());
    if scratch.len() < words {
        scratch.resize(words, 0);
    }
    &mut bytemuck::cast_slice_mut(scratch)[..bytes]
}

/// What every all-reduce path needs to know.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    rank: usize,
    world_size: usize,
    /// Bytes of an element.
    pub(super) element: usize,
    pub(super) reduction: Reduction,
}

/// One hop: every rank gets all elements of all ranks and folds them itself.
struct OneHop<'a> {
    plan: Plan,
    data: &'a [u8],
    accumulator: &'a mut [u8],
    /// The rank whose elements are being folded.
    turn: usize,
}

impl Exchange for OneHop<'_> {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (1, 1)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for peer in peers.iter_mut().flatten() {
            if peer.sending() == 1 {
                moved |= peer.send(self.data, self.data.len())?;
            }
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

/// Two overlapping halves: rank s gets everyone's slice s and reduces it, and
/// sends the result to everyone, piece by piece.
struct Sliced<'a> {
    plan: Plan,
    data: &'a mut [u8],
    accumulator: &'a mut [u8],
    /// Bytes of the own slice that are reduced.
    reduced: usize,
    /// The rank whose elements of the current piece are being folded.
    turn: usize,
    /// Bytes of the current piece that are folded from that rank.
    folded: usize,
}

/// The bytes of slice `index` of `world_size` of `len` bytes: whole cache
/// lines, but for the end.
pub(super) fn slice(len: usize, world_size: usize, index: usize) -> std::ops::Range<usize> {
    let lines = len.div_ceil(ALIGNMENT);
    let (each, rest) = (lines / world_size, lines % world_size);
    let start = |index: usize| ((index * each + index.min(rest)) * ALIGNMENT).min(len);
    start(index)..start(index + 1)
}

impl Sliced<'_> {
    fn slice(&self, rank: usize) -> std::ops::Range<usize> {
        slice(self.data.len(), self.plan.world_size, rank)
    }

    /// Reduces as much of the own slice as has arrived, a burst at most.
    fn reduce(&mut self, peers: &mut Peers) -> Moved {
        if self.plan.world_size == 2 {
            return self.reduce_pair(peers);
        }
        let own = self.slice(self.plan.rank);
        let mut moved = false;
        while self.reduced < own.len() {
            let piece = (own.len() - self.reduced).min(BURST);
            while self.turn < self.plan.world_size {
                let before = (self.turn, self.folded);
                self.fold_turn(peers, own.start, own.len(), piece)?;
                if before == (self.turn, self.folded) {
                    return Ok(moved);
                }
                moved = true;
            }
            let at = own.start + self.reduced;
            let size = self.plan.reduction.accumulator_size();
            let accumulator = &self.accumulator[..piece / self.plan.element * size];
            self.plan
                .reduction
                .finish(&mut self.data[at..at + piece], accumulator);
            self.reduced += piece;
            self.turn = 0;
        }
        Ok(moved | pass_ends(peers, own.len())?)
    }

    /// Folds what has arrived of the current piece from the rank whose turn it
    /// is.
    fn fold_turn(
        &mut self,
        peers: &mut Peers,
        start: usize,
        len: usize,
        piece: usize,
    ) -> Result<(), crate::peer::Stop> {
        match &mut peers[self.turn] {
            None => {
                let bytes = &self.data[start + self.reduced..start + self.reduced + piece];
                fold(&self.plan, self.turn, self.accumulator, 0, bytes);
                self.folded = piece;
            }
            Some(peer) if peer.receiving() == 1 => {
                let limit = piece - self.folded;
                let mut taken = 0;
                peer.read(len, self.plan.element, limit, |_, bytes| {
                    fold(&self.plan, self.turn, self.accumulator, self.folded, bytes);
                    taken = bytes.len();
                })?;
                self.folded += taken;
            }
            Some(_) => {}
        }
        if self.folded == piece {
            self.folded = 0;
            self.turn += 1;
        }
        Ok(())
    }

    /// [`reduce`](Self::reduce) for two ranks: in one pass over the elements,
    /// in place.
    fn reduce_pair(&mut self, peers: &mut Peers) -> Moved {
        let own = self.slice(self.plan.rank);
        let other = 1 - self.plan.rank;
        let Some(peer) = &mut peers[other] else {
            return Ok(false);
        };
        if peer.receiving() != 1 {
            return Ok(false);
        }
        let moved = peer.read(own.len(), self.plan.element, usize::MAX, |at, bytes| {
            let at = own.start + at;
            let target = &mut self.data[at..at + bytes.len()];
            self.plan.reduction.pair(target, bytes, other == 0);
        })?;
        self.reduced = match peer.receiving() {
            1 => peer.received().min(own.len()),
            _ => own.len(),
        };
        Ok(moved)
    }
}

/// Passes the ends of the peers' messages to the own slice, of `len` bytes,
/// that are read up to there.
fn pass_ends(peers: &mut Peers, len: usize) -> Moved {
    let mut moved = false;
    for peer in peers.iter_mut().flatten() {
        if peer.receiving() == 1 {
            moved |= peer.read(len, 1, 0, |_, _| {})?;
        }
    }
    Ok(moved)
}

impl Exchange for Sliced<'_> {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (2, 2)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let own = self.slice(self.plan.rank);
        for peer in peers.iter_mut().flatten() {
            let theirs = self.slice(peer.rank);
            if peer.sending() == 1 {
                moved |= peer.send(&self.data[theirs.clone()], theirs.len())?;
            }
            if peer.sending() == 2 {
                moved |= peer.send(&self.data[own.clone()], self.reduced)?;
            }
            // Over elements that have been sent: their results depend on them.
            if peer.receiving() == 2 {
                moved |= peer.receive(&mut self.data[theirs])?;
            }
        }
        Ok(moved | self.reduce(peers)?)
    }
}

impl Communicator {
    /// Replaces every rank's `data` by the reduction of all of them.
    pub(crate) fn all_reduce(&mut self, dtype: DType, data: &mut [u8], op: ReduceOp) -> Result<()> {
        let call = Call {
            collective: Collective::AllReduce,
            dtype,
            op: Some(op),
            root: None,
            count: data.len() / dtype.size(),
        };
        let plan = Plan {
            rank: self.rank(),
            world_size: self.world_size(),
            element: dtype.size(),
            reduction: Reduction::new(dtype, op, self.world_size()),
        };
        let mut scratch = std::mem::take(self.scratch());
        let result = self.all_reduce_with(&call, plan, data, &mut scratch);
        *self.scratch() = scratch;
        result
    }

    fn all_reduce_with(
        &mut self,
        call: &Call,
        plan: Plan,
        data: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<()> {
        let size = plan.reduction.accumulator_size();
        if data.len() > ONE_HOP_BYTES && self.topology().is_hierarchical() {
            let place = self.topology().place(plan.rank);
            let bytes = Hierarchical::accumulator_bytes(&plan, &place, data.len());
            let accumulator = accumulator(scratch, bytes);
            let mut exchange = Hierarchical::new(plan, place, data, accumulator);
            return self.perform(call, &mut exchange);
        }
        if data.len() > ONE_HOP_BYTES && plan.world_size > 1 {
            let mut exchange = Sliced {
                plan,
                data,
                accumulator: accumulator(scratch, BURST / plan.element * size),
                reduced: 0,
                turn: 0,
                folded: 0,
            };
            return self.perform(call, &mut exchange);
        }
        let accumulator = accumulator(scratch, data.len() / plan.element * size);
        let mut exchange = OneHop {
            plan,
            data,
            accumulator,
            turn: 0,
        };
        self.perform(call, &mut exchange)?;
        plan.reduction.finish(data, accumulator);
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
