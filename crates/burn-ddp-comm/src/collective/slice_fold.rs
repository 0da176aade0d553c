//! The fold of one slice of the elements on the rank that owns it, from what all
//! ranks send it, in rank order and in place.

use super::Peers;
use super::all_reduce::{Plan, Scratch, accumulator, fold};
use crate::peer::{BURST, Moved, Stop};

/// Folds this rank's slice as the others' elements of it arrive, as segment 1 of
/// their messages.
pub(super) struct SliceFold<'a> {
    pub(super) plan: Plan,
    accumulator: &'a mut [u8],
    /// Bytes of the slice that are reduced.
    reduced: usize,
    /// The rank whose elements of the current piece are being folded.
    turn: usize,
    /// Bytes of the current piece that are folded from that rank.
    folded: usize,
}

impl<'a> SliceFold<'a> {
    pub(super) fn new(plan: Plan, scratch: &'a mut Scratch) -> Self {
        let bytes = BURST / plan.element * plan.reduction.accumulator_size();
        Self {
            plan,
            accumulator: accumulator(scratch, bytes),
            reduced: 0,
            turn: 0,
            folded: 0,
        }
    }

    /// Bytes of the slice that hold their result.
    pub(super) fn reduced(&self) -> usize {
        self.reduced
    }

    /// Reduces as much as has arrived. `slice` begins as this rank's own elements.
    pub(super) fn advance(&mut self, peers: &mut Peers, slice: &mut [u8]) -> Moved {
        if self.plan.world_size == 2 {
            return self.advance_pair(peers, slice);
        }
        let mut moved = false;
        while self.reduced < slice.len() {
            let piece = (slice.len() - self.reduced).min(BURST);
            while self.turn < self.plan.world_size {
                let before = (self.turn, self.folded);
                self.fold_turn(peers, slice, piece)?;
                if before == (self.turn, self.folded) {
                    return Ok(moved);
                }
                moved = true;
            }
            let size = self.plan.reduction.accumulator_size();
            let accumulator = &self.accumulator[..piece / self.plan.element * size];
            self.plan
                .reduction
                .finish(&mut slice[self.reduced..self.reduced + piece], accumulator);
            self.reduced += piece;
            self.turn = 0;
        }
        Ok(moved | pass_ends(peers, slice.len())?)
    }

    /// Folds what has arrived of the current piece from the rank whose turn it
    /// is.
    fn fold_turn(&mut self, peers: &mut Peers, slice: &[u8], piece: usize) -> Result<(), Stop> {
        match &mut peers[self.turn] {
            None => {
                let bytes = &slice[self.reduced..self.reduced + piece];
                fold(&self.plan, self.turn, self.accumulator, 0, bytes);
                self.folded = piece;
            }
            Some(peer) if peer.receiving() == 1 => {
                let limit = piece - self.folded;
                let mut taken = 0;
                peer.read(slice.len(), self.plan.element, limit, |_, bytes| {
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

    /// [`advance`](Self::advance) for two ranks: in one pass over the elements.
    fn advance_pair(&mut self, peers: &mut Peers, slice: &mut [u8]) -> Moved {
        let other = 1 - self.plan.rank;
        let Some(peer) = &mut peers[other] else {
            return Ok(false);
        };
        if peer.receiving() != 1 {
            return Ok(false);
        }
        let moved = peer.read(slice.len(), self.plan.element, usize::MAX, |at, bytes| {
            let target = &mut slice[at..at + bytes.len()];
            self.plan.reduction.pair(target, bytes, other == 0);
        })?;
        self.reduced = match peer.receiving() {
            1 => peer.received().min(slice.len()),
            _ => slice.len(),
        };
        Ok(moved)
    }
}

/// Passes the ends of the peers' messages to the slice, of `len` bytes, that are
/// read up to there.
fn pass_ends(peers: &mut Peers, len: usize) -> Moved {
    let mut moved = false;
    for peer in peers.iter_mut().flatten() {
        if peer.receiving() == 1 {
            moved |= peer.read(len, 1, 0, |_, _| {})?;
        }
    }
    Ok(moved)
}
