//! Checks data-parallel training on this machine: the same network and samples
//! on several ranks and in one process must give the same gradients and
//! parameters.

mod checks;
mod difference;
mod network;
mod report;
mod samples;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn_ddp::ProcessGroup;
use clap::{Parser, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::report::Report;

/// Compares data-parallel training with training in one process.
///
/// Start it as the ranks that are to be checked: `burnrun --nproc-per-node 2 --
/// verify`.
#[derive(Debug, Parser)]
#[command(name = "verify", version)]
struct Options {
    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,

    /// Write what was found to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Falsify the gradients of rank N, to see that it is found out
    #[arg(long, value_name = "N", hide = true)]
    break_gradient: Option<usize>,
}

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceKind {
    /// One CPU core per rank
    Cpu,
    /// One CUDA GPU per rank
    Gpu,
}

fn main() -> ExitCode {
    let options = Options::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn")),
        )
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    ensure!(
        options.device == DeviceKind::Cpu || cfg!(feature = "cuda"),
        "this program was built without CUDA: build it with `--features cuda`, or verify the CPU \
         with `--device cpu`"
    );
    let group = ProcessGroup::from_env()?;
    let (kind, device) = match options.device {
        DeviceKind::Cpu => ("cpu", burn_ddp::cpu()),
        DeviceKind::Gpu => ("gpu", burn_ddp::cuda_device(&group)),
    };
    let result = device
        .map_err(anyhow::Error::from)
        .and_then(|device| checks::run(&group, kind, device.autodiff(), options.break_gradient))
        .and_then(|report| publish(options, &group, &report));
    match result {
        Ok(0) => Ok(()),
        // Every rank knows, and comes here.
        Ok(failures) => bail!("{failures} checks failed"),
        Err(error) => {
            group.abort(format!("{error:#}"));
            Err(error)
        }
    }
}

/// Shows the report; returns how many checks failed. Collective.
fn publish(options: &Options, group: &ProcessGroup, report: &Report) -> Result<usize> {
    let written = group.is_main().then(|| {
        print!("{report}");
        match &options.json {
            Some(path) => write_json(path, report).map_err(|error| format!("{error:#}")),
            None => Ok(()),
        }
    });
    group
        .broadcast_object(written, 0)?
        .map_err(|e| anyhow!(e))?;
    Ok(report.failures())
}

fn write_json(path: &Path, report: &Report) -> Result<()> {
    let mut json = serde_json::to_vec_pretty(report)?;
    json.push(b'\n');
    std::fs::write(path, json).with_context(|| format!("can't write {}", path.display()))
}
