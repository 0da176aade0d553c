//! Collectives on objects: anything that serde can encode.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use crate::{Error, Result};

/// Collectives on objects, each of which may take 1 GiB encoded (MessagePack).
impl ProcessGroup {
    /// Returns rank `root`'s value, which is `Some` there and ignored on the
    /// other ranks.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if the root gives
    /// `None`, or a value that can't be encoded, or decoded as `T`.
    #[track_caller]
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        value: Option<T>,
        root: usize,
    ) -> Result<T> {
        let bytes = match &value {
            Some(value) if root == self.rank() => encode(value).map(Some),
            _ => Ok(None),
        };
        let bytes = self.run(|communicator| communicator.broadcast_bytes(bytes, root))?;
        match value {
            Some(value) if root == self.rank() => Ok(value),
            _ => self.decode(root, &bytes),
        }
    }

    /// Returns every rank's value, in rank order.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if a value can't be
    /// encoded, or decoded as `T`.
    #[track_caller]
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let bytes = encode(value);
        let objects = self.run(|communicator| communicator.all_gather_bytes(bytes))?;
        self.decode_all(&objects)
    }

    /// Returns every rank's value on rank `root`, in rank order, and `None` on
    /// the other ranks.
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce); Usage also if there is no rank
    /// `root`, or a value can't be encoded, or decoded as `T`.
    #[track_caller]
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let bytes = encode(value);
        let objects = self.run(|communicator| communicator.gather_bytes(bytes, root))?;
        objects.map(|objects| self.decode_all(&objects)).transpose()
    }

    fn decode_all<T: DeserializeOwned>(&self, objects: &[Vec<u8>]) -> Result<Vec<T>> {
        let objects = objects.iter().enumerate();
        objects
            .map(|(rank, bytes)| self.decode(rank, bytes))
            .collect()
    }

    /// The value that came from `rank`; the group fails if it is no `T`.
    fn decode<T: DeserializeOwned>(&self, rank: usize, bytes: &[u8]) -> Result<T> {
        rmp_serde::from_slice(bytes).map_err(|error| {
            self.fail(Error::usage(format!(
                "the value from rank {} is no {}: {error}",
                self.job_ranks()[rank],
                std::any::type_name::<T>()
            )))
        })
    }
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|error| {
        Error::usage(format!(
            "a {} can't be encoded: {error}",
            std::any::type_name::<T>()
        ))
    })
}
