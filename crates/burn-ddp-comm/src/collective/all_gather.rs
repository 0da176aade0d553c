//! All-gather: every rank sends its elements to every other, directly.

use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::Moved;
use crate::{DType, Error, Result};

struct AllGather<'a> {
    own: &'a [u8],
    out: &'a mut [u8],
}

impl Exchange for AllGather<'_> {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (1, 1)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let len = self.own.len();
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            if peer.sending() == 1 {
                moved |= peer.send(self.own, len)?;
            }
            if peer.receiving() == 1 {
                moved |= peer.receive(&mut self.out[rank * len..(rank + 1) * len])?;
            }
        }
        Ok(moved)
    }
}

impl Communicator {
    /// Gathers every rank's `data` in `out`, in rank order.
    pub(crate) fn all_gather(&mut self, dtype: DType, data: &[u8], out: &mut [u8]) -> Result<()> {
        let call = Call {
            collective: Collective::AllGather,
            dtype,
            op: None,
            root: None,
            count: data.len() / dtype.size(),
        };
        if data.len().checked_mul(self.world_size()) != Some(out.len()) {
            return Err(self.refuse(
                &call,
                &format!(
                    "`out` holds {} elements and has to hold {} x {}, every rank's `data`",
                    out.len() / dtype.size(),
                    self.world_size(),
                    call.count
                ),
            ));
        }
        let own = self.rank() * data.len();
        out[own..own + data.len()].copy_from_slice(data);
        self.perform(&call, &mut AllGather { own: data, out })
    }

    /// Records that this rank's arguments are wrong, on all ranks: they would
    /// wait for this one otherwise.
    pub(super) fn refuse(&mut self, call: &Call, problem: &str) -> Error {
        let name = self.next_name(call);
        let rank = self.job_rank();
        self.fail(Error::usage(format!("{name} on rank {rank}: {problem}")))
    }
}
