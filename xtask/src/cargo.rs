//! Runs cargo, and other programs, from the root of the repository.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

/// The directory that cargo builds into.
pub(crate) fn target_directory() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => root().join(directory),
        None => root().join("target"),
    }
}

/// `cargo` with `arguments`, in the root of the repository.
pub(crate) fn cargo<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(arguments).current_dir(root());
    command
}

/// Runs `command` to its end, showing what it prints.
///
/// # Errors
///
/// When it can't be started or fails; the text says what was run.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let line = describe(&command);
    println!("$ {line}");
    let status = status(&mut command)?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

fn status(command: &mut Command) -> Result<ExitStatus> {
    command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("can't start `{}`", describe(command)))
}

/// The command as one would type it.
fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    std::iter::once(program)
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The examples that are built together, so that Burn is built once for all of
/// them.
const EXAMPLES: [&str; 2] = ["mnist", "verify"];

/// Builds the examples with optimisations, for GPUs if `cuda`, and returns the
/// path of the binary of `name`.
///
/// # Errors
///
/// When they don't build.
pub(crate) fn build_example(name: &str, cuda: bool) -> Result<PathBuf> {
    eprintln!("Building the example `{name}` (the first time with Burn: some minutes)");
    let mut command = cargo(["build", "--quiet", "--release", "--bins"]);
    for example in EXAMPLES {
        command.args(["--package", example]);
        if cuda {
            command.args(["--features", &format!("{example}/cuda")]);
        }
    }
    let status = status(&mut command)?;
    if !status.success() {
        bail!("`{}` failed: {status}", describe(&command));
    }
    Ok(target_directory().join("release").join(name))
}
