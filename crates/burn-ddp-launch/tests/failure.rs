//! One rank fails: the others end, and the report names the right one.

mod support;

use support::{Records, Running, TestResult, burnrun, eventually, has_thread, run};

fn cause(stderr: &str) -> &str {
    stderr
        .lines()
        .find_map(|line| line.strip_prefix("burnrun: the job failed: "))
        .unwrap_or("no cause")
}

#[test]
fn success_is_success() -> TestResult {
    let finished = run(burnrun(&["--nproc-per-node", "3"], &["1:exit=0", "say=x"]))?;
    assert_eq!(finished.code, Some(0));
    assert!(
        finished.stderr.contains("all 3 ranks succeeded"),
        "{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn a_rank_may_end_before_the_others() -> TestResult {
    let finished = run(burnrun(
        &["-q", "--nproc-per-node", "2"],
        &["0:exit=0", "sleep=300", "say=x"],
    ))?;
    assert_eq!(finished.code, Some(0));
    assert_eq!(finished.stdout(), "[rank 1] x\n");
    Ok(())
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed() -> TestResult {
    let records = Records::new()?;
    let (record, first) = (records.action("record"), records.awaiting("0"));
    let actions = [
        &record,
        "1:complain=why",
        &format!("1:{first}"),
        "1:exit=7",
        "hang",
    ];
    let finished = run(burnrun(&["--nproc-per-node", "2"], &actions))?;
    assert_eq!(finished.code, Some(7));
    assert!(
        cause(&finished.stderr).starts_with("rank 1 exited with code 7, "),
        "{}",
        finished.stderr
    );
    assert!(
        finished.stderr.contains("\n    | why\n"),
        "{}",
        finished.stderr
    );
    assert!(
        finished.stderr.contains(
            "\n  rank 0 was killed by signal 15 (SIGTERM) after the launcher sent SIGTERM"
        ),
        "{}",
        finished.stderr
    );
    records.assert_ended(2)
}

#[test]
fn a_panic_is_named_with_its_place() -> TestResult {
    let finished = run(burnrun(
        &["--nproc-per-node", "2"],
        &["1:panic=index 7 is out", "hang"],
    ))?;
    assert_eq!(finished.code, Some(101));
    assert!(
        cause(&finished.stderr).starts_with("rank 1 exited with code 101, "),
        "{}",
        finished.stderr
    );
    let panicked = finished
        .stderr
        .lines()
        .find(|line| line.starts_with("  it panicked at "))
        .ok_or_else(|| finished.stderr.clone())?;
    assert!(panicked.contains("fixture_rank.rs:"), "{panicked}");
    assert!(panicked.ends_with(": index 7 is out"), "{panicked}");
    Ok(())
}

#[test]
fn a_killed_rank_is_named_with_its_signal() -> TestResult {
    for (signal, name) in [(9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT")] {
        let action = format!("0:kill={signal}");
        let finished = run(burnrun(&["--nproc-per-node", "2"], &[&action, "hang"]))?;
        assert_eq!(finished.code, Some(128 + signal));
        let expected = format!("rank 0 was killed by signal {signal} ({name}), ");
        assert!(
            cause(&finished.stderr).starts_with(&expected),
            "{}",
            finished.stderr
        );
    }
    Ok(())
}

#[test]
fn the_first_to_fail_is_the_cause_not_those_that_follow() -> TestResult {
    // Rank 0 fails as soon as it sees that rank 1 is gone, as a peer does.
    for _ in 0..10 {
        let records = Records::new()?;
        let (record, gone) = (records.action("record"), records.action("0:gone"));
        let go = format!("1:{}", records.awaiting("go"));
        let actions = [&record, &gone, "0:exit=3", &go, "1:exit=5"];
        let running = Running::start(&mut burnrun(&["--nproc-per-node", "2"], &actions))?;
        // From then on the launcher watches.
        eventually("the launcher watches", || {
            has_thread(running.pid(), "launch-exits")
        });
        std::fs::write(records.path().join("go"), "")?;
        let finished = running.finish()?;
        assert_eq!(finished.code, Some(5), "{}", finished.stderr);
        assert!(
            finished.stderr.contains("\n  rank 0 exited with code 3, "),
            "{}",
            finished.stderr
        );
    }
    Ok(())
}

#[test]
fn ranks_that_ignore_sigterm_and_their_children_are_killed() -> TestResult {
    let records = Records::new()?;
    let (child, record) = (records.action("child"), records.action("record"));
    let (zero, two) = (records.awaiting("0"), records.awaiting("2"));
    let actions = [
        "ignore=15",
        &child,
        &record,
        &format!("1:{zero}"),
        &format!("1:{two}"),
        "1:exit=4",
        "hang",
    ];
    let finished = run(burnrun(&["--nproc-per-node", "3"], &actions))?;
    assert_eq!(finished.code, Some(4));
    assert!(
        finished.stdout().contains("[rank 0] got 15\n"),
        "{}",
        finished.stdout()
    );
    for rank in [0, 2] {
        let expected = format!(
            "\n  rank {rank} was killed by signal 9 (SIGKILL) after the launcher sent SIGKILL"
        );
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
    }
    records.assert_ended(6)
}

#[test]
fn children_of_ranks_that_succeeded_do_not_stay() -> TestResult {
    let records = Records::new()?;
    let finished = run(burnrun(
        &["--nproc-per-node", "2"],
        &[&records.action("child"), "say=x"],
    ))?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    records.assert_ended(2)
}

#[test]
fn a_rank_that_handles_sigterm_has_time_to() -> TestResult {
    let records = Records::new()?;
    let actions = [
        "0:on=15,3",
        &records.action("record"),
        &format!("1:{}", records.awaiting("0")),
        "1:exit=9",
        "hang",
    ];
    let finished = run(burnrun(
        &["--nproc-per-node", "2", "--grace", "50"],
        &actions,
    ))?;
    assert_eq!(finished.code, Some(9));
    assert!(finished.stdout().contains("[rank 0] got 15\n"));
    assert!(
        finished
            .stderr
            .contains("rank 0 exited with code 3 after the launcher sent SIGTERM"),
        "{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn a_stopped_rank_is_ended_too() -> TestResult {
    let records = Records::new()?;
    let record = records.action("record");
    let actions = [
        &record,
        &format!("1:{}", records.awaiting("0")),
        "1:sleep=50",
        "1:exit=2",
        "0:kill=19",
    ];
    let finished = run(burnrun(&["--nproc-per-node", "2"], &actions))?;
    assert_eq!(finished.code, Some(2), "{}", finished.stderr);
    records.assert_ended(2)
}

#[test]
fn the_report_as_json() -> TestResult {
    let records = Records::new()?;
    let path = records.path().join("report.json");
    let option = format!("--json={}", path.display());
    let finished = run(burnrun(
        &["--nproc-per-node", "2", &option],
        &["1:panic=oh", "hang"],
    ))?;
    assert_eq!(finished.code, Some(101));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(path)?)?;
    assert_eq!(report["exit_code"], 101);
    assert_eq!(report["world_size"], 2);
    assert_eq!(report["outcome"]["rank_failed"]["rank"], 1);
    assert_eq!(report["outcome"]["rank_failed"]["panic"]["message"], "oh");
    assert_eq!(report["ranks"][1]["status"]["code"], 101);
    assert_eq!(report["ranks"][0]["status"]["signal"], 15);
    assert!(
        report["seconds"]
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0)
    );
    Ok(())
}
