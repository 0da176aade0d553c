//! What can go wrong with a loader.

use std::io;

use burn_core::data::dataset::DatasetError;

/// An error of a sampler or loader.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The loader was configured wrongly.
    #[error("{0}")]
    Usage(String),
    /// The data set failed to return an item.
    #[error("batch {batch} of epoch {epoch} can't be loaded: {source}")]
    Dataset {
        /// The epoch.
        epoch: usize,
        /// The batch of this rank, from where the iteration began.
        batch: usize,
        /// What the data set says.
        source: DatasetError,
    },
    /// The data set returned more or fewer items than it was asked for.
    #[error(
        "batch {batch} of epoch {epoch} can't be loaded: the data set returned {returned} items \
         for {asked} indices; its `get_many` must return one per index, in their order"
    )]
    Count {
        /// The epoch.
        epoch: usize,
        /// The batch of this rank, from where the iteration began.
        batch: usize,
        /// Number of indices given.
        asked: usize,
        /// Number of items returned.
        returned: usize,
    },
    /// The data set or the batcher panicked.
    #[error("batch {batch} of epoch {epoch} can't be loaded: {message}")]
    Panic {
        /// The epoch.
        epoch: usize,
        /// The batch of this rank, from where the iteration began.
        batch: usize,
        /// The panic's message.
        message: String,
    },
    /// The system started no thread to load in.
    #[error(
        "{workers} threads to load batches can't be started: {source}; ask for fewer workers (0 \
         loads in the calling thread), or raise the limits on threads and memory (ulimit -u, -v)"
    )]
    Threads {
        /// Number of threads asked for.
        workers: usize,
        /// What the system says.
        source: io::Error,
    },
}

/// Result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
