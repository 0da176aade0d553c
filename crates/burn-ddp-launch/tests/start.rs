//! How a job starts, and what a wrong command line gets.

mod support;

use std::process::Command;

use rustix::process::Signal;
use support::{Finished, Records, Running, TestResult, burnrun, run};

fn burnrun_alone(args: &[&str]) -> Result<Finished, Box<dyn std::error::Error>> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burnrun"));
    command.args(args).env_remove("BURN_DDP_SECRET");
    run(command)
}

fn environment_of(
    options: &[&str],
    set: &[(&str, &str)],
) -> Result<String, Box<dyn std::error::Error>> {
    let names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "BURN_DDP_STORE",
        "BURN_DDP_SECRET",
        "RAYON_NUM_THREADS",
        "OMP_NUM_THREADS",
        "BURN_DDP_THREADS",
    ];
    let actions: Vec<String> = names.iter().map(|name| format!("env={name}")).collect();
    let actions: Vec<&str> = actions.iter().map(String::as_str).collect();
    let options = [&["-q", "--no-prefix"], options].concat();
    let mut command = burnrun(&options, &actions);
    command.envs(set.iter().copied());
    let finished = run(command)?;
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    Ok(finished.stdout())
}

fn value<'a>(environment: &'a str, name: &str) -> Option<&'a str> {
    environment
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

#[test]
fn a_rank_is_told_its_place() -> TestResult {
    let cores = std::thread::available_parallelism()?.to_string();
    let environment = environment_of(&[], &[("OMP_NUM_THREADS", "77"), ("RANK", "9")])?;
    for (name, expected) in [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("BURN_DDP_STORE", "launcher"),
        ("OMP_NUM_THREADS", "77"),
        ("RAYON_NUM_THREADS", &cores),
        ("BURN_DDP_THREADS", &cores),
    ] {
        assert_eq!(value(&environment, name), Some(expected), "{name}");
    }
    let other = environment_of(&[], &[])?;
    let secret = |environment| value(environment, "BURN_DDP_SECRET").map(str::to_owned);
    assert_eq!(secret(&environment).map(|secret| secret.len()), Some(64));
    assert_ne!(secret(&environment), secret(&other));
    Ok(())
}

#[test]
fn a_machine_of_several_is_told_its_place() -> TestResult {
    let secret = "5c".repeat(32);
    let options = [
        "--nnodes=3",
        "--node_rank=1",
        "--master_addr=10.1.2.3",
        "--master_port=4567",
    ];
    let environment = environment_of(&options, &[("BURN_DDP_SECRET", &secret)])?;
    for (name, expected) in [
        ("RANK", "1"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "10.1.2.3"),
        ("MASTER_PORT", "4567"),
        ("BURN_DDP_SECRET", &secret),
    ] {
        assert_eq!(value(&environment, name), Some(expected), "{name}");
    }
    Ok(())
}

#[test]
fn every_rank_can_connect_at_once_whatever_else_starts() -> TestResult {
    let jobs: Result<Vec<Running>, _> = (0..6)
        .map(|_| Running::start(&mut burnrun(&["-q", "--nproc-per-node=3"], &["connect"])))
        .collect();
    for job in jobs? {
        let finished = job.finish()?;
        assert_eq!(finished.code, Some(0), "{}", finished.stderr);
        assert_eq!(finished.stdout().matches("connected").count(), 3);
    }
    Ok(())
}

#[test]
fn the_secret_is_on_no_command_line() -> TestResult {
    let records = Records::new()?;
    let record = records.action("record");
    let actions = ["env=BURN_DDP_SECRET", &record, "hang"];
    let running = Running::start(&mut burnrun(&["-q", "--no-prefix"], &actions))?;
    records.wait("0")?;
    let lines: Vec<Vec<u8>> = std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .collect();
    running.signal(Signal::INT)?;
    let stdout = running.finish()?.stdout();
    let secret = value(&stdout, "BURN_DDP_SECRET")
        .ok_or("no secret")?
        .as_bytes();
    assert_eq!(secret.len(), 64);
    assert!(
        lines
            .iter()
            .any(|line| line.windows(7).any(|part| part == b"burnrun"))
    );
    assert!(
        !lines
            .iter()
            .any(|line| line.windows(64).any(|part| part == secret))
    );
    Ok(())
}

#[test]
fn a_port_that_is_taken_is_named() -> TestResult {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port().to_string();
    let finished = run(burnrun(&["--master-port", &port], &["say=x"]))?;
    assert_eq!(finished.code, Some(1), "{}", finished.stderr);
    assert!(finished.stderr.contains(&port), "{}", finished.stderr);
    assert_eq!(finished.stdout(), "");
    Ok(())
}

#[test]
fn what_can_not_be_started_is_named() -> TestResult {
    let records = Records::new()?;
    let directory = records.path().display();
    let plain = format!("{directory}/plain");
    std::fs::write(&plain, "")?;
    let script = format!("{directory}/script");
    std::fs::write(&script, "#!/no/such/interpreter\n")?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode)?;
    for (program, expected) in [
        ("no-such-program", "no such program on the PATH"),
        (
            "/no/such/program",
            "`/no/such/program`: there is no such file",
        ),
        (&plain, "can't execute"),
        (&script, "the interpreter that it names"),
        ("", "the program's name is empty"),
    ] {
        let finished = burnrun_alone(&["--nproc-per-node=2", "--", program])?;
        assert_eq!(finished.code, Some(2), "{program}: {}", finished.stderr);
        assert!(finished.stderr.contains(expected), "{}", finished.stderr);
    }
    Ok(())
}

#[test]
fn a_wrong_command_line_is_explained() -> TestResult {
    let odd_secret: &[(&str, &str)] = &[("BURN_DDP_SECRET", "abc")];
    for (args, set, expected) in [
        (&[][..], &[][..], "PROGRAM"),
        (&["--nproc-per-node=0", "x"], &[], "give 1 or more"),
        (&["--nproc-per-node=many", "x"], &[], "`many`"),
        (&["--nproc-per-nod=2", "x"], &[], "--nproc-per-nod"),
        (&["--grace=-1", "x"], &[], "--grace"),
        (&["--node-rank=1", "x"], &[], "--nnodes"),
        (&["--nnodes=2", "x"], &[], "--master-addr"),
        (
            &["--nnodes=2", "--master-addr=h", "x"],
            &[],
            "burnrun --new-secret",
        ),
        (&["--nnodes=2", "--master-addr=h", "x"], odd_secret, "64"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burnrun"));
        command
            .args(args)
            .env_remove("BURN_DDP_SECRET")
            .envs(set.iter().copied());
        let finished = run(command)?;
        assert_eq!(finished.code, Some(2), "{args:?}: {}", finished.stderr);
        assert!(
            finished.stderr.contains(expected),
            "{args:?}: {}",
            finished.stderr
        );
        assert_eq!(finished.stdout(), "");
    }
    Ok(())
}

#[test]
fn no_visible_gpu_is_an_error_that_names_what_is_missing() -> TestResult {
    let mut command = burnrun(&["--nproc-per-node=gpu"], &["say=x"]);
    command.env("CUDA_VISIBLE_DEVICES", "");
    let finished = run(command)?;
    assert_eq!(finished.code, Some(1), "{}", finished.stderr);
    assert!(
        finished.stderr.contains("CUDA_VISIBLE_DEVICES"),
        "{}",
        finished.stderr
    );

    let mut command = burnrun(&["-q", "--nproc-per-node=gpu"], &["env=WORLD_SIZE"]);
    command.env("CUDA_VISIBLE_DEVICES", "0,1,2");
    let finished = run(command)?;
    assert_eq!(finished.stdout().matches("WORLD_SIZE=3\n").count(), 3);
    Ok(())
}

#[test]
fn a_log_directory_that_can_not_be_made_is_named() -> TestResult {
    let finished = run(burnrun(&["--log-dir=/dev/null/logs"], &["say=x"]))?;
    assert_eq!(finished.code, Some(1), "{}", finished.stderr);
    assert!(
        finished.stderr.contains("/dev/null/logs/rank-0.log"),
        "{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn options_after_the_program_are_its_own() -> TestResult {
    let finished = burnrun_alone(&["-q", "echo", "--quiet", "--nnodes", "7"])?;
    assert_eq!(finished.stdout(), "[rank 0] --quiet --nnodes 7\n");
    Ok(())
}

#[test]
fn a_new_secret_is_fresh() -> TestResult {
    let [one, two] = [
        burnrun_alone(&["--new-secret"])?,
        burnrun_alone(&["--new-secret"])?,
    ];
    assert_eq!(one.stdout().trim_end().len(), 64);
    assert_ne!(one.stdout(), two.stdout());
    Ok(())
}
