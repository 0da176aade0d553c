//! What is wrong with a rank's arguments: an error on every rank, since the
//! others would wait for this one otherwise.

use crate::call::Call;
use crate::communicator::Communicator;
use crate::{Error, Result};

impl Communicator {
    /// Records that this rank's arguments are wrong, on all ranks.
    pub(super) fn refuse(&mut self, call: &Call, problem: &str) -> Error {
        let name = self.next_name(call);
        let rank = self.job_rank();
        self.fail(Error::usage(format!("{name} on rank {rank}: {problem}")))
    }

    /// Refuses a root that is no rank of the group.
    pub(super) fn check_root(&mut self, call: &Call, root: usize) -> Result<()> {
        if root < self.world_size() {
            return Ok(());
        }
        let world_size = self.world_size();
        Err(self.refuse(
            call,
            &format!("there is no rank {root} in a group of {world_size} that could be the root"),
        ))
    }

    /// Refuses a buffer that does not hold one block for each rank. Both come with
    /// their name and length in bytes.
    pub(super) fn check_blocks(
        &mut self,
        call: &Call,
        (whole, whole_len): (&str, usize),
        (block, block_len): (&str, usize),
    ) -> Result<()> {
        let world_size = self.world_size();
        if block_len.checked_mul(world_size) == Some(whole_len) {
            return Ok(());
        }
        let size = call.dtype.size();
        Err(self.refuse(
            call,
            &format!(
                "`{whole}` holds {} elements and has to hold {world_size} x {}, every rank's \
                 `{block}`",
                whole_len / size,
                block_len / size
            ),
        ))
    }
}
