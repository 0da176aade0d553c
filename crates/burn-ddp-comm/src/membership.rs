//! A rank's standing in its group: whether the group still works, and who has
//! left it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::fault::Fault;
use crate::flight_recorder::FlightRecorder;
use crate::liveness::Standing;
use crate::store::StoreClient;
use crate::{Error, Result};

/// Names the directory to which a rank writes its flight record when its group
/// fails; none is written where it is not set.
const FLIGHT_DIRECTORY: &str = "BURN_DDP_FLIGHT_DIR";

/// A job's fault, and the store through which its ranks tell each other. All
/// groups that a rank is in share it.
pub(crate) struct Membership {
    /// This rank's number in the job.
    job_rank: usize,
    fault: Arc<Fault>,
    recorder: Arc<FlightRecorder>,
    /// `None` in a group of one.
    store: Option<StoreClient>,
}

impl Membership {
    /// The membership of a group of one.
    pub(crate) fn single() -> Self {
        Self {
            job_rank: 0,
            fault: Arc::new(Fault::new()),
            recorder: Arc::new(FlightRecorder::new(0, 1)),
            store: None,
        }
    }

    /// The membership of rank `job_rank` that `store` keeps. It ends when this is
    /// dropped.
    pub(crate) fn new(job_rank: usize, store: StoreClient) -> Self {
        let membership = Self {
            job_rank,
            fault: Arc::clone(store.fault()),
            recorder: Arc::clone(store.recorder()),
            store: Some(store),
        };
        if let Some(directory) = std::env::var_os(FLIGHT_DIRECTORY).filter(|dir| !dir.is_empty()) {
            membership.write_when_failed(directory.into());
        }
        membership
    }

    /// Has the flight record written to `directory` as soon as the group fails.
    fn write_when_failed(&self, directory: PathBuf) {
        let recorder = Arc::clone(&self.recorder);
        let fault = Arc::downgrade(&self.fault);
        self.fault.on_set(move || {
            let error = fault.upgrade().and_then(|fault| fault.error());
            let reason = error.map_or_else(String::new, |error| error.to_string());
            if let Err(error) = recorder.write(&directory, &reason) {
                tracing::warn!(
                    "could not write the flight record to {} ({FLIGHT_DIRECTORY}): {error}",
                    directory.display()
                );
            }
        });
    }

    /// The recorder of this rank's operations.
    pub(crate) fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.recorder
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

    /// How every rank of the job stands, if the store says so soon.
    pub(crate) fn standings(&self) -> Option<Vec<Standing>> {
        self.store.as_ref()?.standings()
    }

    /// Whether the job's rank `rank` has left it in good order.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.store.as_ref().is_some_and(|store| store.left(rank))
    }
}
