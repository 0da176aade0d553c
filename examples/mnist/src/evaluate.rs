//! The accuracy on the test images, each counted once.

use std::sync::Arc;

use anyhow::{Context, ensure};
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_ddp::{Ddp, ProcessGroup, ReduceOp};
use burn_ddp_data::{Remainder, ShardedDataLoader};
use serde::Serialize;

use crate::batch::{Batch, ImageBatcher};
use crate::dataset::{Images, Item};
use crate::model::Cnn;

/// Images per rank and batch.
const BATCH_SIZE: usize = 100;

/// How many test images were recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Score {
    /// Recognised ones.
    pub(crate) correct: usize,
    /// All of them.
    pub(crate) images: usize,
}

impl Score {
    /// The part that was recognised, from 0 to 1.
    pub(crate) fn accuracy(self) -> f64 {
        self.correct as f64 / self.images as f64
    }
}

/// Evaluates a model on all ranks, each on its shard of the test images.
pub(crate) struct Evaluator {
    loader: ShardedDataLoader<Item, Batch>,
    group: ProcessGroup,
    images: usize,
}

impl Evaluator {
    /// An evaluator on `device`, which is not differentiated.
    pub(crate) fn new(
        images: Arc<Images>,
        device: &Device,
        group: &ProcessGroup,
    ) -> anyhow::Result<Self> {
        let count = images.len();
        let loader = ShardedDataLoader::builder(images, ImageBatcher)
            .batch_size(BATCH_SIZE)
            .remainder(Remainder::Mask)
            .shard(group.rank(), group.world_size())
            .device(device)
            .build()
            .context("can't load the test images")?;
        Ok(Self {
            loader,
            group: group.clone(),
            images: count,
        })
    }

    /// The score of all ranks together. Collective.
    pub(crate) fn score(&self, model: &Ddp<Cnn>) -> anyhow::Result<Score> {
        let model = model.valid();
        let mut counts = [0i64; 2];
        for batch in self.loader.masked_epoch(0) {
            let masked = batch?;
            let valid = masked.valid;
            if valid > 0 {
                let scores = model.forward(|m| m.forward(masked.batch.images));
                counts[0] += correct(scores, masked.batch.labels, valid);
                counts[1] += valid as i64;
            }
        }
        self.group.all_reduce(&mut counts, ReduceOp::Sum)?;
        let [correct, images] = counts.map(|count| count as usize);
        ensure!(
            images == self.images,
            "evaluation counted {images} of {} test images",
            self.images
        );
        Ok(Score { correct, images })
    }
}

/// How many of the first `valid` rows of `scores`, `[batch, classes]`, are
/// highest at their label.
fn correct(scores: Tensor<2>, labels: Tensor<1, Int>, valid: usize) -> i64 {
    let predicted: Tensor<1, Int> = scores.argmax(1).flatten(0, 1);
    let hits = predicted.equal(labels).int().slice(0..valid);
    hits.sum().into_scalar()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_not_counted() {
        let device = Device::flex();
        let scores = [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]];
        let scores = Tensor::<2>::from_floats(scores, &device);
        let labels = Tensor::<1, Int>::from_ints([1, 1, 1, 1], &device);
        assert_eq!(correct(scores.clone(), labels.clone(), 4), 3);
        assert_eq!(correct(scores, labels, 2), 1);
    }
}
