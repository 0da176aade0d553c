//! Data and jobs for the tests.

// Each test file uses its own part of this.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::path::{Path, PathBuf};

use burn_ddp_tests::{RankOutput, TestJob};
use serde_json::Value;
use tempfile::TempDir;

/// A place with training data and room for checkpoints.
pub struct Place {
    root: TempDir,
}

impl Place {
    /// 200 training and 60 test images of blocks, which a network tells apart
    /// after a few steps.
    pub fn new() -> Self {
        let root = tempfile::tempdir().expect("a temporary directory");
        let place = Self { root };
        fs::create_dir(place.data()).expect("a new directory");
        place.write("train", 200);
        place.write("t10k", 60);
        place
    }

    fn write(&self, set: &str, count: u32) {
        let mut images = [&[0, 0, 8, 3], &count.to_be_bytes()[..]].concat();
        images.extend([28u32, 28].iter().flat_map(|side| side.to_be_bytes()));
        let mut labels = [&[0, 0, 8, 1], &count.to_be_bytes()[..]].concat();
        for number in 0..count {
            let label = (number * 7 % 10) as u8;
            images.extend(block(label, number));
            labels.push(label);
        }
        let at = |name: &str| self.data().join(format!("{set}-{name}-ubyte"));
        fs::write(at("images-idx3"), images).expect("room for images");
        fs::write(at("labels-idx1"), labels).expect("room for labels");
    }

    /// The directory of the data.
    pub fn data(&self) -> PathBuf {
        self.root.path().join("data")
    }

    /// The directory of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.path().join("checkpoints")
    }

    /// The file of the summary.
    pub fn json(&self) -> PathBuf {
        self.root.path().join("summary.json")
    }

    /// A job of `ranks` that trains two epochs of 200 images here, in global
    /// batches of 20.
    pub fn job(&self, ranks: usize) -> TestJob {
        mnist(ranks)
            .arg("--epochs=2")
            .arg(format!("--batch-size={}", 20 / ranks))
            .arg("--data-dir")
            .arg(self.data())
            .arg("--checkpoint-dir")
            .arg(self.checkpoints())
            .arg("--json")
            .arg(self.json())
    }

    /// Runs a job that must succeed, and reads its summary.
    pub fn summary(&self, job: TestJob) -> (Vec<RankOutput>, Value) {
        let outputs = job.succeed();
        let json = fs::read(self.json()).expect("rank 0 wrote it");
        (outputs, serde_json::from_slice(&json).expect("JSON"))
    }

    /// The names of the checkpoints, oldest first.
    pub fn list(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.checkpoints()) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("readable").file_name())
            .map(|name| name.to_string_lossy().into_owned())
            .filter(|name| name.starts_with("checkpoint-"))
            .collect();
        names.sort();
        names
    }

    /// Flips a bit in a file of a checkpoint.
    pub fn damage(&self, checkpoint: &str, file: &str) {
        let path = self.checkpoints().join(checkpoint).join(file);
        let mut bytes = fs::read(&path).expect("it was written");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).expect("writable");
    }
}

/// A job of `ranks` with no arguments yet.
pub fn mnist(ranks: usize) -> TestJob {
    TestJob::new(binary(), ranks)
}

/// The program.
pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_mnist"))
}

/// An image of a bright block at the place of its label, with some noise.
fn block(label: u8, number: u32) -> Vec<u8> {
    let (top, left) = (4 + 12 * u32::from(label / 5), 1 + 5 * u32::from(label % 5));
    (0..28 * 28)
        .map(|pixel: u32| {
            let (row, column) = (pixel / 28, pixel % 28);
            let noise = (pixel.wrapping_mul(2_654_435_761) ^ number.wrapping_mul(40_503)) >> 13;
            let inside = (top..top + 8).contains(&row) && (left..left + 5).contains(&column);
            (noise % 40) as u8 + if inside { 200 } else { 0 }
        })
        .collect()
}

/// Every rank failed and said `text`, in a line that begins with `error:`.
pub fn assert_all_fail_with(outputs: &[RankOutput], text: &str) {
    for output in outputs {
        assert_eq!(output.status.code(), Some(1), "{output:#?}");
        let errors: Vec<&str> = output
            .stderr
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        assert_eq!(errors.len(), 1, "{output:#?}");
        assert!(output.stderr.contains(text), "{output:#?}");
    }
}
