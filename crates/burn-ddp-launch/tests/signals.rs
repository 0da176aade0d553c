//! Signals to the launcher, and its death.

mod support;

use rustix::process::{Pid, Signal};
use support::{Records, Running, TestResult, burnrun, children, eventually, is_running};

/// Starts two ranks, each with a child that ignores signals, and waits until
/// they run.
fn start(
    records: &Records,
    options: &[&str],
    actions: &[&str],
) -> Result<Running, Box<dyn std::error::Error>> {
    let mut all = vec![records.action("child"), records.action("record")];
    all.splice(0..0, actions.iter().map(ToString::to_string));
    all.push("hang".into());
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let options = [&["--nproc-per-node", "2"], options].concat();
    let running = Running::start(&mut burnrun(&options, &all))?;
    records.wait("0")?;
    records.wait("1")?;
    Ok(running)
}

#[test]
fn signals_are_passed_on_and_end_the_job() -> TestResult {
    for (signal, name) in [
        (Signal::INT, "SIGINT"),
        (Signal::TERM, "SIGTERM"),
        (Signal::HUP, "SIGHUP"),
    ] {
        let records = Records::new()?;
        let running = start(&records, &[], &[])?;
        running.signal(signal)?;
        let finished = running.finish()?;
        let number = signal.as_raw();
        assert_eq!(finished.code, Some(128 + number), "{}", finished.stderr);
        let expected = format!("the job was interrupted by signal {number} ({name})");
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
        let expected =
            format!("rank 1 was killed by signal {number} ({name}) after the launcher sent {name}");
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
        records.assert_ended(4)?;
    }
    Ok(())
}

#[test]
fn ranks_can_end_in_their_own_way() -> TestResult {
    let records = Records::new()?;
    let running = start(&records, &[], &["on=15,0"])?;
    running.signal(Signal::TERM)?;
    let finished = running.finish()?;
    assert_eq!(finished.code, Some(143), "{}", finished.stderr);
    assert!(
        finished.stdout().contains("[rank 0] got 15\n"),
        "{}",
        finished.stdout()
    );
    assert!(
        finished.stderr.contains("rank 0 exited with code 0"),
        "{}",
        finished.stderr
    );
    records.assert_ended(4)
}

#[test]
fn a_second_interrupt_kills() -> TestResult {
    let records = Records::new()?;
    let running = start(&records, &["--grace", "10000"], &["ignore=2"])?;
    running.signal(Signal::INT)?;
    // Not merged with the first: that one is seen in what the ranks do.
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(is_running(records.wait("0")?));
    running.signal(Signal::INT)?;
    let finished = running.finish()?;
    assert_eq!(finished.code, Some(130), "{}", finished.stderr);
    assert!(
        finished.stdout().contains("[rank 0] got 2\n"),
        "{}",
        finished.stdout()
    );
    assert!(
        finished
            .stderr
            .contains("rank 0 was killed by signal 9 (SIGKILL)"),
        "{}",
        finished.stderr
    );
    records.assert_ended(4)
}

#[test]
fn ranks_that_ignore_the_signal_are_killed_after_the_grace() -> TestResult {
    let records = Records::new()?;
    let running = start(&records, &["--grace", "0.2"], &["ignore=15"])?;
    running.signal(Signal::TERM)?;
    let finished = running.finish()?;
    assert_eq!(finished.code, Some(143), "{}", finished.stderr);
    assert!(
        finished
            .stderr
            .contains("rank 1 was killed by signal 9 (SIGKILL)"),
        "{}",
        finished.stderr
    );
    records.assert_ended(4)
}

#[test]
fn nothing_outlives_a_killed_launcher() -> TestResult {
    for _ in 0..3 {
        let records = Records::new()?;
        let running = start(&records, &[], &["ignore=15"])?;
        // The ranks and the guardian.
        let processes = children(running.pid());
        assert_eq!(processes.len(), 3);
        running.signal(Signal::KILL)?;
        let finished = running.finish()?;
        assert_eq!(finished.code, None);
        records.assert_ended(4)?;
        for pid in processes {
            eventually("the launcher's children have ended", || !is_running(pid));
        }
    }
    Ok(())
}

#[test]
fn no_guardian_is_left_after_a_normal_end() -> TestResult {
    let records = Records::new()?;
    let running = start(&records, &[], &[])?;
    let processes = children(running.pid());
    running.signal(Signal::INT)?;
    running.finish()?;
    assert!(!processes.into_iter().any(is_running));
    Ok(())
}

#[test]
fn a_killed_guardian_does_not_matter() -> TestResult {
    let records = Records::new()?;
    let running = start(&records, &[], &[])?;
    let ranks = [records.wait("0")?, records.wait("1")?];
    let guardian: Vec<Pid> = children(running.pid())
        .into_iter()
        .filter(|pid| !ranks.contains(pid))
        .collect();
    let [guardian] = guardian[..] else {
        return Err(format!("{guardian:?} is not one guardian").into());
    };
    rustix::process::kill_process(guardian, Signal::KILL)?;
    running.signal(Signal::INT)?;
    let finished = running.finish()?;
    assert_eq!(finished.code, Some(130), "{}", finished.stderr);
    records.assert_ended(4)
}

#[test]
fn nohup_is_respected() -> TestResult {
    let records = Records::new()?;
    let mut command = std::process::Command::new("nohup");
    command
        .arg(env!("CARGO_BIN_EXE_burnrun"))
        .args(["--quiet", "--"])
        .arg(support::fixture())
        .args([
            &records.action("record"),
            &records.awaiting("go"),
            "say=done",
        ]);
    let running = Running::start(&mut command)?;
    records.wait("0")?;
    running.signal(Signal::HUP)?;
    std::thread::sleep(std::time::Duration::from_millis(100));
    std::fs::write(records.path().join("go"), "")?;
    let finished = running.finish()?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(finished.stdout(), "[rank 0] done\n");
    Ok(())
}
