//! How many ranks a machine gets: a number, its cores, or its GPUs.

use std::path::Path;
use std::str::FromStr;

use burn_ddp_comm::{Error, Result};

/// Number of ranks on this machine, as given to `--nproc-per-node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NprocPerNode {
    /// This many.
    Count(usize),
    /// One per core that this process may use.
    Cpu,
    /// One per visible GPU.
    Gpu,
    /// One per visible GPU, or per core where there is none.
    Auto,
}

impl FromStr for NprocPerNode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            "auto" => Ok(Self::Auto),
            _ => match text.parse() {
                Ok(0) | Err(_) => Err(Error::usage(format!(
                    "`{text}` is no number of ranks: give 1 or more, `cpu` (one per core), `gpu` (one per visible GPU) or `auto`"
                ))),
                Ok(count) => Ok(Self::Count(count)),
            },
        }
    }
}

impl NprocPerNode {
    /// The number of ranks on this machine.
    ///
    /// # Errors
    /// Environment, naming what is missing, if one per GPU is asked for and no
    /// GPU is visible.
    pub fn resolve(self) -> Result<usize> {
        match self {
            Self::Count(count) => Ok(count),
            Self::Cpu => Ok(cores()),
            Self::Gpu => visible_gpus().and_then(|gpus| gpus.required()),
            Self::Auto => Ok(match visible_gpus()?.count {
                0 => cores(),
                count => count,
            }),
        }
    }
}

/// Cores that this process may use: its affinity mask and its control group's
/// quota taken into account. At least 1.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The GPUs that a rank started here would see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisibleGpus {
    /// How many.
    pub count: usize,
    /// Where that number is from: the variable or the device files.
    pub source: String,
}

impl VisibleGpus {
    /// The count, or an [environment](burn_ddp_comm::ErrorKind::Environment)
    /// error that names what is missing if it is 0.
    pub fn required(&self) -> Result<usize> {
        match self.count {
            0 => Err(Error::environment(format!(
                "no GPU is visible here: {}",
                self.source
            ))),
            count => Ok(count),
        }
    }
}

/// Counts the GPUs that `CUDA_VISIBLE_DEVICES` names if it is set, else the
/// device files `/dev/nvidia0`, `/dev/nvidia1`, ...
///
/// # Errors
/// Usage if `CUDA_VISIBLE_DEVICES` is not UTF-8.
pub fn visible_gpus() -> Result<VisibleGpus> {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => Ok(named_gpus(&value)),
        Err(std::env::VarError::NotPresent) => Ok(device_files(Path::new("/dev"))),
        Err(std::env::VarError::NotUnicode(value)) => Err(Error::usage(format!(
            "CUDA_VISIBLE_DEVICES is {value:?}: give device numbers or UUIDs separated by commas"
        ))),
    }
}

/// Reads `CUDA_VISIBLE_DEVICES` as the CUDA driver does: what follows the first
/// invalid entry is not visible.
fn named_gpus(value: &str) -> VisibleGpus {
    let is_device = |entry: &&str| {
        let is_index = !entry.is_empty() && entry.bytes().all(|byte| byte.is_ascii_digit());
        is_index || entry.starts_with("GPU-") || entry.starts_with("MIG-")
    };
    let count = value
        .split(',')
        .map(str::trim)
        .take_while(is_device)
        .count();
    let source = match count {
        0 => format!(
            "CUDA_VISIBLE_DEVICES is set to `{value}`, which names none; unset it to see all"
        ),
        _ => format!("CUDA_VISIBLE_DEVICES={value}"),
    };
    VisibleGpus { count, source }
}

/// Counts `nvidia<number>` in `directory`.
fn device_files(directory: &Path) -> VisibleGpus {
    let is_gpu = |name: &std::ffi::OsStr| {
        name.to_str()
            .and_then(|name| name.strip_prefix("nvidia"))
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let count = std::fs::read_dir(directory).map_or(0, |entries| {
        entries
            .flatten()
            .filter(|entry| is_gpu(&entry.file_name()))
            .count()
    });
    let first = directory.join("nvidia0");
    let source = match count {
        0 => format!(
            "there is no {} (no NVIDIA GPU, its driver is not loaded, or the container was started without GPUs)",
            first.display()
        ),
        _ => format!("{} and following", first.display()),
    };
    VisibleGpus { count, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_ddp_comm::ErrorKind;

    #[test]
    fn words_and_numbers() {
        assert_eq!(
            "4".parse::<NprocPerNode>().ok(),
            Some(NprocPerNode::Count(4))
        );
        assert_eq!("cpu".parse::<NprocPerNode>().ok(), Some(NprocPerNode::Cpu));
        assert_eq!("gpu".parse::<NprocPerNode>().ok(), Some(NprocPerNode::Gpu));
        assert_eq!(
            "auto".parse::<NprocPerNode>().ok(),
            Some(NprocPerNode::Auto)
        );
        for odd in ["0", "-1", "", "two", "1.5", "99999999999999999999999"] {
            let error = odd
                .parse::<NprocPerNode>()
                .map_err(|error| error.to_string());
            assert!(error.is_err_and(|text| text.contains(&format!("`{odd}`"))));
        }
    }

    #[test]
    fn cuda_visible_devices_ends_at_the_first_invalid_entry() {
        for (value, count) in [
            ("0", 1),
            ("0,1, 3", 3),
            ("GPU-3f,MIG-4", 2),
            ("1,-1,2", 1),
            ("", 0),
            ("-1", 0),
            ("NoDevFiles", 0),
        ] {
            assert_eq!(named_gpus(value).count, count, "{value}");
        }
    }

    #[test]
    fn device_files_are_counted_and_missing_ones_named() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let none = device_files(directory.path()).required();
        let error = none.err().ok_or("no GPU is an error")?;
        assert_eq!(error.kind(), ErrorKind::Environment);
        assert!(error.to_string().contains("nvidia0"), "{error}");

        for name in [
            "nvidia0",
            "nvidia1",
            "nvidia12",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia",
            "null",
        ] {
            std::fs::write(directory.path().join(name), "")?;
        }
        assert_eq!(device_files(directory.path()).required()?, 3);
        Ok(())
    }
}
