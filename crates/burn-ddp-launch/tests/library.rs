//! The library as a program uses it that drives jobs of its own.

mod support;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn_ddp_launch::{ExitStatus, Job, JobBuilder, Outcome, Stream};
use support::{Records, TestResult, fixture};

fn job(actions: &[&str]) -> JobBuilder {
    Job::builder(fixture()).args(actions).print(false)
}

#[test]
fn lines_and_report_of_a_success() -> TestResult {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&lines);
    let report = job(&["0:say=from 0", "1:complain=from 1", "env=MINE"])
        .ranks(2)
        .env("MINE", "x")
        .on_line(move |line| {
            let mut lines = seen.lock().unwrap_or_else(PoisonError::into_inner);
            lines.push((line.rank, line.stream, line.text.to_owned()));
        })
        .run()?;
    assert!(report.success());
    assert_eq!(
        (report.exit_code, report.world_size, report.ranks.len()),
        (0, 2, 2)
    );
    assert!(report.ranks.iter().all(|rank| rank.status.success()));
    assert!(report.start_seconds <= report.seconds);
    let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
    lines.sort_by_key(|(rank, _, text)| (*rank, text.clone()));
    let expected = [
        (0, Stream::Stdout, "MINE=x"),
        (0, Stream::Stdout, "from 0"),
        (1, Stream::Stdout, "MINE=x"),
        (1, Stream::Stderr, "from 1"),
    ];
    let expected = expected.map(|(rank, stream, text)| (rank, stream, text.to_owned()));
    assert_eq!(lines, expected);
    Ok(())
}

#[test]
fn report_of_a_failure() -> TestResult {
    let report = job(&["1:panic=for a reason", "hang"]).ranks(3).run()?;
    assert!(!report.success());
    assert_eq!(report.exit_code, 101);
    let cause = report.root_cause().ok_or("no root cause")?;
    assert_eq!(cause.rank, 1);
    assert_eq!(cause.status, Some(ExitStatus::Code(101)));
    let message = cause.panic.as_ref().map(|panic| &*panic.message);
    assert_eq!(message, Some("for a reason"));
    assert!(
        cause
            .stderr_tail
            .iter()
            .any(|line| line.contains("panicked at"))
    );
    assert_eq!(report.ranks[0].signal_sent, Some(15));
    Ok(())
}

#[test]
fn jobs_run_side_by_side_and_one_after_the_other() -> TestResult {
    let threads: Vec<_> = (0..4)
        .map(|code| {
            std::thread::spawn(move || {
                let exit = format!("1:exit={code}");
                let run = || job(&[&exit]).ranks(2).run().map(|report| report.exit_code);
                (run(), run())
            })
        })
        .collect();
    for (code, thread) in threads.into_iter().enumerate() {
        let (first, second) = thread.join().map_err(|_| "panicked")?;
        assert_eq!(
            (first?, second?),
            (i32::try_from(code)?, i32::try_from(code)?)
        );
    }
    Ok(())
}

#[test]
fn a_panicking_callback_ends_the_job() -> TestResult {
    let report = job(&["say=x", "hang"])
        .on_line(|_| panic!("the callback's"))
        .run()?;
    assert_ne!(report.exit_code, 0);
    assert!(
        matches!(report.outcome, Outcome::OutputFailed { .. }),
        "{report}"
    );
    Ok(())
}

#[test]
fn nothing_is_left_of_a_job_that_could_not_start() -> TestResult {
    let records = Records::new()?;
    let missing = records.path().join("missing");
    let error = Job::builder(fixture())
        .current_dir(&missing)
        .run()
        .err()
        .ok_or("it ran")?;
    assert!(error.to_string().contains("no such directory"), "{error}");

    let error = job(&[]).ranks(0).run().err().ok_or("it ran")?;
    assert!(
        error.to_string().contains("number of ranks is 0"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_signal_that_nobody_expects_still_kills_this_process_after_a_job() -> TestResult {
    // In a process of its own: this test, told to be the victim.
    if std::env::var_os("VICTIM").is_some() {
        job(&["say=x"]).run()?;
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::TERM)?;
        std::thread::sleep(support::DEADLINE);
        return Err("survived SIGTERM".into());
    }
    let mut command = std::process::Command::new(std::env::current_exe()?);
    command
        .args([
            "--exact",
            "a_signal_that_nobody_expects_still_kills_this_process_after_a_job",
        ])
        .env("VICTIM", "1");
    let finished = support::run(command)?;
    let signal = std::os::unix::process::ExitStatusExt::signal(&finished.status);
    assert_eq!(signal, Some(15), "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_rank_out_of_patience() -> TestResult {
    let report = job(&["ignore=15", "1:sleep=100", "1:exit=6", "hang"])
        .ranks(2)
        .grace(Duration::ZERO)
        .run()?;
    assert_eq!(report.exit_code, 6);
    assert_eq!(report.ranks[0].status, ExitStatus::Signal(9));
    Ok(())
}
