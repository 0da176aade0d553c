//! All-to-all: every rank sends every other its block, directly.

use super::direct::{Direct, Incoming, Outgoing};
use super::variable::{Arriving, Variable};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, Result};

impl Communicator {
    /// Sends block *i* of `data` to rank *i* and puts rank *i*'s in block *i* of
    /// `out`.
    pub(crate) fn all_to_all(&mut self, dtype: DType, data: &[u8], out: &mut [u8]) -> Result<()> {
        let world_size = self.world_size();
        let call = Call::with_elements(Collective::AllToAll, dtype, data.len());
        let block = data.len() / world_size;
        if !(data.len() / dtype.size()).is_multiple_of(world_size) || out.len() != data.len() {
            return Err(self.refuse(
                &call,
                &format!(
                    "`data` holds {} elements and `out` {}: they have to hold as many, a \
                     multiple of {world_size}, a block for each rank",
                    call.count,
                    out.len() / dtype.size()
                ),
            ));
        }
        let own = self.rank() * block;
        out[own..own + block].copy_from_slice(&data[own..own + block]);
        self.perform(
            &call,
            &mut Direct {
                outgoing: Some(Outgoing::blocks(data, world_size)),
                incoming: Some(Incoming::blocks(out, world_size)),
            },
        )
    }

    /// Sends `parts[i]` to rank *i*, and returns what each rank sent here.
    pub(crate) fn all_to_all_variable(
        &mut self,
        dtype: DType,
        parts: &[&[u8]],
    ) -> Result<Vec<Vec<u8>>> {
        let call = Call {
            dtype,
            ..Call::without_elements(Collective::AllToAllVariable, None)
        };
        if parts.len() != self.world_size() {
            return Err(self.refuse(
                &call,
                &format!(
                    "there are {} parts, and have to be {}, one for each rank",
                    parts.len(),
                    self.world_size()
                ),
            ));
        }
        let rank = self.rank();
        let mut exchange = Variable {
            outgoing: |to: usize| Some(parts[to]),
            incoming: (0..parts.len())
                .map(|from| (from != rank).then(|| Arriving::elements(dtype)))
                .collect(),
        };
        self.perform(&call, &mut exchange)?;
        Ok(exchange.into_bodies(parts[rank]))
    }
}
