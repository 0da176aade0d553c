//! Ranks that form a process group: the store and the ends of their processes
//! together tell which failed first, on one machine and on two.

mod support;

use std::process::Command;

use support::{Finished, Running, TestResult, burnrun, run};

fn cause(finished: &Finished) -> Option<&str> {
    finished
        .stderr
        .lines()
        .find_map(|line| line.strip_prefix("burnrun: the job failed: "))
}

fn assert_cause(finished: &Finished, code: i32, expected: &str) {
    let stderr = &finished.stderr;
    assert_eq!(finished.code, Some(code), "{stderr}");
    assert!(
        cause(finished).is_some_and(|cause| cause.starts_with(expected)),
        "{stderr}"
    );
}

#[test]
fn a_group_comes_and_goes() -> TestResult {
    let finished = run(burnrun(
        &["--nproc-per-node=3"],
        &["join", "barrier", "check", "leave"],
    ))?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(finished.stdout().matches("the group works").count(), 3);
    Ok(())
}

#[test]
fn a_killed_rank_is_the_cause_of_its_peers_errors() -> TestResult {
    let actions = ["join", "1:sleep=100", "1:kill=9", "reduce"];
    let finished = run(burnrun(&["--nproc-per-node=3"], &actions))?;
    assert_cause(&finished, 137, "rank 1 was killed by signal 9 (SIGKILL)");
    for rank in [0, 2] {
        let said = format!("[rank {rank}] Error: ");
        let line = finished.stderr.lines().find(|line| line.starts_with(&said));
        assert!(
            line.is_some_and(|line| line.contains("rank 1") || line.contains("ranks: [1]")),
            "{}",
            finished.stderr
        );
        assert!(
            finished
                .stderr
                .contains(&format!("\n  rank {rank} exited with code 1, ")),
            "{}",
            finished.stderr
        );
    }
    Ok(())
}

#[test]
fn a_panic_that_unwinds_longer_than_its_peers_take_to_fail() -> TestResult {
    let actions = ["join", "1:panic-slowly=for a reason", "reduce"];
    let finished = run(burnrun(&["--nproc-per-node=2"], &actions))?;
    assert_cause(&finished, 101, "rank 1 exited with code 101");
    assert!(
        finished.stderr.contains(": for a reason\n"),
        "{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn a_panic_is_known_from_the_store_where_stderr_is_not_captured() -> TestResult {
    // A closed stderr shows nothing.
    let script = format!(
        "exec {} join 1:panic-slowly=for-a-reason reduce 2>/dev/null",
        support::fixture().display()
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_burnrun"));
    command.args(["--nproc-per-node=2", "--", "sh", "-c", &script]);
    let finished = run(command)?;
    assert_cause(&finished, 101, "rank 1 exited with code 101");
    assert!(
        finished.stderr.contains("for-a-reason"),
        "{}",
        finished.stderr
    );
    assert!(
        finished.stderr.contains("fixture_rank.rs:"),
        "{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn a_rank_that_leaves_and_then_fails_is_the_cause() -> TestResult {
    let actions = ["join", "1:leave", "1:sleep=100", "1:exit=4", "reduce"];
    let finished = run(burnrun(&["--nproc-per-node=2"], &actions))?;
    assert_cause(&finished, 4, "rank 1 exited with code 4");
    Ok(())
}

#[test]
fn a_rank_that_never_joins_is_the_cause() -> TestResult {
    let finished = run(burnrun(
        &["--nproc-per-node=2"],
        &["1:sleep=100", "1:exit=5", "join"],
    ))?;
    assert_cause(&finished, 5, "rank 1 exited with code 5");
    Ok(())
}

/// Starts one burnrun per machine, both on this one.
fn two_machines(actions: &[&str]) -> Result<[Finished; 2], Box<dyn std::error::Error>> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?
        .local_addr()?
        .port();
    let start = |node: usize| {
        let options = [
            "--nproc-per-node=2".to_owned(),
            "--nnodes=2".to_owned(),
            format!("--node-rank={node}"),
            "--master-addr=127.0.0.1".to_owned(),
            format!("--master-port={port}"),
        ];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let mut command = burnrun(&options, actions);
        Running::start(command.env("BURN_DDP_SECRET", "5c".repeat(32)))
    };
    let [first, second] = [start(0)?, start(1)?];
    Ok([first.finish()?, second.finish()?])
}

#[test]
fn two_machines_and_the_store_stays_until_the_last_has_left() -> TestResult {
    // The second machine's ranks stay in the group long after the first's.
    let actions = [
        "join",
        "barrier",
        "0:leave",
        "0:exit=0",
        "1:leave",
        "1:exit=0",
        "sleep=400",
        "check",
    ];
    let finished = two_machines(&actions)?;
    for machine in &finished {
        assert_eq!(machine.code, Some(0), "{}", machine.stderr);
    }
    assert!(finished[1].stdout().contains("[rank 3] the group works\n"));
    assert!(
        finished[0].stderr.contains("all 4 ranks succeeded"),
        "{}",
        finished[0].stderr
    );
    Ok(())
}

#[test]
fn a_failure_on_another_machine_is_named() -> TestResult {
    let actions = ["join", "barrier", "3:panic-slowly=over here", "reduce"];
    let [first, second] = two_machines(&actions)?;
    assert_cause(&first, 1, "rank 3 (on another machine) was lost");
    assert!(first.stderr.contains("over here"), "{}", first.stderr);
    assert_ne!(second.code, Some(0), "{}", second.stderr);
    Ok(())
}

#[test]
fn a_failure_on_another_machine_after_the_end_here() -> TestResult {
    let actions = [
        "join",
        "barrier",
        "0:leave",
        "0:exit=0",
        "1:leave",
        "1:exit=0",
        "sleep=300",
        "2:kill=9",
        "hang",
    ];
    let [first, second] = two_machines(&actions)?;
    assert_cause(&first, 1, "rank 2 (on another machine) was lost");
    assert_cause(&second, 137, "rank 2 was killed by signal 9 (SIGKILL)");
    Ok(())
}
