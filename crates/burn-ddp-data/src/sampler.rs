//! Which samples a rank sees, and in which order.

use std::ops::Range;

use crate::{Error, Result, Shuffle};

/// What happens when the samples don't fill the last batch of every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remainder {
    /// It is filled with samples from the beginning of the epoch, which so occur
    /// twice: every sample is seen, and every batch has the same size.
    #[default]
    Pad,
    /// It is left out: no sample is seen twice, and every batch has the same
    /// size. Shuffled, other samples are left out in every epoch.
    Drop,
    /// It is filled as with [`Pad`](Self::Pad), but repeated samples are marked,
    /// so that an evaluation counts every sample once.
    Mask,
}

/// A sample in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its index in the data set.
    pub index: usize,
    /// `false` where it is padding that must not be counted.
    pub counts: bool,
}

/// The share of one rank: a pure function of its fields and the epoch. The rules,
/// with an example, are in `docs/determinism.md`.
///
/// The epoch's order is one for all ranks. Global batch `k` is made of positions
/// `k·W·b` to `(k+1)·W·b` of it, for `W` ranks and batches of `b`, and rank `r`
/// has the `r`-th run of `b` of these. So every rank has equally many batches,
/// no two share a sample (other than padding), and a run that has seen the
/// first `p` positions can go on from there with another number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardedSampler {
    len: usize,
    batch_size: usize,
    rank: usize,
    world_size: usize,
    seed: Option<u64>,
    remainder: Remainder,
}

impl ShardedSampler {
    /// The share of `rank` among `world_size` of a data set of `len` samples, in
    /// batches of `batch_size` per rank; in order, every rank's last batch padded.
    ///
    /// # Errors
    ///
    /// A usage error for a batch size or world size of zero, a rank that is not
    /// below the world size, an empty data set, or more samples than a `usize`
    /// counts.
    pub fn new(len: usize, batch_size: usize, rank: usize, world_size: usize) -> Result<Self> {
        let usage = |message: String| Err(Error::Usage(message));
        if len == 0 {
            return usage("the data set is empty".to_owned());
        }
        if batch_size == 0 {
            return usage("the batch size is 0: it must be at least 1".to_owned());
        }
        if world_size == 0 {
            return usage("the world size is 0: it must be at least 1".to_owned());
        }
        if rank >= world_size {
            return usage(format!(
                "rank {rank} does not exist in a world of {world_size}: ranks go from 0 to {}",
                world_size - 1
            ));
        }
        // Positions go up to the data set's length plus one padded step.
        let last = batch_size
            .checked_mul(world_size)
            .and_then(|global| global.checked_add(len));
        if last.is_none() {
            return usage(format!(
                "batches of {batch_size} on {world_size} ranks are more samples than can be counted"
            ));
        }
        Ok(Self {
            len,
            batch_size,
            rank,
            world_size,
            seed: None,
            remainder: Remainder::default(),
        })
    }

    /// Shuffles, in every epoch differently. The seed must be the same on every
    /// rank.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets what happens to the last batch.
    ///
    /// # Errors
    ///
    /// A usage error for [`Remainder::Drop`] when there are fewer samples than
    /// one batch of every rank, so that nothing would be left.
    pub fn remainder(mut self, remainder: Remainder) -> Result<Self> {
        self.remainder = remainder;
        if self.batches_from(0) == 0 {
            return Err(Error::Usage(format!(
                "{} samples don't fill one batch of {} on each of {} ranks, so dropping the last \
                 batch leaves none: use smaller batches or fewer ranks, or pad",
                self.len, self.batch_size, self.world_size
            )));
        }
        Ok(self)
    }

    /// Number of samples in the data set.
    pub fn dataset_len(&self) -> usize {
        self.len
    }

    /// Number of samples in a batch of one rank.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Number of samples that all ranks take in one step.
    pub fn global_batch_size(&self) -> usize {
        self.batch_size * self.world_size
    }

    /// Number of batches of every rank in what is left of an epoch after
    /// `position` samples.
    pub fn batches_from(&self, position: usize) -> usize {
        let left = self.len.saturating_sub(position);
        match self.remainder {
            Remainder::Drop => left / self.global_batch_size(),
            Remainder::Pad | Remainder::Mask => left.div_ceil(self.global_batch_size()),
        }
    }

    /// Number of batches of every rank in an epoch.
    pub fn batches(&self) -> usize {
        self.batches_from(0)
    }

    /// Position in the epoch after `batches` more batches from `position` on: what
    /// a checkpoint keeps.
    pub fn position_after(&self, position: usize, batches: usize) -> usize {
        let seen = batches.saturating_mul(self.global_batch_size());
        self.len.min(position.saturating_add(seen))
    }

    /// The samples of this rank's batch number `batch` of `epoch`, counted from
    /// `position`: `batch_size` of them.
    pub fn batch(&self, epoch: usize, position: usize, batch: usize) -> Vec<Sample> {
        let first = batch * self.batch_size;
        self.samples(epoch, position, first..first + self.batch_size)
    }

    /// Numbers `items` of this rank's samples of `epoch`, counted from `position`.
    pub(crate) fn samples(
        &self,
        epoch: usize,
        position: usize,
        items: Range<usize>,
    ) -> Vec<Sample> {
        let shuffle = self
            .seed
            .map(|seed| Shuffle::new(self.len, seed, epoch as u64));
        let of = |item: usize| {
            let (batch, within) = (item / self.batch_size, item % self.batch_size);
            let position =
                position + batch * self.global_batch_size() + self.rank * self.batch_size + within;
            let wrapped = position % self.len;
            Sample {
                index: shuffle.map_or(wrapped, |shuffle| shuffle.get(wrapped)),
                counts: position < self.len || self.remainder != Remainder::Mask,
            }
        };
        items.map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(len: usize, b: usize, rank: usize, world: usize, how: Remainder) -> ShardedSampler {
        ShardedSampler::new(len, b, rank, world)
            .and_then(|sampler| sampler.shuffle(3).remainder(how))
            .expect("valid")
    }

    /// What all ranks see from `position` on, global batch after global batch.
    fn global(world: usize, position: usize, of: impl Fn(usize) -> ShardedSampler) -> Vec<Sample> {
        let batches = of(0).batches_from(position);
        (0..batches)
            .flat_map(|batch| (0..world).map(move |rank| (batch, rank)))
            .flat_map(|(batch, rank)| of(rank).batch(1, position, batch))
            .collect()
    }

    #[test]
    fn the_worked_example_of_the_documentation() {
        // Ten samples in order, two ranks, batches of two.
        let of = |rank| ShardedSampler::new(10, 2, rank, 2).expect("valid");
        let indices = |rank, batch| -> Vec<usize> {
            let samples = of(rank).batch(0, 0, batch);
            samples.iter().map(|sample| sample.index).collect()
        };
        assert_eq!(of(0).batches(), 3);
        assert_eq!([indices(0, 0), indices(1, 0)], [[0, 1], [2, 3]]);
        assert_eq!([indices(0, 1), indices(1, 1)], [[4, 5], [6, 7]]);
        assert_eq!([indices(0, 2), indices(1, 2)], [[8, 9], [0, 1]]);
        let masked = of(1).remainder(Remainder::Mask).expect("valid");
        assert!(masked.batch(0, 0, 2).iter().all(|sample| !sample.counts));
        let dropped = of(1).remainder(Remainder::Drop).expect("valid");
        assert_eq!(dropped.batches(), 2);

        // Two ranks stop after one step, and three go on.
        let position = of(0).position_after(0, 1);
        assert_eq!(position, 4);
        let rest = [0, 1, 2].map(|rank| {
            let sampler = ShardedSampler::new(10, 2, rank, 3).expect("valid");
            assert_eq!(sampler.batches_from(position), 1);
            let samples = sampler.batch(0, position, 0);
            [samples[0].index, samples[1].index]
        });
        assert_eq!(rest, [[4, 5], [6, 7], [8, 9]]);
    }

    #[test]
    fn bad_numbers_are_named() {
        let text = |result: Result<ShardedSampler>| result.expect_err("invalid").to_string();
        assert!(text(ShardedSampler::new(0, 1, 0, 1)).contains("empty"));
        assert!(text(ShardedSampler::new(1, 0, 0, 1)).contains("batch size is 0"));
        assert!(text(ShardedSampler::new(1, 1, 0, 0)).contains("world size is 0"));
        assert!(text(ShardedSampler::new(1, 1, 2, 2)).contains("rank 2 does not exist"));
        assert!(text(ShardedSampler::new(1, usize::MAX, 0, 2)).contains("can be counted"));
        let few = ShardedSampler::new(7, 4, 0, 2).and_then(|s| s.remainder(Remainder::Drop));
        assert!(text(few).contains("7 samples"));
    }

    proptest! {
        #[test]
        fn every_sample_is_counted_once_when_masked(
            len in 1usize..400, b in 1usize..20, world in 1usize..9,
        ) {
            let seen = global(world, 0, |rank| sampler(len, b, rank, world, Remainder::Mask));
            let mut counted: Vec<usize> =
                seen.iter().filter(|s| s.counts).map(|s| s.index).collect();
            counted.sort_unstable();
            prop_assert!(counted.into_iter().eq(0..len));
        }

        #[test]
        fn every_sample_is_seen_when_padded_and_none_twice_when_dropped(
            len in 1usize..400, b in 1usize..20, world in 1usize..9,
        ) {
            let padded = global(world, 0, |rank| sampler(len, b, rank, world, Remainder::Pad));
            let set: std::collections::HashSet<usize> = padded.iter().map(|s| s.index).collect();
            prop_assert_eq!(set.len(), len);
            prop_assert!(padded.iter().all(|s| s.counts));
            prop_assert!(padded.len() < len + b * world);

            if len >= b * world {
                let dropped = global(world, 0, |rank| sampler(len, b, rank, world, Remainder::Drop));
                let set: std::collections::HashSet<usize> =
                    dropped.iter().map(|s| s.index).collect();
                prop_assert_eq!(set.len(), dropped.len());
                prop_assert!(len - dropped.len() < b * world);
            }
        }

        /// After `done` batches of one world, another world sees exactly what is
        /// left, in the same order.
        #[test]
        fn a_run_resumes_at_another_world_size(
            len in 1usize..400, b in 1usize..10, world in 1usize..6,
            done in 0usize..50, other_b in 1usize..10, other in 1usize..6,
        ) {
            let first = sampler(len, b, 0, world, Remainder::Mask);
            let position = first.position_after(0, done.min(first.batches()));
            let order = |b, world, position| -> Vec<usize> {
                let seen = global(world, position, |rank| {
                    sampler(len, b, rank, world, Remainder::Mask)
                });
                seen.iter().filter(|s| s.counts).map(|s| s.index).collect()
            };
            let whole = order(b, world, 0);
            prop_assert_eq!(order(other_b, other, position), &whole[position..]);
        }

        #[test]
        fn every_batch_is_full(
            len in 1usize..400, b in 1usize..20, world in 1usize..9, position in 0usize..400,
        ) {
            for how in [Remainder::Pad, Remainder::Mask] {
                for rank in 0..world {
                    let sampler = sampler(len, b, rank, world, how);
                    for batch in 0..sampler.batches_from(position) {
                        prop_assert_eq!(sampler.batch(0, position, batch).len(), b);
                    }
                }
            }
        }
    }
}
