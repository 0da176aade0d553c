//! A rank's standing in its group: whether the group still works, and who has
//! left it.

use std::sync::Arc;

use crate::fault::Fault;
use crate::store::StoreClient;
use crate::{Error, Result};

/// The group's fault, and the store through which the ranks tell each other.
pub(crate) struct Membership {
    fault: Arc<Fault>,
    /// `None` in a group of one.
    store: Option<StoreClient>,
}

impl Membership {
    /// The membership of a group of one.
    pub(crate) fn single() -> Self {
        Self {
            fault: Arc::new(Fault::new()),
            store: None,
        }
    }

    /// The membership that `store` keeps. It ends when this is dropped.
    pub(crate) fn new(store: StoreClient) -> Self {
        Self {
            fault: Arc::clone(store.fault()),
            store: Some(store),
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

    /// Whether `rank` has left the group in good order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.store.as_ref().is_some_and(|store| store.left(rank))
    }
}
