//! Where the ranks of a group that is being set up find each other.

use std::net::IpAddr;
use std::time::Instant;

use serde_bytes::ByteBuf;

use crate::fault::Fault;
use crate::store::StoreClient;
use crate::{Error, ProcessGroup, Result};

/// Through what the ranks of a group in the making exchange what they need to
/// know of each other.
pub(crate) trait Rendezvous: Sync {
    /// Gives `value` as this rank's part of `stage` and returns every rank's, by
    /// rank in the group in the making.
    ///
    /// # Errors
    ///
    /// The fault's; Peer: ranks did not arrive in time.
    fn gather(&self, stage: &str, value: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// What ends every wait.
    fn fault(&self) -> &Fault;

    /// Records that the set-up has failed and tells all ranks.
    fn fail(&self, error: Error) -> Error;

    /// Address of this machine by which other ranks reach it.
    ///
    /// # Errors
    ///
    /// Environment: there is none any more.
    fn local_ip(&self) -> Result<IpAddr>;
}

/// All ranks of a job, at the store.
pub(crate) struct AtStore<'a> {
    pub(crate) store: &'a StoreClient,
    pub(crate) deadline: Instant,
}

impl Rendezvous for AtStore<'_> {
    fn gather(&self, stage: &str, value: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.store.gather(stage, value, self.deadline)
    }

    fn fault(&self) -> &Fault {
        self.store.fault()
    }

    fn fail(&self, error: Error) -> Error {
        self.store.fail(error)
    }

    fn local_ip(&self) -> Result<IpAddr> {
        self.store.local_ip()
    }
}

/// Some ranks of a group, in the group itself: all of its ranks take part in
/// every exchange.
pub(crate) struct InGroup<'a> {
    pub(crate) parent: &'a ProcessGroup,
    /// The ranks in the parent that the new group consists of, in its order.
    pub(crate) members: &'a [usize],
}

impl Rendezvous for InGroup<'_> {
    fn gather(&self, _stage: &str, value: &[u8]) -> Result<Vec<Vec<u8>>> {
        let value = ByteBuf::from(value);
        let mut values = self.parent.all_gather_object(&value)?;
        let mut take = |&rank: &usize| std::mem::take(&mut values[rank]).into_vec();
        Ok(self.members.iter().map(&mut take).collect())
    }

    fn fault(&self) -> &Fault {
        self.parent.membership().fault()
    }

    fn fail(&self, error: Error) -> Error {
        self.parent.membership().fail(error)
    }

    fn local_ip(&self) -> Result<IpAddr> {
        self.parent.membership().local_ip()
    }
}
