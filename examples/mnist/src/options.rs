//! The command line.

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};
use serde::Serialize;

/// Where checkpoints go unless the command line says otherwise.
pub(crate) const DEFAULT_CHECKPOINT_DIR: &str = "target/mnist-checkpoints";

/// Trains a convolutional network on MNIST digits, data-parallel.
///
/// Alone it trains in one process; started as several ranks (`burnrun
/// --nproc-per-node 2 -- mnist`) they average their gradients.
#[derive(Clone, Debug, Parser)]
#[command(name = "mnist", version, args_override_self = true)]
pub(crate) struct Options {
    /// Passes over the training images
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = at_least_one)]
    pub(crate) epochs: usize,

    /// Images per step and rank
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch_size: usize,

    /// Peak learning rate: it rises to this over the first tenth of the run and
    /// falls to zero along a cosine
    #[arg(long, default_value_t = 0.02, value_name = "RATE", value_parser = positive)]
    pub(crate) lr: f64,

    /// Seed of initial parameters, order and shift of images, and dropout
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,

    /// Directory of MNIST-format IDX files, plain or gzip: MNIST, Fashion-MNIST
    /// [default: the 8,000 + 2,000 digits that come with this program's source]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Train on the first N images only
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) limit: Option<usize>,

    /// Directory of checkpoints [default: target/mnist-checkpoints, where a new
    /// run replaces the one before]
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,

    /// Save a checkpoint every N steps too, not only after each epoch
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) checkpoint_every: Option<usize>,

    /// Go on from the newest checkpoint of the checkpoint directory
    #[arg(long)]
    pub(crate) resume: bool,

    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    pub(crate) device: DeviceKind,

    /// Write the summary to FILE as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DeviceKind {
    /// One CPU core per rank
    Cpu,
    /// One CUDA GPU per rank
    Gpu,
}

impl Options {
    /// The directory of checkpoints.
    pub(crate) fn checkpoint_dir(&self) -> &Path {
        self.checkpoint_dir
            .as_deref()
            .unwrap_or(Path::new(DEFAULT_CHECKPOINT_DIR))
    }

    /// Whether the user named the directory of checkpoints, so that what is in
    /// it must not be replaced.
    pub(crate) fn names_checkpoint_dir(&self) -> bool {
        self.checkpoint_dir.is_some()
    }

    /// The directory of images.
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.data_dir.clone().unwrap_or_else(digits)
    }

    /// Checks what can be checked before the ranks meet.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if self.device == DeviceKind::Gpu && !cfg!(feature = "cuda") {
            anyhow::bail!(
                "this program was built without CUDA: build it with `--features cuda`, or train \
                 on the CPU with `--device cpu`"
            );
        }
        Ok(())
    }
}

/// The digits that come with the source.
pub(crate) fn digits() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// More of anything than a run can have, and less than what arithmetic can't take.
const MAX_COUNT: usize = 1_000_000_000;

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) if number <= MAX_COUNT => Ok(number),
        Ok(_) => Err(format!("must be at most {MAX_COUNT}")),
        Err(_) => Err("must be a whole number".to_owned()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("must be a number greater than 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from([&["mnist"], arguments].concat())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
        let options = parse(&[]).expect("all have defaults");
        assert!(options.check().is_ok());
        assert!(options.data_dir().is_dir());
        assert!(!options.names_checkpoint_dir());
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for (flag, value, message) in [
            ("--epochs", "0", "at least 1"),
            ("--epochs", "some", "whole number"),
            ("--batch-size", "0", "at least 1"),
            ("--batch-size", "1000000001", "at most"),
            ("--limit", "0", "at least 1"),
            ("--checkpoint-every", "0", "at least 1"),
            ("--lr", "0", "greater than 0"),
            ("--lr", "nan", "greater than 0"),
            ("--lr", "-1", "greater than 0"),
        ] {
            let text = parse(&[&format!("{flag}={value}")])
                .expect_err("out of range")
                .to_string();
            assert!(text.contains(message) && text.contains(flag), "{text}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_gpu_is_refused_with_what_works() {
        let error = parse(&["--device", "gpu"]).unwrap().check();
        let text = error.expect_err("no CUDA").to_string();
        assert!(text.contains("without CUDA") && text.contains("--device cpu"));
    }
}
