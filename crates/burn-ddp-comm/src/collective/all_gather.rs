//! All-gather: every rank sends its elements to every other, directly.

use super::direct::{Direct, Incoming, Outgoing};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, Result};

impl Communicator {
    /// Gathers every rank's `data` in `out`, in rank order.
    pub(crate) fn all_gather(&mut self, dtype: DType, data: &[u8], out: &mut [u8]) -> Result<()> {
        let call = Call::with_elements(Collective::AllGather, dtype, data.len());
        self.check_blocks(&call, ("out", out.len()), ("data", data.len()))?;
        let own = self.rank() * data.len();
        out[own..own + data.len()].copy_from_slice(data);
        let world_size = self.world_size();
        self.perform(
            &call,
            &mut Direct {
                outgoing: Some(Outgoing::same(data, None)),
                incoming: Some(Incoming::blocks(out, world_size)),
            },
        )
    }
}
