//! What the ranks print arrives whole and complete.

mod support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use support::{Records, TestResult, burnrun, fixture, run};

#[test]
fn lines_of_many_ranks_are_whole_complete_and_in_order() -> TestResult {
    const RANKS: usize = 4;
    const LINES: usize = 3000;
    let lines = format!("lines={LINES}");
    let finished = run(burnrun(&["--quiet", "--nproc-per-node", "4"], &[&lines]))?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for output in [finished.stdout(), finished.stderr.clone()] {
        let mut next: HashMap<usize, usize> = HashMap::new();
        for line in output.lines() {
            let (prefix, text) = line.split_once("] ").ok_or(line)?;
            let rank: usize = prefix.strip_prefix("[rank ").ok_or(line)?.parse()?;
            let number = next.entry(rank).or_default();
            assert_eq!(text, format!("line {number} of rank {rank} ends here"));
            *number += 1;
        }
        assert_eq!(next.len(), RANKS);
        assert!(next.values().all(|&count| count == LINES), "{next:?}");
    }
    Ok(())
}

#[test]
fn a_last_line_without_newline_is_finished() -> TestResult {
    let actions = ["0:partial=zero", "0:kill=9", "1:partial=one"];
    let finished = run(burnrun(&["--quiet", "--nproc-per-node", "2"], &actions))?;
    let stdout = finished.stdout();
    let mut lines: Vec<&str> = stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 0] zero", "[rank 1] one"]);
    assert!(stdout.ends_with('\n'));
    Ok(())
}

#[test]
fn invalid_utf8_passes_unchanged() -> TestResult {
    let finished = run(burnrun(&["--quiet"], &["bytes=fffe410a80"]))?;
    assert_eq!(finished.stdout, b"[rank 0] \xff\xfeA\n[rank 0] \x80\n");
    Ok(())
}

#[test]
fn a_very_long_line_comes_in_pieces() -> TestResult {
    let finished = run(burnrun(&["--quiet"], &["long=10000000"]))?;
    let stdout = finished.stdout();
    assert!(
        stdout
            .lines()
            .all(|line| line.len() <= 64 * 1024 + "[rank 0] ".len())
    );
    let text: String = stdout
        .lines()
        .filter_map(|line| line.strip_prefix("[rank 0] "))
        .collect();
    assert_eq!(text.len(), 10_000_000);
    assert!(
        text.chars()
            .zip(('a'..='z').cycle())
            .all(|(is, should)| is == should)
    );
    Ok(())
}

#[test]
fn without_prefix_lines_are_as_printed() -> TestResult {
    let finished = run(burnrun(
        &["--quiet", "--no-prefix"],
        &["say=out", "complain=err"],
    ))?;
    assert_eq!(finished.stdout(), "out\n");
    assert_eq!(finished.stderr, "err\n");
    Ok(())
}

#[test]
fn standard_input_is_empty() -> TestResult {
    let finished = run(burnrun(&["--quiet"], &["read"]))?;
    assert_eq!(finished.stdout(), "[rank 0] read 0\n");
    Ok(())
}

#[test]
fn logs_hold_what_each_rank_printed() -> TestResult {
    let records = Records::new()?;
    let directory = records.path().join("new/logs");
    let option = format!("--log-dir={}", directory.display());
    let actions = ["0:say=a", "0:complain=b", "1:say=c"];
    let finished = run(burnrun(&["--nproc-per-node", "2", &option], &actions))?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let mut first: Vec<String> = std::fs::read_to_string(directory.join("rank-0.log"))?
        .lines()
        .map(str::to_owned)
        .collect();
    first.sort_unstable();
    assert_eq!(first, ["a", "b"]);
    assert_eq!(
        std::fs::read_to_string(directory.join("rank-1.log"))?,
        "c\n"
    );
    Ok(())
}

#[test]
fn a_full_disk_ends_the_log_and_not_the_job() -> TestResult {
    let records = Records::new()?;
    std::os::unix::fs::symlink("/dev/full", records.path().join("rank-0.log"))?;
    let option = format!("--log-dir={}", records.path().display());
    let finished = run(burnrun(&[&option], &["say=a", "sleep=50", "say=b"]))?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(finished.stdout(), "[rank 0] a\n[rank 0] b\n");
    let complaints = finished
        .stderr
        .matches("rank-0.log: No space left on device")
        .count();
    assert_eq!(complaints, 1, "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_reader_that_goes_ends_the_job() -> TestResult {
    let records = Records::new()?;
    let record = records.action("record");
    let mut command = burnrun(
        &["--nproc-per-node", "2"],
        &[&record, "lines=1000000", "hang"],
    );
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdout = BufReader::new(child.stdout.take().ok_or("no stdout")?);
    let mut line = String::new();
    stdout.read_line(&mut line)?;
    assert!(line.starts_with("[rank "), "{line}");
    drop(stdout);
    // Its reader stays, or stderr would be gone as well.
    let mut stderr = String::new();
    child
        .stderr
        .take()
        .ok_or("no stderr")?
        .read_to_string(&mut stderr)?;
    assert_eq!(child.wait()?.code(), Some(141));
    assert!(stderr.contains("the reader of its stdout is gone"));
    records.assert_ended(2)
}

#[test]
fn a_full_disk_under_stdout_ends_the_job_with_an_error() -> TestResult {
    let mut command = burnrun(&[], &["say=a", "hang"]);
    let full = std::fs::File::options().write(true).open("/dev/full")?;
    let output = command
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn()?
        .wait_with_output()?;
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("can't write to stdout: No space left on device"),
        "{stderr}"
    );
    Ok(())
}

#[test]
fn a_daemon_that_keeps_the_pipes_open_delays_nothing() -> TestResult {
    let records = Records::new()?;
    // `setsid` takes the child out of the rank's process group.
    let script = format!(
        "setsid sh -c 'echo $$ > {0}/.d; mv {0}/.d {0}/d; exec sleep 300' & while [ ! -e {0}/d ]; do sleep 0.01; done; echo done",
        records.path().display()
    );
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_burnrun"));
    command
        .args(["--quiet", "--", "sh", "-c", &script])
        .stdout(Stdio::piped());
    let mut child = command.spawn()?;
    // Not to its end: the daemon has nothing to do with this pipe.
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
    assert_eq!(line, "[rank 0] done\n");
    assert_eq!(child.wait()?.code(), Some(0));
    let daemon = std::fs::read_to_string(records.path().join("d"))?
        .trim()
        .parse()?;
    let daemon = rustix::process::Pid::from_raw(daemon).ok_or("no pid")?;
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL)?;
    Ok(())
}

#[test]
fn rank_0_draws_on_the_terminal_and_the_others_lines_stay_whole() -> TestResult {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&terminal)?;
    unlockpt(&terminal)?;
    let path = ptsname(&terminal, Vec::new())?.into_string()?;
    let open = || std::fs::File::options().read(true).write(true).open(&path);
    for (option, shared) in [(None, true), (Some("--capture-rank0"), false)] {
        let mut options = vec!["--quiet", "--nproc-per-node=2"];
        options.extend(option);
        let mut command = burnrun(&options, &["terminal"]);
        // One end stays open here, so that reading never meets the end.
        let slave = open()?;
        let mut child = command.stderr(open()?).stdout(Stdio::null()).spawn()?;
        let mut seen = Vec::new();
        let mut chunk = [0; 4096];
        let mut is_complete = || -> std::io::Result<String> {
            let length = rustix::io::read(&terminal, &mut chunk)?;
            seen.extend_from_slice(&chunk[..length]);
            Ok(String::from_utf8_lossy(&seen).into_owned())
        };
        let mut text = String::new();
        while text.matches("a terminal: ").count() < 2 || !text.ends_with('\n') {
            text = is_complete()?;
        }
        assert_eq!(child.wait()?.code(), Some(0));
        drop(slave);
        let rank_0 = match shared {
            true => "stderr is a terminal: true\r\n",
            false => "[rank 0] stderr is a terminal: false\r\n",
        };
        assert!(text.contains(rank_0), "{text:?}");
        assert!(
            text.contains("[rank 1] stderr is a terminal: false\r\n"),
            "{text:?}"
        );
        assert_eq!(text.contains("\r\u{1b}[K[rank 1]"), shared, "{text:?}");
    }
    Ok(())
}

#[test]
fn the_fixture_is_there() {
    assert!(fixture().is_file());
}
