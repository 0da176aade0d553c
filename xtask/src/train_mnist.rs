//! `cargo xtask train-mnist`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::job::{self, DeviceOptions};

/// What is passed on to the example, which has the defaults.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    devices: DeviceOptions,

    /// Passes over the training images [default: 3]
    #[arg(long, value_name = "N")]
    epochs: Option<String>,

    /// Images per step and rank
    #[arg(long, value_name = "N")]
    batch_size: Option<String>,

    /// Peak learning rate
    #[arg(long, value_name = "RATE")]
    lr: Option<String>,

    /// Seed of initial parameters, order of images, and dropout
    #[arg(long, value_name = "N")]
    seed: Option<String>,

    /// Directory of MNIST-format IDX files, plain or gzip: MNIST, Fashion-MNIST
    /// [default: the 8,000 + 2,000 digits in the repository]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Train on the first N images only
    #[arg(long, value_name = "N")]
    limit: Option<String>,

    /// Directory of checkpoints [default: target/mnist-checkpoints]
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,

    /// Save a checkpoint every N steps too, not only after each epoch
    #[arg(long, value_name = "N")]
    checkpoint_every: Option<String>,

    /// Go on from the newest checkpoint of the checkpoint directory
    #[arg(long)]
    resume: bool,

    /// Write the summary to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    fn arguments(&self) -> Vec<OsString> {
        let text = |value: &Option<String>| value.as_ref().map(OsString::from);
        let path = |value: &Option<PathBuf>| value.as_ref().map(OsString::from);
        let values = [
            ("--epochs", text(&self.epochs)),
            ("--batch-size", text(&self.batch_size)),
            ("--lr", text(&self.lr)),
            ("--seed", text(&self.seed)),
            ("--data-dir", path(&self.data_dir)),
            ("--limit", text(&self.limit)),
            ("--checkpoint-dir", path(&self.checkpoint_dir)),
            ("--checkpoint-every", text(&self.checkpoint_every)),
            ("--json", path(&self.json)),
        ];
        let mut arguments: Vec<OsString> = Vec::new();
        for (name, value) in values {
            if let Some(value) = value {
                arguments.extend([name.into(), value]);
            }
        }
        if self.resume {
            arguments.push("--resume".into());
        }
        arguments
    }
}

/// Trains.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let devices = options.devices.choose()?;
    let report = job::run("mnist", devices, options.arguments())?;
    Ok(job::exit_code(&report))
}
