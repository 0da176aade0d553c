//! What a run came to: a table for people, JSON for programs.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::options::DeviceKind;

/// What each rank says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// Its mean loss over the last steps; `None` if it took none.
    pub(crate) final_loss: Option<f64>,
    /// The most memory it had resident; `None` where the system does not say.
    pub(crate) peak_memory_bytes: Option<u64>,
    /// Memory of its gradient buckets.
    pub(crate) bucket_bytes: usize,
    /// Time of its steps.
    pub(crate) training_seconds: f64,
    /// The part of it in which it waited for communication.
    pub(crate) wait_seconds: f64,
    /// Optimizer steps it took.
    pub(crate) steps: u64,
    /// Images it trained on.
    pub(crate) images: u64,
    /// Fingerprint of its replica, or in what way it differs from the others.
    pub(crate) replica: Result<String, String>,
}

/// What all ranks together come to.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    world_size: usize,
    device: DeviceKind,
    parameters: usize,
    /// Part of the test images that was recognised, from 0 to 1.
    accuracy: f64,
    correct: usize,
    test_images: usize,
    epochs: usize,
    batch_size_per_rank: usize,
    steps: u64,
    samples_per_second: f64,
    step_ms: f64,
    /// Part of the step time in which a rank waited for communication.
    wait_share: f64,
    final_losses: Vec<Option<f64>>,
    /// One per rank; empty if they differ.
    replica_fingerprints: Vec<String>,
    replicas_equal: bool,
    #[serde(skip)]
    replica_difference: Option<String>,
    /// One per rank.
    peak_memory_bytes: Vec<Option<u64>>,
    /// Within each rank's memory.
    bucket_bytes: usize,
    checkpoint: Option<PathBuf>,
    /// Of the whole run with its evaluations and checkpoints.
    seconds: f64,
}

/// The run as rank 0 knows it.
pub(crate) struct Run {
    pub(crate) device: DeviceKind,
    pub(crate) parameters: usize,
    pub(crate) correct: usize,
    pub(crate) test_images: usize,
    pub(crate) epochs: usize,
    pub(crate) batch_size: usize,
    pub(crate) checkpoint: Option<PathBuf>,
    pub(crate) seconds: f64,
}

impl Summary {
    /// The summary of `run`, whose ranks report `ranks`, in order.
    pub(crate) fn new(run: Run, ranks: &[RankReport]) -> Self {
        let sum = |f: fn(&RankReport) -> f64| ranks.iter().map(f).sum::<f64>();
        let training = sum(|rank| rank.training_seconds);
        let per_rank = training / ranks.len().max(1) as f64;
        let steps = ranks.first().map_or(0, |rank| rank.steps);
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let replicas: Result<Vec<_>, _> = ranks.iter().map(|rank| rank.replica.clone()).collect();
        Self {
            world_size: ranks.len(),
            device: run.device,
            parameters: run.parameters,
            accuracy: ratio(run.correct as f64, run.test_images as f64),
            correct: run.correct,
            test_images: run.test_images,
            epochs: run.epochs,
            batch_size_per_rank: run.batch_size,
            steps,
            samples_per_second: ratio(sum(|rank| rank.images as f64), per_rank),
            step_ms: ratio(1000.0 * per_rank, steps as f64),
            wait_share: ratio(sum(|rank| rank.wait_seconds), training),
            final_losses: ranks.iter().map(|rank| rank.final_loss).collect(),
            replicas_equal: replicas.is_ok(),
            replica_difference: replicas.as_ref().err().cloned(),
            replica_fingerprints: replicas.unwrap_or_default(),
            peak_memory_bytes: ranks.iter().map(|rank| rank.peak_memory_bytes).collect(),
            bucket_bytes: ranks.first().map_or(0, |rank| rank.bucket_bytes),
            checkpoint: run.checkpoint,
            seconds: run.seconds,
        }
    }

    /// In what way the replicas differ, if they do.
    pub(crate) fn replica_difference(&self) -> Option<&str> {
        self.replica_difference.as_deref()
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let device = match self.device {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Gpu => "GPU",
        };
        let replicas = match self.replica_fingerprints.first() {
            Some(fingerprint) => format!("PASS, {fingerprint} on every rank"),
            None => "FAIL, they differ".to_owned(),
        };
        let checkpoint = self.checkpoint.as_ref();
        vec![
            ("world size", format!("{} ({device})", self.world_size)),
            ("parameters", thousands(self.parameters as u64)),
            (
                "test accuracy",
                format!(
                    "{:.2} %, {} of {} images",
                    100.0 * self.accuracy,
                    thousands(self.correct as u64),
                    thousands(self.test_images as u64)
                ),
            ),
            (
                "epochs",
                format!(
                    "{} of batches of {} per rank",
                    self.epochs, self.batch_size_per_rank
                ),
            ),
            (
                "throughput",
                format!(
                    "{} samples/s, {:.2} ms per step",
                    thousands(self.samples_per_second as u64),
                    self.step_ms
                ),
            ),
            (
                "waiting",
                format!(
                    "{:.1} % of step time, for other ranks",
                    100.0 * self.wait_share
                ),
            ),
            ("replicas", replicas),
            (
                "checkpoint",
                checkpoint.map_or("none".to_owned(), |path| path.display().to_string()),
            ),
            ("time", format!("{:.1} s", self.seconds)),
        ]
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.rows() {
            writeln!(f, "{name:<15}{value}")?;
        }
        writeln!(f, "\nrank  final loss  peak memory  buckets within it")?;
        let ranks = self.final_losses.iter().zip(&self.peak_memory_bytes);
        for (rank, (loss, memory)) in ranks.enumerate() {
            let loss = loss.map_or("-".to_owned(), |loss| format!("{loss:.4}"));
            let memory = memory.map_or("unknown".to_owned(), mebibytes);
            let buckets = mebibytes(self.bucket_bytes as u64);
            writeln!(f, "{rank:>4}  {loss:>10}  {memory:>11}  {buckets:>17}")?;
        }
        Ok(())
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A number with its digits in groups of three.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .filter_map(|group| std::str::from_utf8(group).ok())
        .collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(replica: Result<String, String>) -> RankReport {
        RankReport {
            final_loss: Some(0.0625),
            peak_memory_bytes: Some(50 << 20),
            bucket_bytes: 1 << 19,
            training_seconds: 4.0,
            wait_seconds: 1.0,
            steps: 100,
            images: 3200,
            replica,
        }
    }

    fn summary(ranks: &[RankReport]) -> Summary {
        let run = Run {
            device: DeviceKind::Cpu,
            parameters: 80_000,
            correct: 1966,
            test_images: 2000,
            epochs: 3,
            batch_size: 32,
            checkpoint: Some("c/checkpoint-1".into()),
            seconds: 9.0,
        };
        Summary::new(run, ranks)
    }

    #[test]
    fn a_summary_has_all_that_programs_ask_for() {
        let summary = summary(&[report(Ok("ab".into())), report(Ok("ab".into()))]);
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["world_size"], 2);
        assert_eq!(json["device"], "cpu");
        assert_eq!(json["accuracy"], 0.983);
        assert_eq!(json["epochs"], 3);
        assert_eq!(json["samples_per_second"], 1600.0);
        assert_eq!(json["step_ms"], 40.0);
        assert_eq!(json["wait_share"], 0.25);
        assert_eq!(
            json["replica_fingerprints"],
            serde_json::json!(["ab", "ab"])
        );
        assert_eq!(json["peak_memory_bytes"][1], 50 << 20);
        assert_eq!(json["bucket_bytes"], 1 << 19);
        assert_eq!(json["checkpoint"], "c/checkpoint-1");
        assert_eq!(json["final_losses"][0], 0.0625);
    }

    #[test]
    fn the_table_shows_every_rank() {
        let mut idle = report(Ok("ab".into()));
        (idle.final_loss, idle.peak_memory_bytes) = (None, None);
        let text = summary(&[report(Ok("ab".into())), idle]).to_string();
        assert!(text.contains("98.30 %, 1,966 of 2,000 images"), "{text}");
        assert!(text.contains("PASS, ab on every rank"), "{text}");
        assert!(
            text.contains("   0      0.0625     50.0 MiB            0.5 MiB"),
            "{text}"
        );
        assert!(text.contains("   1           -      unknown"), "{text}");
    }

    #[test]
    fn replicas_that_differ_fail() {
        let differ = || report(Err("`conv1.weight` of rank 1 differs".into()));
        let summary = summary(&[differ(), differ()]);
        assert!(summary.to_string().contains("FAIL"));
        assert!(summary.replica_difference().unwrap().contains("conv1"));
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["replicas_equal"], false);
        assert_eq!(json["replica_fingerprints"], serde_json::json!([]));
    }

    #[test]
    fn no_steps_make_no_rates() {
        let mut idle = report(Ok("ab".into()));
        (
            idle.steps,
            idle.images,
            idle.training_seconds,
            idle.wait_seconds,
        ) = (0, 0, 0.0, 0.0);
        let summary = summary(&[idle]);
        assert_eq!((summary.samples_per_second, summary.step_ms), (0.0, 0.0));
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(thousands(12), "12");
    }
}
