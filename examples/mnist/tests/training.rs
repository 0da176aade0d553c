//! Trains on several ranks.

mod support;

use std::fs;

use support::{Place, binary, mnist};

#[test]
fn defaults_reach_their_accuracy_on_two_ranks() {
    let place = Place::new();
    let job = mnist(2)
        .arg("--checkpoint-dir")
        .arg(place.checkpoints())
        .arg("--json")
        .arg(place.json());
    let (outputs, summary) = place.summary(job);
    assert_eq!(summary["epochs"], 3);
    assert_eq!(summary["test_images"], 2000);
    let accuracy = summary["accuracy"].as_f64().expect("a number");
    assert!(accuracy >= 0.975, "{outputs:#?}");
}

#[test]
fn the_summary_is_of_all_ranks() {
    for ranks in [1, 2, 4] {
        let place = Place::new();
        let (outputs, summary) = place.summary(place.job(ranks));
        assert_eq!(summary["world_size"], ranks);
        assert_eq!(summary["device"], "cpu");
        assert_eq!(
            (&summary["epochs"], &summary["steps"]),
            (&2.into(), &20.into())
        );
        assert_eq!(summary["test_images"], 60);
        assert!(summary["accuracy"].as_f64() > Some(0.9), "{summary:#}");
        assert!(summary["samples_per_second"].as_f64() > Some(0.0));
        let wait_share = summary["wait_share"].as_f64().expect("a number");
        assert!((0.0..1.0).contains(&wait_share), "{wait_share}");

        let fingerprints = summary["replica_fingerprints"].as_array().expect("a list");
        assert_eq!(fingerprints.len(), ranks);
        assert!(
            fingerprints
                .iter()
                .all(|f| f == &fingerprints[0] && f.as_str() != Some(""))
        );
        let memory = summary["peak_memory_bytes"].as_array().expect("a list");
        let buckets = summary["bucket_bytes"].as_u64().expect("a number");
        assert_eq!(memory.len(), ranks);
        // Gradients of f32, with a flag for each tensor.
        let gradients = summary["parameters"].as_u64().map_or(0, |n| 4 * n);
        assert!(
            (gradients..gradients + 1024).contains(&buckets),
            "{buckets}"
        );
        assert!(memory.iter().all(|bytes| bytes.as_u64() > Some(buckets)));
        let losses = summary["final_losses"].as_array().expect("a list");
        assert!(
            losses
                .iter()
                .all(|loss| loss.as_f64().is_some_and(f64::is_finite))
        );
        assert_eq!(losses.len(), ranks);

        let checkpoint = place.checkpoints().join("checkpoint-000000000020");
        assert_eq!(summary["checkpoint"].as_str(), checkpoint.to_str());
        let table = &outputs[0].stdout;
        assert!(table.contains("test accuracy"), "{table}");
        assert!(
            table.contains(fingerprints[0].as_str().expect("text")),
            "{table}"
        );
        assert!(table.contains(&checkpoint.display().to_string()), "{table}");
    }
}

#[test]
fn only_rank_0_speaks_and_in_plain_lines_without_a_terminal() {
    let place = Place::new();
    let (outputs, _) = place.summary(place.job(2));
    for output in &outputs[1..] {
        assert_eq!((&*output.stdout, &*output.stderr), ("", ""));
    }
    let lines: Vec<&str> = outputs[0].stderr.lines().collect();
    assert!(!outputs[0].stderr.contains(['\r', '\x1b']), "{lines:#?}");
    for epoch in ["epoch 1/2", "epoch 2/2"] {
        let end = lines
            .iter()
            .find(|line| line.starts_with(epoch) && line.contains("100 %"))
            .unwrap_or_else(|| panic!("{lines:#?}"));
        for part in ["loss ", "samples/s", "waiting "] {
            assert!(end.contains(part), "{end}");
        }
    }
}

#[test]
fn batches_that_do_not_divide_the_images_are_padded() {
    let place = Place::new();
    // 200 images in steps of 3 * 16 = 48.
    let job = mnist(3)
        .arg("--epochs=1")
        .arg("--batch-size=16")
        .arg("--data-dir")
        .arg(place.data())
        .arg("--checkpoint-dir")
        .arg(place.checkpoints())
        .arg("--json")
        .arg(place.json());
    let (_, summary) = place.summary(job);
    assert_eq!(
        (&summary["steps"], &summary["test_images"]),
        (&5.into(), &60.into())
    );
}

#[test]
fn the_default_checkpoint_directory_is_used_again() {
    let place = Place::new();
    let work = tempfile::tempdir().expect("a temporary directory");
    for epochs in ["2", "1"] {
        let output = std::process::Command::new(binary())
            .args(["--epochs", epochs, "--batch-size=20", "--data-dir"])
            .arg(place.data())
            .current_dir(work.path())
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{output:#?}");
    }
    let checkpoints = work.path().join("target/mnist-checkpoints");
    let names: Vec<_> = fs::read_dir(checkpoints)
        .expect("it was made")
        .map(|entry| entry.expect("readable").file_name())
        .collect();
    assert_eq!(names, ["checkpoint-000000000010"]);
}
