//! Reduce-scatter: every rank sends each other its block, and folds what it gets.

use super::slice_fold::SliceFold;
use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::Moved;
use crate::{DType, ReduceOp, Result};

struct ReduceScatter<'a> {
    fold: SliceFold<'a>,
    data: &'a [u8],
    out: &'a mut [u8],
}

impl Exchange for ReduceScatter<'_> {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (1, 1)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let len = self.out.len();
        for peer in peers.iter_mut().flatten() {
            if peer.sending() == 1 {
                let start = peer.rank * len;
                moved |= peer.send(&self.data[start..start + len], len)?;
            }
        }
        Ok(moved | self.fold.advance(peers, self.out)?)
    }
}

impl Communicator {
    /// Fills every rank's `out` with its block of the reduction of all ranks'
    /// `data`.
    pub(crate) fn reduce_scatter(
        &mut self,
        dtype: DType,
        data: &[u8],
        out: &mut [u8],
        op: ReduceOp,
    ) -> Result<()> {
        let mut call = Call::with_elements(Collective::ReduceScatter, dtype, out.len());
        call.op = Some(op);
        self.check_blocks(&call, ("data", data.len()), ("out", out.len()))?;
        let own = self.rank() * out.len();
        out.copy_from_slice(&data[own..own + out.len()]);
        let plan = self.plan(&call, op);
        let mut scratch = std::mem::take(self.scratch());
        let fold = SliceFold::new(plan, &mut scratch);
        let result = self.perform(&call, &mut ReduceScatter { fold, data, out });
        *self.scratch() = scratch;
        result
    }
}
