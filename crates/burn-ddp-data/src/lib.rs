//! Sharded sampling and data loading for [Burn](https://burn.dev): disjoint
//! shards, the same number of batches on every rank, exact evaluation, and a
//! shuffle in constant memory that resumes anywhere, at any world size.
//!
//! ```
//! use burn_core::data::dataloader::batcher::Batcher;
//! use burn_core::data::dataset::InMemDataset;
//! use burn_core::tensor::Device;
//! use burn_ddp_data::{Remainder, ShardedDataLoader};
//!
//! struct Sum;
//! impl Batcher<u64, u64> for Sum {
//!     fn batch(&self, items: Vec<u64>, _device: &Device) -> u64 {
//!         items.into_iter().sum()
//!     }
//! }
//!
//! # fn main() -> burn_ddp_data::Result<()> {
//! let mut total = 0;
//! for rank in 0..2 {
//!     let loader = ShardedDataLoader::builder(InMemDataset::new((0..10).collect()), Sum)
//!         .batch_size(5)
//!         .shuffle(42)
//!         .shard(rank, 2)
//!         .remainder(Remainder::Drop)
//!         .build()?;
//!     for batch in loader.epoch(0) {
//!         total += batch?;
//!     }
//! }
//! assert_eq!(total, 45);
//! # Ok(())
//! # }
//! ```

mod epoch;
mod error;
mod loader;
mod sampler;
mod shuffle;
mod worker_pool;

pub use epoch::{Epoch, MaskedBatch, MaskedEpoch};
pub use error::{Error, Result};
pub use loader::{ShardedDataLoader, ShardedDataLoaderBuilder};
pub use sampler::{Remainder, Sample, ShardedSampler};
pub use shuffle::Shuffle;
