//! All-gather of as many elements from each rank as it has.

use super::variable::{Arriving, Variable};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, Result};

impl Communicator {
    /// Every rank's `data`, in rank order.
    pub(crate) fn all_gather_variable(
        &mut self,
        dtype: DType,
        data: &[u8],
    ) -> Result<Vec<Vec<u8>>> {
        let call = Call {
            dtype,
            ..Call::without_elements(Collective::AllGatherVariable, None)
        };
        let rank = self.rank();
        let mut exchange = Variable {
            outgoing: |_: usize| Some(data),
            incoming: (0..self.world_size())
                .map(|from| (from != rank).then(|| Arriving::elements(dtype)))
                .collect(),
        };
        self.perform(&call, &mut exchange)?;
        Ok(exchange.into_bodies(data))
    }
}
