//! Groups from the environment of real processes: what they get, and what bad
//! environments get.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use burn_ddp_comm::{ProcessGroup, ReduceOp, Secret, StoreServer};

/// In a rank's process.
const IN_RANK: &str = "BURN_DDP_TEST_IN_RANK";
const MARK: &str = ">> ";
/// How long a rank may take before it is taken to hang.
const HANG: Duration = Duration::from_secs(120);

/// Not a test: what each rank does.
#[test]
fn rank_process() {
    if std::env::var_os(IN_RANK).is_none() {
        return;
    }
    let result = ProcessGroup::from_env().and_then(|group| {
        let mut sum = [group.rank() as i64 + 1];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        let (local, locals) = (group.local_rank(), group.local_world_size());
        let size = group.world_size();
        Ok(format!(
            "rank {} of {size}, {local} of {locals}: {sum:?}",
            group.rank()
        ))
    });
    match result {
        Ok(text) => println!("\n{MARK}{text}"),
        Err(error) => println!("\n{MARK}{:?}: {error}", error.kind()),
    }
}

/// Starts a rank that has these environment variables and no others.
fn start(environment: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["rank_process", "--exact", "--nocapture"])
        .env_clear()
        .env(IN_RANK, "1")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What a rank has said at its end.
fn said(mut rank: Child) -> String {
    let deadline = Instant::now() + HANG;
    while rank.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            rank.kill().unwrap();
            panic!("it hangs: {:?}", rank.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // It says but a line, for which the pipe has room.
    let output: Output = rank.wait_with_output().unwrap();
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let line = stdout.lines().find_map(|line| line.strip_prefix(MARK));
    line.unwrap_or_else(|| panic!("it said nothing: {output:?}"))
        .to_owned()
}

/// What the only rank with these environment variables says.
fn alone(environment: &[(&str, &str)]) -> String {
    said(start(environment))
}

#[test]
fn without_a_launcher_a_process_is_a_world_of_one() {
    assert_eq!(alone(&[]), "rank 0 of 1, 0 of 1: [1]");
    let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
    assert_eq!(alone(&one), "rank 0 of 1, 0 of 1: [1]");
}

#[test]
fn ranks_meet_where_rank_0_hosts_the_store() {
    let port = free_port().to_string();
    let common = [
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", &port),
    ];
    let rank = |rank| start(&[&common[..], &[("RANK", rank)]].concat());
    // The other way round: rank 1 has to wait for the store.
    let one = rank("1");
    std::thread::sleep(Duration::from_millis(100));
    let zero = rank("0");
    assert_eq!(said(zero), "rank 0 of 2, 0 of 2: [3]");
    assert_eq!(said(one), "rank 1 of 2, 1 of 2: [3]");
}

#[test]
fn ranks_meet_where_a_launcher_hosts_the_store() {
    let secret = Secret::generate();
    let store = StoreServer::bind(([127, 0, 0, 1], 0).into(), secret.clone(), 2).unwrap();
    let (port, secret) = (store.local_addr().port().to_string(), secret.to_hex());
    let common = [
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("BURN_DDP_STORE", "launcher"),
        ("BURN_DDP_SECRET", &secret),
        ("BURN_DDP_TRANSPORT", "tcp"),
    ];
    let ranks = ["0", "1"].map(|rank| start(&[&common[..], &[("RANK", rank)]].concat()));
    for (rank, process) in ranks.into_iter().enumerate() {
        assert_eq!(said(process), format!("rank {rank} of 2, {rank} of 2: [3]"));
    }
    assert!(store.first_failure().is_none());
}

#[test]
fn a_partial_environment_is_refused() {
    let text = alone(&[("RANK", "3"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "0")]);
    assert!(text.starts_with("Usage: "), "{text}");
    for problem in [
        "WORLD_SIZE is \"two\"",
        "MASTER_ADDR is missing",
        "MASTER_PORT is 0",
    ] {
        assert!(text.contains(problem), "{text}");
    }
}

#[test]
fn a_taken_port_is_named() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let text = alone(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
    ]);
    assert!(text.starts_with("Environment: "), "{text}");
    let taken = format!("port {port} is taken by another program");
    assert!(text.contains(&taken), "{text}");
}

#[test]
fn a_secret_is_required_beyond_the_loopback_interface() {
    let text = alone(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "192.0.2.1"),
        ("MASTER_PORT", "29500"),
    ]);
    assert!(text.starts_with("Usage: "), "{text}");
    assert!(text.contains("set BURN_DDP_SECRET"), "{text}");
}

#[test]
fn a_rank_that_never_arrives_and_a_store_that_does_not_exist_are_named_in_time() {
    let port = free_port().to_string();
    let common = [
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
        ("BURN_DDP_STORE_TIMEOUT_SECONDS", "1"),
    ];
    let text = alone(&[&common[..], &[("RANK", "0")]].concat());
    assert!(
        text.starts_with("Peer: ranks 1, 2 did not arrive"),
        "{text}"
    );
    let text = alone(&[&common[..], &[("RANK", "1")]].concat());
    assert!(
        text.starts_with("Environment: rank 1 could not reach the store"),
        "{text}"
    );
    assert!(text.contains("refused"), "{text}");
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
