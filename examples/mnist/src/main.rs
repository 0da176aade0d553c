//! Trains a convolutional network on MNIST digits, data-parallel: one process
//! per device, gradients averaged while the backward pass runs.

mod augment;
mod batch;
mod checkpoints;
mod dataset;
mod evaluate;
mod idx;
mod memory;
mod meter;
mod model;
mod options;
mod progress;
mod run_state;
mod schedule;
mod summary;
mod train;

use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use burn_ddp::ProcessGroup;
use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::options::Options;
use crate::summary::Summary;

fn main() -> ExitCode {
    let options = Options::parse();
    log_to_stderr();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Shows what the libraries log: warnings, unless `RUST_LOG` asks for more.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
}

fn run(options: &Options) -> Result<()> {
    options.check()?;
    let group = ProcessGroup::from_env()?;
    let result =
        train::train(options, &group).and_then(|summary| publish(options, &group, summary));
    if let Err(error) = &result {
        // The other ranks need not wait for this one.
        group.abort(format!("{error:#}"));
    }
    result
}

/// Shows the summary, and fails if it says that the run has. Collective.
fn publish(options: &Options, group: &ProcessGroup, summary: Summary) -> Result<()> {
    let written = group.is_main().then(|| {
        print!("\n{summary}");
        write_json(options, &summary).map_err(|error| format!("{error:#}"))
    });
    group
        .broadcast_object(written, 0)?
        .map_err(|e| anyhow!(e))?;
    match summary.replica_difference() {
        None => Ok(()),
        Some(difference) => bail!("{difference}"),
    }
}

fn write_json(options: &Options, summary: &Summary) -> Result<()> {
    let Some(path) = &options.json else {
        return Ok(());
    };
    let mut json = serde_json::to_vec_pretty(summary)?;
    json.push(b'\n');
    std::fs::write(path, json).with_context(|| format!("can't write {}", path.display()))
}
