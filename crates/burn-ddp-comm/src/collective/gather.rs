//! Gather: every rank sends its elements to the root.

use super::direct::{Direct, Incoming, Outgoing};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, Result};

impl Communicator {
    /// Gathers every rank's `data` in the root's `out`, in rank order.
    pub(crate) fn gather(
        &mut self,
        dtype: DType,
        data: &[u8],
        out: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let mut call = Call::with_elements(Collective::Gather, dtype, data.len());
        call.root = Some(root);
        self.check_root(&call, root)?;
        if self.rank() != root {
            return self.perform(
                &call,
                &mut Direct {
                    outgoing: Some(Outgoing::same(data, Some(root))),
                    incoming: None,
                },
            );
        }
        self.check_blocks(&call, ("out", out.len()), ("data", data.len()))?;
        let own = root * data.len();
        out[own..own + data.len()].copy_from_slice(data);
        let world_size = self.world_size();
        self.perform(
            &call,
            &mut Direct {
                outgoing: None,
                incoming: Some(Incoming::blocks(out, world_size)),
            },
        )
    }
}
