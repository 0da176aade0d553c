//! Checkpoints: rank 0 writes them, every rank reads them through it.
//!
//! A checkpoint is a directory `checkpoint-000000001234`, named after its step,
//! with the files `model.bpk` and `optimizer.bpk` (Burn's records), `state.json`
//! (whatever the training loop needs to go on: epoch, position in it, seeds,
//! scheduler) and `manifest.json` with a SHA-256 of each. It is written aside,
//! synced and renamed, so it is complete or absent. One that is damaged
//! afterwards is named, skipped, and the one before it is taken.

mod directory;
mod manifest;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use self::manifest::{Files, Manifest};
use crate::{Error, ProcessGroup, Result};

const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";

/// Saves and restores checkpoints in a directory that only rank 0 has to reach.
///
/// ```no_run
/// # use burn::{nn::LinearConfig, optim::SgdConfig};
/// # use burn_ddp::{Checkpointer, Ddp, ProcessGroup};
/// # fn main() -> burn_ddp::Result<()> {
/// # let group = ProcessGroup::single();
/// # let device = burn_ddp::device(&group)?.autodiff();
/// # let mut model = Ddp::new(LinearConfig::new(4, 1).init(&device), &group)?;
/// # let mut optim = SgdConfig::new().init();
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct State { epoch: usize, seed: u64 }
///
/// let mut checkpoints = Checkpointer::new("checkpoints", &group)?.keep(3);
/// checkpoints.save(100, &model, &optim, &State { epoch: 2, seed: 7 })?;
/// checkpoints.finish()?;
///
/// let restored = checkpoints.load::<State>()?;
/// let epoch = restored.state.epoch;
/// (model, optim) = restored.apply(model, optim)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Checkpointer {
    directory: PathBuf,
    group: ProcessGroup,
    keep: usize,
    /// The checkpoint that is being written, on rank 0.
    writing: Option<JoinHandle<Result<PathBuf>>>,
    last: Option<PathBuf>,
}

impl Checkpointer {
    /// Checkpoints in `directory`, which rank 0 makes if it is not there.
    /// Collective.
    ///
    /// # Errors
    ///
    /// On every rank, an environment error when rank 0 can't make the directory
    /// or write to it.
    pub fn new(directory: impl Into<PathBuf>, group: &ProcessGroup) -> Result<Self> {
        let directory = directory.into();
        on_main(group, || prepare(&directory))?;
        Ok(Self {
            directory,
            group: group.clone(),
            keep: 2,
            writing: None,
            last: None,
        })
    }

    /// How many checkpoints are kept: at least 1, by default 2, so that a damaged
    /// one has one before it.
    pub fn keep(mut self, checkpoints: usize) -> Self {
        self.keep = checkpoints.max(1);
        self
    }

    /// Saves a checkpoint: rank 0 copies the parameters and goes on, and a thread
    /// writes them. On other ranks it does nothing.
    ///
    /// # Errors
    ///
    /// On rank 0, an environment error when the checkpoint before could not be
    /// written, naming its path; a usage error for a `state` that JSON can't hold.
    pub fn save<M: Module, S: Serialize>(
        &mut self,
        step: u64,
        model: &M,
        optimizer: &ModuleOptimizer,
        state: &S,
    ) -> Result<()> {
        if !self.group.is_main() {
            return Ok(());
        }
        self.finish()?;
        crate::buffers::settle(model);
        let record = |error| Error::environment_from("can't make a record for a checkpoint", error);
        let model = model.clone().into_record().into_bytes().map_err(record)?;
        let optimizer = optimizer.into_bytes().map_err(record)?;
        let state = serde_json::to_vec_pretty(state).map_err(|error| {
            Error::usage(format!("a checkpoint's state can't be saved: {error}"))
        })?;
        let files: Files = [
            (MODEL.to_owned(), model.to_vec()),
            (OPTIMIZER.to_owned(), optimizer.to_vec()),
            (STATE.to_owned(), state),
        ]
        .into();

        let (directory, keep) = (self.directory.clone(), self.keep);
        let world_size = self.group.world_size();
        let write = move || write(&directory, step, world_size, keep, &files);
        let spawned = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(write);
        match spawned {
            Ok(thread) => self.writing = Some(thread),
            Err(error) => {
                return Err(Error::environment_from(
                    "can't start the thread that writes checkpoints",
                    error,
                ));
            }
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written, and returns the path of
    /// the last one that was saved or loaded; on other ranks than 0, `None`.
    ///
    /// # Errors
    ///
    /// An environment error when it could not be written, naming its path.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        if let Some(thread) = self.writing.take() {
            let written = thread.join().unwrap_or_else(|_| {
                Err(Error::environment(
                    "the thread that writes checkpoints panicked",
                ))
            })?;
            self.last = Some(written);
        }
        Ok(self.last.clone())
    }

    /// Reads the newest checkpoint that is whole. Collective: rank 0 reads it,
    /// and every rank gets it.
    ///
    /// # Errors
    ///
    /// On every rank, an environment error when there is no checkpoint, or none
    /// that is whole: then it says what is wrong with each.
    pub fn load<S: DeserializeOwned>(&mut self) -> Result<Restored<S>> {
        self.finish()?;
        let found = on_main(&self.group, || read_newest(&self.directory))?;
        for damaged in &found.skipped {
            if self.group.is_main() {
                tracing::warn!("skipped a damaged checkpoint: {damaged}");
            }
        }
        self.last = self.group.is_main().then(|| found.path.clone());
        let mut files = found.files;
        let mut take = |name: &str| {
            files.remove(name).ok_or_else(|| {
                Error::environment(format!("{} has no {name}", found.path.display()))
            })
        };
        let (model, optimizer, state) = (take(MODEL)?, take(OPTIMIZER)?, take(STATE)?);
        let state = serde_json::from_slice(&state).map_err(|error| {
            Error::usage(format!(
                "{} of {} is not the state that this program saves: {error}",
                STATE,
                found.path.display()
            ))
        })?;
        Ok(Restored {
            step: found.step,
            path: found.path,
            world_size: found.world_size,
            state,
            skipped: found.skipped,
            model,
            optimizer,
        })
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        // A checkpoint that was begun is finished.
        if let Err(error) = self.finish() {
            tracing::error!("{error}");
        }
    }
}

/// A checkpoint that was read.
#[derive(Debug)]
pub struct Restored<S> {
    /// The step it was saved at.
    pub step: u64,
    /// Its directory, on rank 0's host.
    pub path: PathBuf,
    /// The world size it was saved at.
    pub world_size: usize,
    /// What the training loop saved.
    pub state: S,
    /// The newer checkpoints that are damaged: path and what is wrong.
    pub skipped: Vec<String>,
    model: Vec<u8>,
    optimizer: Vec<u8>,
}

impl<S> Restored<S> {
    /// Gives a module and its optimizer the saved parameters and state.
    ///
    /// # Errors
    ///
    /// A usage error when the checkpoint is of another module.
    pub fn apply<M: Module>(
        &self,
        module: M,
        optimizer: ModuleOptimizer,
    ) -> Result<(M, ModuleOptimizer)> {
        let usage = |error| {
            Error::usage(format!(
                "the checkpoint {} does not fit this module: {error}",
                self.path.display()
            ))
        };
        let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(self.model.clone()));
        let module = record
            .and_then(|record| module.try_load_record(record))
            .map_err(usage)?;
        let optimizer = optimizer
            .from_bytes(Bytes::from_bytes_vec(self.optimizer.clone()))
            .map_err(usage)?;
        Ok((module, optimizer))
    }
}

/// What rank 0 found.
#[derive(Serialize, Deserialize)]
struct Found {
    step: u64,
    path: PathBuf,
    world_size: usize,
    files: Files,
    skipped: Vec<String>,
}

/// Runs `f` on rank 0, and gives its result, also an error, to every rank.
fn on_main<T, F>(group: &ProcessGroup, f: F) -> Result<T>
where
    T: Serialize + DeserializeOwned,
    F: FnOnce() -> Result<T>,
{
    let result = group.is_main().then(|| f().map_err(|e| e.to_string()));
    group
        .broadcast_object(result, 0)?
        .map_err(Error::environment)
}

fn prepare(directory: &Path) -> Result<()> {
    let failed = |what: &str, error: io::Error| {
        Error::environment_from(
            format!(
                "can't {what} the checkpoint directory {}",
                directory.display()
            ),
            error,
        )
    };
    fs::create_dir_all(directory).map_err(|error| failed("make", error))?;
    directory::clean(directory).map_err(|error| failed("clean", error))?;
    // Found out now rather than after an epoch.
    tempfile::tempfile_in(directory)
        .map(drop)
        .map_err(|error| failed("write to", error))
}

fn write(
    directory: &Path,
    step: u64,
    world_size: usize,
    keep: usize,
    files: &Files,
) -> Result<PathBuf> {
    let path = directory::write(directory, step, world_size, files).map_err(|error| {
        Error::environment_from(
            format!(
                "can't write the checkpoint {} ({} bytes); the one before it is untouched",
                directory.join(directory::name(step)).display(),
                files.values().map(Vec::len).sum::<usize>(),
            ),
            error,
        )
    })?;
    directory::prune(directory, keep).map_err(|error| {
        Error::environment_from(
            format!("can't remove old checkpoints in {}", directory.display()),
            error,
        )
    })?;
    Ok(path)
}

fn read_newest(directory: &Path) -> Result<Found> {
    let list = directory::list(directory).map_err(|error| {
        Error::environment_from(
            format!("can't list the checkpoints in {}", directory.display()),
            error,
        )
    })?;
    if list.is_empty() {
        return Err(Error::environment(format!(
            "there is no checkpoint in {}: start without resuming to begin a new run there",
            directory.display()
        )));
    }
    let mut skipped = Vec::new();
    for (_, path) in list {
        match Manifest::read(&path) {
            Ok((manifest, files)) => {
                return Ok(Found {
                    step: manifest.step,
                    world_size: manifest.world_size,
                    path,
                    files,
                    skipped,
                });
            }
            Err(what) => skipped.push(format!("{}: {what}", path.display())),
        }
    }
    Err(Error::environment(format!(
        "no checkpoint in {} is whole:\n  {}",
        directory.display(),
        skipped.join("\n  ")
    )))
}

#[cfg(test)]
mod tests;
