//! Where a run is, as its checkpoints keep it.

use std::path::Path;

use anyhow::bail;
use serde::{Deserialize, Serialize};

use crate::dataset::Images;
use crate::options::Options;

/// All that a run needs to go on, besides its parameters and the optimizer's
/// state: order and shift of images, dropout and learning rate are functions of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunState {
    /// The epoch that is under way.
    pub(crate) epoch: usize,
    /// Images that all ranks together have consumed of it.
    pub(crate) position: usize,
    /// Optimizer steps taken.
    pub(crate) step: u64,
    seed: u64,
    epochs: usize,
    batch_size: usize,
    lr: f64,
    /// Number of training images.
    images: usize,
    /// Their checksum.
    checksum: u32,
}

impl RunState {
    /// The start of a run.
    pub(crate) fn new(options: &Options, images: &Images) -> Self {
        Self {
            epoch: 0,
            position: 0,
            step: 0,
            seed: options.seed,
            epochs: options.epochs,
            batch_size: options.batch_size,
            lr: options.lr,
            images: images.count(),
            checksum: images.checksum(),
        }
    }

    /// Counts a step of `images` images over all ranks. The last one of an epoch
    /// may be padded with images that were already seen.
    pub(crate) fn advance(&mut self, images: usize) {
        self.position = self.images.min(self.position + images);
        self.step += 1;
    }

    /// Goes on to the next epoch.
    pub(crate) fn end_epoch(&mut self) {
        self.epoch += 1;
        self.position = 0;
    }

    /// The part of the run that is done half-way through a step of `images`
    /// images.
    pub(crate) fn progress(&self, images: usize) -> f64 {
        let epochs = (self.position as f64 + images as f64 / 2.0) / self.images as f64;
        (self.epoch as f64 + epochs) / self.epochs as f64
    }

    /// The seed of `rank`'s dropout and shift in the coming step.
    pub(crate) fn step_seed(&self, rank: usize) -> u64 {
        [rank as u64, self.epoch as u64, self.position as u64]
            .into_iter()
            .fold(self.seed, |hash, word| mix(hash ^ mix(word)))
    }

    /// Where the run that begins as `fresh` goes on, given the checkpoint `self`
    /// in `path` of another run, and in what the two runs differ.
    ///
    /// # Errors
    ///
    /// When the run can't go on from there.
    pub(crate) fn resume(self, fresh: &Self, path: &Path) -> anyhow::Result<(Self, Vec<String>)> {
        let path = path.display();
        let remedy = "or start without `--resume` and with another `--checkpoint-dir`";
        if self.seed != fresh.seed {
            bail!(
                "can't resume {path} with `--seed {}`: the order of images depends on the seed, \
                 which was {}; give `--seed {1}`, {remedy}",
                fresh.seed,
                self.seed
            );
        }
        if (self.images, self.checksum) != (fresh.images, fresh.checksum) {
            bail!(
                "can't resume {path} on other training images: it was made with {} (checksum \
                 {:08x}), and these are {} (checksum {:08x}); give the same `--data-dir` and \
                 `--limit`, {remedy}",
                self.images,
                self.checksum,
                fresh.images,
                fresh.checksum
            );
        }
        let mut differences = Vec::new();
        let mut compare = |flag: &str, before: String, now: String| {
            if before != now {
                differences.push(format!("`{flag}` was {before} and is {now}"));
            }
        };
        compare(
            "--epochs",
            self.epochs.to_string(),
            fresh.epochs.to_string(),
        );
        let sizes = (self.batch_size, fresh.batch_size);
        compare("--batch-size", sizes.0.to_string(), sizes.1.to_string());
        compare("--lr", self.lr.to_string(), fresh.lr.to_string());
        let state = Self {
            epoch: self.epoch,
            position: self.position,
            step: self.step,
            ..fresh.clone()
        };
        Ok((state, differences))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
/// pseudorandom number generators").
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn state() -> RunState {
        RunState {
            epoch: 0,
            position: 0,
            step: 0,
            seed: 1,
            epochs: 2,
            batch_size: 10,
            lr: 0.1,
            images: 100,
            checksum: 5,
        }
    }

    #[test]
    fn progress_goes_from_zero_to_one() {
        let mut state = state();
        assert_eq!(state.progress(20), 0.05);
        for _ in 0..5 {
            state.advance(20);
        }
        state.end_epoch();
        assert_eq!((state.epoch, state.position, state.step), (1, 0, 5));
        assert_eq!(state.progress(0), 0.5);
    }

    #[test]
    fn every_rank_and_step_has_another_seed() {
        let mut seeds = HashSet::new();
        for epoch in 0..5 {
            for step in 0..20 {
                let mut state = state();
                (state.epoch, state.position) = (epoch, step * 20);
                seeds.extend((0..4).map(|rank| state.step_seed(rank)));
            }
        }
        assert_eq!(seeds.len(), 5 * 20 * 4);
    }

    #[test]
    fn a_run_goes_on_where_it_was() {
        let mut saved = state();
        saved.advance(20);
        let (resumed, differences) = saved.clone().resume(&state(), Path::new("c")).unwrap();
        assert_eq!(resumed, saved);
        assert!(differences.is_empty());
    }

    #[test]
    fn what_changes_the_result_is_said() {
        let fresh = RunState {
            epochs: 3,
            batch_size: 5,
            lr: 0.2,
            ..state()
        };
        let (resumed, differences) = state().resume(&fresh, Path::new("c")).unwrap();
        assert_eq!((resumed.epochs, resumed.batch_size), (3, 5));
        assert_eq!(
            differences,
            [
                "`--epochs` was 2 and is 3",
                "`--batch-size` was 10 and is 5",
                "`--lr` was 0.1 and is 0.2"
            ]
        );
    }

    #[test]
    fn another_seed_or_other_images_are_refused() {
        let refuse = |fresh: &RunState| {
            let result = state().resume(fresh, Path::new("some/checkpoint"));
            let text = result.expect_err("it differs").to_string();
            assert!(text.contains("some/checkpoint"), "{text}");
            text
        };
        let text = refuse(&RunState { seed: 2, ..state() });
        assert!(text.contains("give `--seed 1`"), "{text}");
        let text = refuse(&RunState {
            images: 99,
            ..state()
        });
        assert!(text.contains("made with 100 (") && text.contains("are 99 ("));
        let text = refuse(&RunState {
            checksum: 6,
            ..state()
        });
        assert!(text.contains("`--data-dir`"), "{text}");
    }
}
