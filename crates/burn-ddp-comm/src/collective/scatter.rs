//! Scatter: the root sends every rank its block.

use super::direct::{Direct, Incoming, Outgoing};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, Result};

impl Communicator {
    /// Fills every rank's `out` with its block of the root's `data`.
    pub(crate) fn scatter(
        &mut self,
        dtype: DType,
        data: &[u8],
        out: &mut [u8],
        root: usize,
    ) -> Result<()> {
        let mut call = Call::with_elements(Collective::Scatter, dtype, out.len());
        call.root = Some(root);
        self.check_root(&call, root)?;
        if self.rank() != root {
            return self.perform(
                &call,
                &mut Direct {
                    outgoing: None,
                    incoming: Some(Incoming::one(out, root)),
                },
            );
        }
        self.check_blocks(&call, ("data", data.len()), ("out", out.len()))?;
        let own = root * out.len();
        out.copy_from_slice(&data[own..own + out.len()]);
        let world_size = self.world_size();
        self.perform(
            &call,
            &mut Direct {
                outgoing: Some(Outgoing::blocks(data, world_size)),
                incoming: None,
            },
        )
    }
}
