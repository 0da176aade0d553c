//! The manifest of a checkpoint: which files it has, and a hash of each.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Name of the manifest in its directory.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Version of the directory's layout.
const FORMAT: u32 = 1;

/// The files of a checkpoint by name, except the manifest.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Manifest {
    format: u32,
    pub(crate) step: u64,
    pub(crate) world_size: usize,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
struct FileEntry {
    bytes: usize,
    sha256: String,
}

impl Manifest {
    /// The manifest of `files`.
    pub(crate) fn new(step: u64, world_size: usize, files: &Files) -> Self {
        let entry = |contents: &Vec<u8>| FileEntry {
            bytes: contents.len(),
            sha256: hex(&Sha256::digest(contents)),
        };
        Self {
            format: FORMAT,
            step,
            world_size,
            files: files.iter().map(|(n, c)| (n.clone(), entry(c))).collect(),
        }
    }

    /// Reads the checkpoint in `directory` and checks every file against it.
    ///
    /// # Errors
    ///
    /// What is wrong with the checkpoint, for people.
    pub(crate) fn read(directory: &Path) -> Result<(Self, Files), String> {
        let text = fs::read(directory.join(MANIFEST))
            .map_err(|error| format!("{MANIFEST} can't be read: {error}"))?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| format!("{MANIFEST} is damaged: {error}"))?;
        if manifest.format != FORMAT {
            return Err(format!(
                "its format is {}, and this version reads format {FORMAT}",
                manifest.format
            ));
        }
        let mut files = Files::new();
        for (name, entry) in &manifest.files {
            if Path::new(name).components().count() != 1 || name.contains("..") {
                return Err(format!("{MANIFEST} names a file outside of it: {name}"));
            }
            let contents = fs::read(directory.join(name))
                .map_err(|error| format!("{name} can't be read: {error}"))?;
            if contents.len() != entry.bytes {
                return Err(format!(
                    "{name} has {} bytes instead of {}",
                    contents.len(),
                    entry.bytes
                ));
            }
            if hex(&Sha256::digest(&contents)) != entry.sha256 {
                return Err(format!("{name} does not match its SHA-256 in {MANIFEST}"));
            }
            files.insert(name.clone(), contents);
        }
        Ok((manifest, files))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
