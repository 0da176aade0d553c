//! A rank's standing in its group: whether the group still works, and who has
//! left it.

use std::net::IpAddr;
use std::sync::Arc;

use crate::fault::Fault;
use crate::store::StoreClient;
use crate::{Error, Result};

/// A job's fault, and the store through which its ranks tell each other. All
/// groups that a rank is in share it.
pub(crate) struct Membership {
    /// This rank's number in the job.
    job_rank: usize,
    fault: Arc<Fault>,
    /// `None` in a group of one.
    store: Option<StoreClient>,
}

impl Membership {
    /// The membership of a group of one.
    pub(crate) fn single() -> Self {
        Self {
            job_rank: 0,
            fault: Arc::new(Fault::new()),
            store: None,
        }
    }

    /// The membership of rank `job_rank` that `store` keeps. It ends when this is
    /// dropped.
    pub(crate) fn new(job_rank: usize, store: StoreClient) -> Self {
        Self {
            job_rank,
            fault: Arc::clone(store.fault()),
            store: Some(store),
        }
    }

    /// This rank's number in the job.
    pub(crate) fn job_rank(&self) -> usize {
        self.job_rank
    }

    /// Address of this machine by which other ranks reach it.
    ///
    /// # Errors
    ///
    /// Environment: there are no others, or the store is gone.
    pub(crate) fn local_ip(&self) -> Result<IpAddr> {
        match &self.store {
            Some(store) => store.local_ip(),
            None => Err(Error::environment("a group of one has no address")),
        }
    }

    /// The group's fault.
    pub(crate) fn fault(&self) -> &Arc<Fault> {
        &self.fault
    }

    /// `Err` with the error that made the group fail, if it has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.fault.check()
    }

    /// The error that made the group fail, if it has failed.
    pub(crate) fn error(&self) -> Option<Error> {
        self.fault.error()
    }

    /// Records that the group has failed and tells the other ranks, unless it
    /// had failed before; returns the error that made it fail.
    pub(crate) fn fail(&self, error: Error) -> Error {
        match &self.store {
            Some(store) => store.fail(error),
            None => self.fault.set(error),
        }
    }

    /// Whether the job's rank `rank` has left it in good order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.store.as_ref().is_some_and(|store| store.left(rank))
    }
}
