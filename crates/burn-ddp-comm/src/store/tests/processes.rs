//! Ranks in processes of their own, which die as processes do.

use std::panic;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::support::{self, Rank, Ranks, say};
use super::{eventually, later, loopback};
use crate::env::LaunchEnv;
use crate::store::{StoreClient, StoreConfig, StoreServer};
use crate::{Error, Secret};

const ENTRY: &str = "store::tests::processes::rank_process";

/// A death is to be noticed within this.
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn rank_process() {
    let Some(case) = support::case() else {
        return;
    };
    let env = LaunchEnv::from_env().unwrap().unwrap();
    let config = StoreConfig {
        address: env.store_addr.clone().unwrap(),
        secret: env.secret.clone(),
        rank: env.rank,
        world_size: env.world_size,
        host_store: env.rank == 0 && !env.launcher_hosts_store,
        timeout: env.store_timeout,
        silence: super::support::HANG,
    };
    match StoreClient::connect(&config) {
        Ok(client) => play(&case, &env, client),
        Err(error) => report("connect", &error),
    }
}

/// What the rank does once it is connected. Rank 1 is the one that fails.
fn play(case: &str, env: &LaunchEnv, client: StoreClient) {
    if case == "rendezvous" {
        let deadline = Instant::now() + env.store_timeout;
        match client.gather("start", b"", deadline) {
            Ok(values) => say(format!("met {}", values.len())),
            Err(error) => report("gather", &error),
        }
        return;
    }
    if let Err(error) = client.gather("start", b"", later()) {
        return report("gather", &error);
    }
    say("ready");
    let failing = env.rank == 1;
    match case {
        "get" if !failing => report("get", &client.get("never", later()).unwrap_err()),
        "gather" if !failing => report("gather", &client.gather("end", b"", later()).unwrap_err()),
        "get" | "gather" => thread::sleep(support::HANG),
        "panic" if failing => panic!("index out of bounds"),
        "panic in a thread" if failing => {
            let worker = thread::Builder::new().name("loader".to_owned());
            let worker = worker.spawn(|| panic!("the disk is gone")).unwrap();
            worker.join().unwrap();
        }
        "abort" if failing => {
            let _ = panic::catch_unwind(|| panic!("about to abort"));
            process::abort();
        }
        "host aborts" if env.rank == 0 => {
            let _ = panic::catch_unwind(|| panic!("about to abort"));
            process::abort();
        }
        "caught" if failing => {
            let _ = panic::catch_unwind(|| panic!("nothing to worry about"));
            drop(client);
            say("left");
        }
        "caught" => {
            eventually(|| client.left(1));
            report("gather", &client.gather("end", b"", later()).unwrap_err());
        }
        "exit" if failing => process::exit(0),
        "host leaves" if env.rank == 0 => {
            drop(client);
            say("left");
        }
        "host leaves" => {
            eventually(|| client.left(0));
            client.set("k", b"still there").unwrap();
            thread::sleep(Duration::from_millis(300));
            assert_eq!(client.get("k", later()).unwrap(), b"still there");
            say("done");
        }
        "host leaves for long" if env.rank == 0 => {
            drop(client);
            say("left");
        }
        "host leaves for long" => {
            let error = client.get("never", later()).unwrap_err();
            assert!(client.fault().error().is_none(), "the group goes on");
            report("get", &error);
        }
        "stopped" if failing => thread::sleep(support::HANG),
        "stopped" => {
            let deadline = Instant::now() + Duration::from_secs(3);
            report("gather", &client.gather("end", b"", deadline).unwrap_err());
        }
        _ => report("get", &client.get("never", later()).unwrap_err()),
    }
}

fn report(call: &str, error: &Error) {
    say(format!(
        "{call} {:?} {:?}: {error}",
        error.kind(),
        error.ranks()
    ));
}

/// Ranks with a store that a launcher hosts.
fn launch(case: &str, world_size: usize) -> (StoreServer, Vec<Rank>) {
    let secret = Secret::generate();
    let server = StoreServer::bind(loopback(0), secret.clone(), world_size).unwrap();
    let ranks = Ranks::new(ENTRY, case, world_size)
        .store(server.local_addr(), &secret.to_hex())
        .start();
    (server, ranks)
}

fn hosted_by_rank_0(case: &str, world_size: usize) -> Vec<Rank> {
    Ranks::new(ENTRY, case, world_size)
        .hosted_by_rank_0()
        .start()
}

fn all_ready(ranks: &mut [Rank]) {
    for rank in ranks {
        rank.hear("ready");
    }
}

#[test]
fn a_killed_rank_is_noticed_within_a_second_whatever_is_waited_for() {
    for case in ["get", "gather"] {
        support::within(SECOND, || {
            let (server, mut ranks) = launch(case, 3);
            all_ready(&mut ranks);
            let killed = ranks[1].kill();
            let mut slowest = Duration::ZERO;
            for survivor in [0, 2] {
                let (when, told) = ranks[survivor].hear_when(case);
                let start = format!("{case} Peer [1]: rank 1 died: process {}", ranks[1].pid());
                assert!(told.starts_with(&start), "{told}");
                slowest = slowest.max(when - killed);
                ranks[survivor].succeed();
            }
            let failure = server.first_failure().unwrap();
            assert_eq!(failure.rank, 1);
            assert!(failure.at >= killed);
            slowest
        });
    }
}

#[test]
fn a_killed_host_of_the_store_is_noticed_within_a_second() {
    support::within(SECOND, || {
        let mut ranks = hosted_by_rank_0("host dies", 3);
        all_ready(&mut ranks);
        let killed = ranks[0].kill();
        let mut slowest = Duration::ZERO;
        for survivor in [1, 2] {
            let (when, told) = ranks[survivor].hear_when("get");
            assert!(
                told.starts_with("get Peer [0]: rank 0 died, and with it the store"),
                "{told}"
            );
            slowest = slowest.max(when - killed);
            ranks[survivor].succeed();
        }
        slowest
    });
}

#[test]
fn a_panic_reaches_the_others_with_its_message_and_place() {
    for (case, says) in [
        ("panic", "/processes.rs:"),
        (
            "panic in a thread",
            "before that, it panicked in thread 'loader' at ",
        ),
        ("abort", ": about to abort"),
    ] {
        let (server, mut ranks) = launch(case, 3);
        for survivor in [0, 2] {
            let told = ranks[survivor].hear("get");
            assert!(told.starts_with("get Peer [1]: rank 1 panicked "), "{told}");
            assert!(told.contains(says), "{told}");
            ranks[survivor].succeed();
        }
        let ended = ranks[1].wait();
        assert!(!ended.status.success());
        // The hook that was there before has printed it as ever.
        assert!(ended.stderr.contains(" panicked at "), "{ended:?}");
        let failure = server.first_failure().unwrap();
        assert_eq!(failure.rank, 1);
        assert!(failure.message.contains(says), "{failure:?}");
    }
}

#[test]
fn a_panic_of_the_rank_that_hosts_the_store_reaches_the_others_too() {
    let mut ranks = hosted_by_rank_0("host aborts", 2);
    let told = ranks[1].hear("get");
    assert!(told.starts_with("get Peer [0]: rank 0 panicked "), "{told}");
    assert!(told.ends_with(": about to abort"), "{told}");
    ranks[1].succeed();
}

#[test]
fn a_caught_panic_is_harmless() {
    let (server, mut ranks) = launch("caught", 2);
    ranks[1].succeed();
    let told = ranks[0].hear("gather");
    assert!(
        told.starts_with("gather Peer [1]: rank 1 left the group"),
        "{told}"
    );
    ranks[0].succeed();
    eventually(|| server.first_failure().is_some());
    let failure = server.first_failure().unwrap();
    assert!(failure.message.contains("left the group"), "{failure:?}");
}

#[test]
fn an_exit_without_a_farewell_is_a_failure() {
    let (_server, mut ranks) = launch("exit", 2);
    let told = ranks[0].hear("get");
    assert!(told.contains("rank 1 died"), "{told}");
    assert!(
        told.contains("exited without dropping its ProcessGroup"),
        "{told}"
    );
    ranks[0].succeed();
}

#[test]
fn a_host_that_leaves_keeps_the_store_until_the_others_have_left() {
    let mut ranks = hosted_by_rank_0("host leaves", 3);
    for rank in &mut ranks {
        rank.succeed();
    }
    ranks[1].hear("done");
    let left = ranks[0].hear_when("left").0;
    assert!(left + support::HANG > Instant::now());
}

#[test]
fn a_host_does_not_wait_for_the_others_for_ever() {
    let mut ranks = hosted_by_rank_0("host leaves for long", 2);
    ranks[0].succeed();
    let told = ranks[1].hear("get");
    assert!(
        told.starts_with("get Peer [0]: rank 0 left the group, and with it"),
        "{told}"
    );
    ranks[1].succeed();
}

#[test]
fn a_stopped_rank_is_not_taken_for_dead() {
    let (server, mut ranks) = launch("stopped", 2);
    all_ready(&mut ranks);
    ranks[1].signal(Signal::STOP);
    let told = ranks[0].hear("gather");
    assert!(
        told.starts_with("gather Peer [1]: rank 1 (process "),
        "{told}"
    );
    assert!(told.contains("is there, last heard of"), "{told}");
    assert!(told.contains("did not reach \"end\""), "{told}");
    ranks[0].succeed();
    eventually(|| server.first_failure().is_some());
    let failure = server.first_failure().unwrap();
    assert!(failure.message.contains("last heard of"), "{failure:?}");
}

#[test]
fn a_launcher_that_ends_is_noticed() {
    let (server, mut ranks) = launch("launcher ends", 2);
    all_ready(&mut ranks);
    drop(server);
    for rank in &mut ranks {
        let told = rank.hear("get");
        assert!(told.contains("(launcher) has ended"), "{told}");
        rank.succeed();
    }
}

#[test]
fn a_rank_that_never_arrives_is_named() {
    let secret = Secret::generate();
    let server = StoreServer::bind(loopback(0), secret.clone(), 3).unwrap();
    let ranks = Ranks::new(ENTRY, "rendezvous", 3)
        .store(server.local_addr(), &secret.to_hex())
        .env("BURN_DDP_STORE_TIMEOUT_SECONDS", "1");
    for mut rank in [0, 2].map(|rank| ranks.start_one(rank)) {
        let told = rank.hear("gather");
        assert!(
            told.starts_with("gather Peer [1]: rank 1 did not arrive"),
            "{told}"
        );
        rank.succeed();
    }
}

#[test]
fn of_two_processes_with_one_number_the_second_is_refused() {
    let secret = Secret::generate();
    let server = StoreServer::bind(loopback(0), secret.clone(), 2).unwrap();
    let ranks = Ranks::new(ENTRY, "rendezvous", 2).store(server.local_addr(), &secret.to_hex());
    let [mut one, mut other] = [1, 1].map(|rank| ranks.start_one(rank));
    // Whichever comes second is told of both.
    let pids = [one.pid(), other.pid()];
    let told = loop {
        let ended = [&mut one, &mut other].map(|rank| rank.said("connect"));
        if let Some(told) = ended.into_iter().flatten().next() {
            break told;
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert!(told.contains("two processes claim rank 1"), "{told}");
    for pid in pids {
        assert!(told.contains(&format!("process {pid} on ")), "{told}");
    }
    let mut zero = ranks.start_one(0);
    assert_eq!(zero.hear("met"), "met 2");
    for rank in [&mut zero, &mut one, &mut other] {
        rank.succeed();
    }
    assert!(server.first_failure().is_none());
}

#[test]
fn a_wrong_secret_keeps_a_process_out() {
    let server = StoreServer::bind(loopback(0), Secret::generate(), 1).unwrap();
    let other = Secret::generate().to_hex();
    let ranks = Ranks::new(ENTRY, "rendezvous", 1).store(server.local_addr(), &other);
    let mut rank = ranks.start_one(0);
    let told = rank.hear("connect");
    assert!(told.contains("the secret does not match"), "{told}");
    let ended = rank.succeed();
    for text in [ended.stdout, ended.stderr] {
        assert!(!text.contains(&other));
    }
}
