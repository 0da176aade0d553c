//! The directory of checkpoints, for a new run.

use std::path::Path;
use std::{fs, io};

use anyhow::{Context, anyhow};
use burn_ddp::{Checkpointer, ProcessGroup};

use crate::options::Options;

/// Checkpoints that are kept.
const KEPT: usize = 3;

/// Opens the checkpoint directory. A run that does not resume begins in an empty
/// one: it replaces the checkpoints in the default directory, and refuses those
/// in a directory that the user named. Collective.
pub(crate) fn open(options: &Options, group: &ProcessGroup) -> anyhow::Result<Checkpointer> {
    let directory = options.checkpoint_dir();
    let checkpoints = Checkpointer::new(directory, group)?.keep(KEPT);
    if !options.resume {
        let ready = group.is_main().then(|| {
            make_room(directory, options.names_checkpoint_dir()).map_err(|e| format!("{e:#}"))
        });
        group.broadcast_object(ready, 0)?.map_err(|e| anyhow!(e))?;
    }
    Ok(checkpoints)
}

/// Removes the checkpoints in `directory`, or refuses to if they are `precious`.
fn make_room(directory: &Path, precious: bool) -> anyhow::Result<()> {
    let list = || -> io::Result<Vec<_>> {
        let entries = fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
        let is_checkpoint = |entry: &fs::DirEntry| {
            let name = entry.file_name();
            name.to_string_lossy().starts_with("checkpoint-")
        };
        Ok(entries.into_iter().filter(is_checkpoint).collect())
    };
    let found = list().with_context(|| format!("can't list {}", directory.display()))?;
    if precious && !found.is_empty() {
        return Err(anyhow!(
            "{} already has checkpoints: go on from them with `--resume`, or name another \
             `--checkpoint-dir` for a new run",
            directory.display()
        ));
    }
    for entry in found {
        let path = entry.path();
        fs::remove_dir_all(&path)
            .with_context(|| format!("can't remove the old checkpoint {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_checkpoints_are_replaced_only_where_nobody_put_them() {
        let directory = tempfile::tempdir().unwrap();
        let old = directory.path().join("checkpoint-000000000007");
        let other = directory.path().join("notes.txt");
        fs::create_dir(&old).unwrap();
        fs::write(old.join("model.bpk"), "x").unwrap();
        fs::write(&other, "x").unwrap();

        let text = make_room(directory.path(), true)
            .expect_err("kept")
            .to_string();
        assert!(text.contains("already has checkpoints") && text.contains("--resume"));
        assert!(old.exists());
        make_room(directory.path(), false).expect("removed");
        assert!(!old.exists() && other.exists());
        make_room(directory.path(), true).expect("empty");
    }
}
