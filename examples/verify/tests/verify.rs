//! Verification on several ranks, of what is right and of what is not.

use std::fs;

use burn_ddp_tests::TestJob;
use serde_json::Value;

fn verify(ranks: usize) -> TestJob {
    TestJob::new(env!("CARGO_BIN_EXE_verify"), ranks)
}

#[test]
fn data_parallel_training_passes() {
    for (ranks, transport) in [(1, ""), (2, ""), (2, "tcp"), (3, "")] {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let json = directory.path().join("verify.json");
        let mut job = verify(ranks).arg("--json").arg(&json);
        if !transport.is_empty() {
            job = job.env("BURN_DDP_TRANSPORT", transport);
        }
        let outputs = job.succeed();
        let table = &outputs[0].stdout;
        assert!(!table.contains("FAIL"), "{table}");
        // Ten parameters, twice, and seven checks.
        assert_eq!(table.matches("PASS").count(), 2 * 10 + 7, "{table}");
        assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()));

        let json = fs::read(json).expect("rank 0 wrote it");
        let report: Value = serde_json::from_slice(&json).expect("JSON");
        assert_eq!(
            (&report["world_size"], &report["passed"]),
            (&ranks.into(), &true.into())
        );
        let differences = report["gradients"]["differences"]
            .as_array()
            .expect("a list");
        assert_eq!(differences.len(), 10);
        assert!(
            differences
                .iter()
                .all(|d| d["max_relative"].as_f64() <= Some(1e-5))
        );
    }
}

#[test]
fn a_wrong_gradient_on_one_rank_is_found() {
    for rank in ["0", "1"] {
        let outputs = verify(2).arg("--break-gradient").arg(rank).run();
        let table = &outputs[0].stdout;
        for check in ["gradients", "accumulation", "20 optimizer steps"] {
            let line = format!("FAIL  {check}");
            assert!(table.contains(&line), "{line}: {table}");
        }
        // It went to every rank alike.
        assert!(table.contains("PASS  replicas"), "{table}");
        assert!(table.contains("PASS  initial parameters"), "{table}");
        for output in &outputs {
            assert_eq!(output.status.code(), Some(1), "{output:#?}");
            assert!(
                output.stderr.contains("error: 3 checks failed"),
                "{output:#?}"
            );
        }
    }
}

#[test]
fn what_can_not_be_done_is_said() {
    for output in verify(2).arg("--device=gpu").run() {
        assert_eq!(output.status.code(), Some(1), "{output:#?}");
        assert!(output.stderr.contains("built without CUDA"), "{output:#?}");
    }
    for output in verify(2).arg("--json=/no/such/place/verify.json").run() {
        assert_eq!(output.status.code(), Some(1), "{output:#?}");
        let message = "can't write /no/such/place/verify.json";
        assert!(output.stderr.contains(message), "{output:#?}");
    }
}
