//! Barrier: every rank waits for every rank's header.

use super::{Exchange, Peers};
use crate::Result;
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::Moved;

struct Barrier;

impl Exchange for Barrier {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (0, 0)
    }

    fn advance(&mut self, _peers: &mut Peers) -> Moved {
        Ok(false)
    }
}

impl Communicator {
    pub(crate) fn barrier(&mut self) -> Result<()> {
        let call = Call::without_elements(Collective::Barrier, None);
        self.perform(&call, &mut Barrier)
    }
}
