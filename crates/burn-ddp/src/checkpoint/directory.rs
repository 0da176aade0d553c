//! Checkpoint directories: complete or absent, whatever interrupts the writer.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::manifest::{Files, MANIFEST, Manifest};

const PREFIX: &str = "checkpoint-";
/// Prefix of a directory that is being written or removed.
const ASIDE: &str = ".checkpoint-aside-";

/// Name of the checkpoint of `step`: sorts by step.
pub(crate) fn name(step: u64) -> String {
    format!("{PREFIX}{step:012}")
}

/// The checkpoints in `parent`, newest first.
pub(crate) fn list(parent: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let step = entry
            .file_name()
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|step| step.parse().ok());
        if let Some(step) = step {
            found.push((step, entry.path()));
        }
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// Writes a checkpoint: aside, synced, then renamed.
///
/// On an error nothing of it is left, and an earlier checkpoint of the same step
/// is untouched.
pub(crate) fn write(
    parent: &Path,
    step: u64,
    world_size: usize,
    files: &Files,
) -> io::Result<PathBuf> {
    let aside = parent.join(format!("{ASIDE}{}-{step}", std::process::id()));
    let target = parent.join(name(step));
    let result = write_aside(&aside, step, world_size, files).and_then(|()| {
        replace(&aside, &target)?;
        sync_directory(parent)
    });
    if result.is_err() {
        // The error that counts is the first one.
        let _ = fs::remove_dir_all(&aside);
    }
    result.map(|()| target)
}

fn write_aside(aside: &Path, step: u64, world_size: usize, files: &Files) -> io::Result<()> {
    match fs::remove_dir_all(aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => fs::create_dir(aside)?,
    }
    for (name, contents) in files {
        write_file(&aside.join(name), contents)?;
    }
    let manifest = serde_json::to_vec_pretty(&Manifest::new(step, world_size, files))?;
    write_file(&aside.join(MANIFEST), &manifest)?;
    sync_directory(aside)
}

fn write_file(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Renames `aside` to `target`, moving a checkpoint of the same step out of the
/// way first.
fn replace(aside: &Path, target: &Path) -> io::Result<()> {
    if !target.exists() {
        return fs::rename(aside, target);
    }
    let mut old = aside.as_os_str().to_owned();
    old.push("-old");
    fs::rename(target, &old)?;
    if let Err(error) = fs::rename(aside, target) {
        let _ = fs::rename(&old, target);
        return Err(error);
    }
    fs::remove_dir_all(old)
}

/// Removes what an interrupted writer has left, and all but the `keep` newest
/// checkpoints.
pub(crate) fn prune(parent: &Path, keep: usize) -> io::Result<()> {
    for (_, path) in list(parent)?.into_iter().skip(keep.max(1)) {
        // Renamed first, so that an interruption leaves no half checkpoint.
        let aside = parent.join(format!(
            "{ASIDE}{}-removed-{}",
            std::process::id(),
            path.file_name().unwrap_or_default().to_string_lossy()
        ));
        fs::rename(&path, &aside)?;
        fs::remove_dir_all(aside)?;
    }
    Ok(())
}

/// Removes what interrupted writers have left.
pub(crate) fn clean(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(ASIDE) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}
