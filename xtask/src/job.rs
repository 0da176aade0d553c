//! Runs an example as one process per device.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Result, bail};
use burn_ddp_launch::{Job, JobReport, VisibleGpus, cores, visible_gpus};
use clap::Args;

use crate::cargo::build_example;

/// How many processes on CPUs where nothing is asked for: the fewest that
/// average gradients.
const DEFAULT_CPUS: usize = 2;

/// Which devices to use.
#[derive(Args)]
#[group(multiple = false)]
pub(crate) struct DeviceOptions {
    /// One process on each of N GPUs [default: all visible GPUs; without any,
    /// two CPU processes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus: Option<u16>,

    /// N processes on the CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    cpus: Option<u16>,
}

/// The devices that were chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Devices {
    /// This many GPUs.
    Gpus(usize),
    /// This many processes on the CPU.
    Cpus(usize),
}

impl Devices {
    fn ranks(self) -> usize {
        match self {
            Self::Gpus(ranks) | Self::Cpus(ranks) => ranks,
        }
    }

    fn argument(self) -> &'static str {
        match self {
            Self::Gpus(_) => "gpu",
            Self::Cpus(_) => "cpu",
        }
    }
}

impl DeviceOptions {
    /// Chooses the devices, and says which and why.
    ///
    /// # Errors
    ///
    /// When more GPUs are asked for than are visible: the text names what is
    /// missing, and what works instead.
    pub(crate) fn choose(&self) -> Result<Devices> {
        let (devices, why) = self.among(&visible_gpus()?, cores())?;
        eprintln!("{why}");
        Ok(devices)
    }

    fn among(&self, gpus: &VisibleGpus, cores: usize) -> Result<(Devices, String)> {
        let (visible, source) = (gpus.count, &gpus.source);
        let of_cores = |ranks| format!("{ranks} CPU process{} on {cores} cores", plural(ranks));
        match (self.gpus.map(usize::from), self.cpus.map(usize::from)) {
            (Some(wanted), _) if wanted > visible => bail!(
                "`--gpus {wanted}` needs {wanted} GPU{}, and {visible} {} visible ({source}); \
                 train on the CPU with `--cpus {wanted}`",
                if wanted == 1 { "" } else { "s" },
                if visible == 1 { "is" } else { "are" },
            ),
            (Some(wanted), _) => Ok((
                Devices::Gpus(wanted),
                format!("Using {wanted} of {visible} visible GPUs, as asked for"),
            )),
            (None, Some(ranks)) => Ok((
                Devices::Cpus(ranks),
                format!("Using {}, as asked for", of_cores(ranks)),
            )),
            (None, None) if visible > 0 => Ok((
                Devices::Gpus(visible),
                format!("Using all {visible} visible GPUs ({source}); `--gpus N` takes fewer"),
            )),
            (None, None) => Ok((
                Devices::Cpus(DEFAULT_CPUS),
                format!(
                    "Using {}, as no GPU is visible ({source}); `--cpus N` takes another number",
                    of_cores(DEFAULT_CPUS)
                ),
            )),
        }
    }
}

fn plural(n: usize) -> &'static str {
    if n == 1 { "" } else { "es" }
}

/// Builds the example `name` and runs it on `devices`.
///
/// # Errors
///
/// When it can't be built or started.
pub(crate) fn run(
    name: &str,
    devices: Devices,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<JobReport> {
    let program = build_example(name, matches!(devices, Devices::Gpus(_)))?;
    let report = Job::builder(program)
        .ranks(devices.ranks())
        .args(["--device", devices.argument()])
        .args(arguments)
        .share_terminal(std::io::stderr().is_terminal())
        .run()?;
    if !report.success() {
        eprint!("{report}");
    }
    Ok(report)
}

/// The exit code of a job.
pub(crate) fn exit_code(report: &JobReport) -> ExitCode {
    ExitCode::from(u8::try_from(report.exit_code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(gpus: Option<u16>, cpus: Option<u16>, visible: usize) -> Result<(Devices, String)> {
        let gpus_visible = VisibleGpus {
            count: visible,
            source: "no /dev/nvidia0".to_owned(),
        };
        DeviceOptions { gpus, cpus }.among(&gpus_visible, 2)
    }

    #[test]
    fn all_gpus_else_two_cpus_and_why() {
        let (devices, why) = choose(None, None, 0).expect("CPUs are always there");
        assert_eq!(devices, Devices::Cpus(2));
        assert!(why.contains("no GPU is visible"), "{why}");
        let (devices, why) = choose(None, None, 4).expect("four");
        assert_eq!(devices, Devices::Gpus(4));
        assert!(why.contains("all 4"), "{why}");
        assert_eq!(choose(None, Some(3), 4).expect("three").0, Devices::Cpus(3));
        assert_eq!(choose(Some(2), None, 4).expect("two").0, Devices::Gpus(2));
    }

    #[test]
    fn missing_gpus_are_named_with_what_works() {
        let text = choose(Some(2), None, 0).expect_err("none").to_string();
        assert!(text.contains("no /dev/nvidia0"), "{text}");
        assert!(text.contains("`--cpus 2`"), "{text}");
    }
}
