//! What can go wrong with a loader.

use burn_core::data::dataset::DatasetError;

/// An error of a sampler or loader.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The loader was configured wrongly.
    #[error("{0}")]
    Usage(String),
    /// The data set failed to return an item.
    #[error("batch {batch} of epoch {epoch} can't be loaded: {source}")]
    Dataset {
        /// The epoch.
        epoch: usize,
        /// The batch of this rank, from the epoch's first.
        batch: usize,
        /// What the data set says.
        source: DatasetError,
    },
    /// The data set or the batcher panicked.
    #[error("batch {batch} of epoch {epoch} can't be loaded: {message}")]
    Panic {
        /// The epoch.
        epoch: usize,
        /// The batch of this rank, from the epoch's first.
        batch: usize,
        /// The panic's message.
        message: String,
    },
}

/// Result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
