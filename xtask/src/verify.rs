//! `cargo xtask verify`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use burn_ddp_launch::JobReport;
use clap::Args;
use serde_json::{Value, json};

use crate::job::{self, DeviceOptions};

/// What to check, and where to write what was found.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    devices: DeviceOptions,

    /// Write what was found to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Falsify the gradients of rank N, to see that it is found out
    #[arg(long, value_name = "N", hide = true)]
    break_gradient: Option<String>,
}

/// Checks.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let devices = options.devices.choose()?;
    let mut arguments: Vec<OsString> = Vec::new();
    if let Some(file) = &options.json {
        arguments.extend(["--json".into(), file.into()]);
    }
    if let Some(rank) = &options.break_gradient {
        arguments.extend(["--break-gradient".into(), rank.into()]);
    }
    let report = job::run("verify", devices, arguments)?;

    // Only who started the ranks can see how they ended.
    let clean = report.ranks.iter().filter(|rank| rank.status.success());
    let clean = clean.count();
    let verdict = if report.success() { "PASS" } else { "FAIL" };
    println!(
        "{verdict}  clean exit: {clean} of {} ranks, {:.2} s after the start",
        report.ranks.len(),
        report.seconds
    );
    if let Some(file) = &options.json {
        add_exit(file, &report)?;
    }
    Ok(job::exit_code(&report))
}

/// Adds how the ranks ended to what they have written.
fn add_exit(file: &Path, report: &JobReport) -> Result<()> {
    // A job that failed early has written nothing.
    let mut found: Value = match fs::read(file) {
        Ok(text) => serde_json::from_slice(&text)
            .with_context(|| format!("{} is not JSON", file.display()))?,
        Err(_) => json!({}),
    };
    found["clean_exit"] = json!(report.success());
    found["launch"] = serde_json::to_value(report)?;
    let text = serde_json::to_vec_pretty(&found)?;
    fs::write(file, text).with_context(|| format!("can't write {}", file.display()))
}
