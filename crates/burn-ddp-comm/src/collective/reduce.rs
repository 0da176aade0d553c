//! Reduce: an all-reduce whose results go to the root alone.

use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::{DType, ReduceOp, Result};

impl Communicator {
    /// Replaces `root`'s `data` by the reduction of all ranks'.
    pub(crate) fn reduce(
        &mut self,
        dtype: DType,
        data: &mut [u8],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let mut call = Call::with_elements(Collective::Reduce, dtype, data.len());
        (call.op, call.root) = (Some(op), Some(root));
        self.check_root(&call, root)?;
        self.reduce_to(&call, data, op, Some(root))
    }
}
