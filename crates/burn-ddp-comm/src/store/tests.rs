//! The store's server and clients together: in threads here, in processes in
//! the submodule.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::{StoreClient, StoreConfig, StoreServer};
use crate::{Error, ErrorKind, Secret};

mod processes;
mod support;

fn later() -> Instant {
    Instant::now() + support::HANG
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn server(world_size: usize) -> (StoreServer, Secret) {
    let secret = Secret::generate();
    let server = StoreServer::bind(loopback(0), secret.clone(), world_size).unwrap();
    (server, secret)
}

fn config(server: &StoreServer, secret: &Secret, rank: usize, world_size: usize) -> StoreConfig {
    StoreConfig {
        address: server.local_addr().to_string(),
        secret: Some(secret.clone()),
        rank,
        world_size,
        host_store: false,
        timeout: support::HANG,
        silence: support::HANG,
    }
}

fn clients(world_size: usize) -> (StoreServer, Vec<StoreClient>) {
    let (server, secret) = server(world_size);
    let clients = (0..world_size)
        .map(|rank| StoreClient::connect(&config(&server, &secret, rank, world_size)).unwrap())
        .collect();
    (server, clients)
}

fn connect_error(config: &StoreConfig) -> Error {
    StoreClient::connect(config).expect_err("it can't be reached")
}

/// Waits until `condition` holds.
fn eventually(condition: impl Fn() -> bool) {
    let deadline = later();
    while !condition() {
        assert!(Instant::now() < deadline, "it never happened");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn values_and_counters_are_shared() {
    let (_server, clients) = clients(2);
    let waiting = clients[1].clone();
    let waiter = thread::spawn(move || waiting.get("k", later()));
    clients[0].set("k", b"value").unwrap();
    assert_eq!(waiter.join().unwrap().unwrap(), b"value");
    assert_eq!(clients[0].add("n", 2).unwrap(), 2);
    assert_eq!(clients[1].add("n", 3).unwrap(), 5);
    let gathering = clients[1].clone();
    let other = thread::spawn(move || gathering.gather("g", b"one", later()));
    let values = clients[0].gather("g", b"zero", later()).unwrap();
    assert_eq!(values, [b"zero".to_vec(), b"one".to_vec()]);
    assert_eq!(other.join().unwrap().unwrap(), values);
    assert!(clients[0].local_ip().unwrap().is_loopback());
}

#[test]
fn a_value_that_nobody_sets_is_waited_for_until_the_deadline() {
    let (_server, clients) = clients(1);
    let error = clients[0].get("k", soon()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("nobody has set \"k\" at the store"),
        "{error}"
    );
    // The group goes on.
    clients[0].set("k", b"").unwrap();
    assert_eq!(clients[0].get("k", soon()).unwrap(), b"");
}

#[test]
fn too_large_a_value_is_a_usage_error() {
    let (_server, clients) = clients(1);
    let error = clients[0].set("k", &vec![0; 65 << 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(clients[0].fault().error().is_none());
}

#[test]
fn ranks_that_never_arrive_are_named_on_every_rank() {
    let (server, secret) = server(4);
    let [zero, one] =
        [0, 1].map(|rank| StoreClient::connect(&config(&server, &secret, rank, 4)).unwrap());
    let other = one.clone();
    let waiter = thread::spawn(move || other.get("never", later()).unwrap_err());
    let error = zero.gather("links", b"", soon()).unwrap_err();
    assert_eq!(error.ranks(), [1, 2, 3]);
    let text = error.to_string();
    assert!(
        text.contains("ranks 2, 3 did not arrive at the store at 127.0.0.1:"),
        "{text}"
    );
    assert!(text.contains("rank 1 (process "), "{text}");
    assert!(text.contains("is there, last heard of"), "{text}");
    let told = waiter.join().unwrap();
    assert_eq!(told.to_string(), text);
    assert_eq!(
        zero.set("k", b"").unwrap_err().to_string(),
        text,
        "it stays failed"
    );
}

#[test]
fn a_rank_that_left_is_told_from_one_that_died() {
    let (server, mut clients) = clients(3);
    drop(clients.remove(1));
    eventually(|| clients[0].left(1));
    assert!(!clients[0].left(2) && !clients[0].left(99));
    clients[0].set("k", b"the group goes on").unwrap();
    let error = clients[0].gather("end", b"", later()).unwrap_err();
    assert_eq!(error.ranks(), [1]);
    assert!(
        error
            .to_string()
            .contains("rank 1 left the group: it finished while"),
        "{error}"
    );
    eventually(|| {
        server
            .first_failure()
            .is_some_and(|failure| failure.rank == 1)
    });
}

#[test]
fn a_poisoned_group_fails_everywhere() {
    let (server, clients) = clients(2);
    let waiting = clients[1].clone();
    let waiter = thread::spawn(move || waiting.get("never", later()).unwrap_err());
    let first = clients[0].fail(Error::usage("rank 0 called all_gather"));
    assert_eq!(first.kind(), ErrorKind::Usage);
    let again = clients[0].fail(Error::usage("a consequence"));
    assert_eq!(again.to_string(), "rank 0 called all_gather");
    let told = waiter.join().unwrap();
    assert_eq!(
        (told.kind(), told.to_string()),
        (ErrorKind::Usage, first.to_string())
    );
    eventually(|| server.first_failure().is_some());
    assert_eq!(server.first_failure().unwrap().rank, 0);
}

#[test]
fn a_store_that_ends_is_missed() {
    let (server, clients) = clients(1);
    drop(server);
    let error = clients[0].get("k", later()).unwrap_err();
    assert!(
        error.to_string().contains("(launcher) has ended"),
        "{error}"
    );
    assert!(
        clients[0].fault().error().is_none(),
        "the group goes on without it"
    );
}

#[test]
fn a_wrong_secret_is_told() {
    let (server, _) = server(1);
    let error = connect_error(&config(&server, &Secret::generate(), 0, 1));
    let text = format!(
        "the secret does not match that of the store at {}: start every rank with the same \
         BURN_DDP_SECRET",
        server.local_addr()
    );
    assert_eq!(error.to_string(), text);
    assert_eq!(error.kind(), ErrorKind::Environment);
}

#[test]
fn ranks_that_do_not_fit_are_told() {
    let (server, secret) = server(2);
    let first = StoreClient::connect(&config(&server, &secret, 1, 2)).unwrap();
    let error = connect_error(&config(&server, &secret, 1, 2));
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error.to_string().contains("two processes claim rank 1"),
        "{error}"
    );
    let error = connect_error(&config(&server, &secret, 0, 3));
    assert!(error.to_string().contains("the same WORLD_SIZE"), "{error}");
    first.set("k", b"undisturbed").unwrap();
    assert!(server.first_failure().is_none());
}

#[test]
fn a_secret_is_required_beyond_the_loopback_interface() {
    // 192.0.2.0/24 is for documentation: nothing is ever sent there.
    let (server, secret) = server(1);
    let mut config = StoreConfig {
        address: "192.0.2.1:29500".to_owned(),
        secret: None,
        ..config(&server, &secret, 0, 1)
    };
    for host_store in [false, true] {
        config.host_store = host_store;
        let error = connect_error(&config);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("set BURN_DDP_SECRET"), "{error}");
    }
}

#[test]
fn on_the_loopback_interface_none_is_required() {
    let config = StoreConfig {
        address: loopback(support::free_port()).to_string(),
        secret: None,
        rank: 0,
        world_size: 1,
        host_store: true,
        timeout: support::HANG,
        silence: support::HANG,
    };
    let client = StoreClient::connect(&config).unwrap();
    client.set("k", b"v").unwrap();
    let taken = connect_error(&config);
    assert_eq!(taken.kind(), ErrorKind::Environment);
    assert!(
        taken.to_string().contains("is taken by another program"),
        "{taken}"
    );
    assert!(taken.to_string().contains("set MASTER_PORT"), "{taken}");
}

#[test]
fn an_address_of_another_machine_can_not_be_hosted_at() {
    let address = SocketAddr::from(([192, 0, 2, 1], 29500));
    let error = StoreServer::bind(address, Secret::generate(), 1).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1:29500"), "{error}");
    assert!(error.to_string().contains("not this machine's"), "{error}");
    let error = StoreServer::bind(loopback(0), Secret::generate(), 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
}

#[test]
fn an_unreachable_store_is_named_with_what_was_tried() {
    let (server, secret) = server(1);
    let port = support::free_port();
    for (address, says) in [
        (loopback(port).to_string(), "refused"),
        (
            "no-such-host.invalid:29500".to_owned(),
            "no-such-host.invalid:29500",
        ),
    ] {
        let config = StoreConfig {
            address: address.clone(),
            timeout: Duration::from_millis(200),
            ..config(&server, &secret, 0, 1)
        };
        let error = connect_error(&config);
        assert_eq!(error.kind(), ErrorKind::Environment);
        let text = error.to_string();
        assert!(text.contains(&address) && text.contains(says), "{text}");
        assert!(text.contains("within 0.2 s"), "{text}");
    }
}

#[test]
fn another_programs_port_is_told_from_a_wrong_secret() {
    let listener = TcpListener::bind(loopback(0)).unwrap();
    let address = listener.local_addr().unwrap();
    let web_server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        // Until the rank goes away.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let (server, secret) = server(1);
    let config = StoreConfig {
        address: address.to_string(),
        ..config(&server, &secret, 0, 1)
    };
    let error = connect_error(&config);
    assert!(error.to_string().contains("is not the store"), "{error}");
    web_server.join().unwrap();
}

#[test]
fn strangers_do_not_disturb_the_store() {
    let (server, clients) = clients(2);
    let mut strangers: Vec<TcpStream> = (0..500)
        .map(|_| TcpStream::connect(server.local_addr()).unwrap())
        .collect();
    for stranger in strangers.iter_mut().step_by(2) {
        // It may have been sent away already.
        let _ = stranger.write_all(&[0x5a; 100]);
    }
    clients[0].set("k", b"v").unwrap();
    assert_eq!(clients[1].get("k", later()).unwrap(), b"v");
    assert!(server.first_failure().is_none());
}

#[test]
fn silent_strangers_do_not_delay_a_rank() {
    let (server, secret) = server(1);
    let strangers: Vec<TcpStream> = (0..500)
        .map(|_| TcpStream::connect(server.local_addr()).unwrap())
        .collect();
    support::within(Duration::from_secs(2), || {
        let start = Instant::now();
        drop(StoreClient::connect(&config(&server, &secret, 0, 1)).unwrap());
        start.elapsed()
    });
    drop(strangers);
}

#[test]
fn a_rank_that_sends_garbage_is_taken_out_and_the_store_stands() {
    for (bytes, says) in [
        (&u32::MAX.to_le_bytes()[..], "a message of 4294967295 bytes"),
        (&[1, 0, 0, 0, 0xc1][..], "a damaged message"),
    ] {
        let (server, clients) = clients(2);
        clients[1].send_raw(bytes);
        eventually(|| {
            clients
                .iter()
                .all(|client| client.fault().error().is_some())
        });
        let error = clients[0].fault().error().unwrap();
        assert_eq!(error.ranks(), [1]);
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(server.first_failure().map(|failure| failure.rank), Some(1));
    }
}

#[test]
fn a_rank_that_comes_back_joins_the_next_group() {
    let (server, secret) = server(2);
    for round in 0..3 {
        let ranks = [0, 1].map(|rank| {
            let config = config(&server, &secret, rank, 2);
            thread::spawn(move || {
                let client = StoreClient::connect(&config).unwrap();
                client.gather("start", &[round], later()).unwrap()
            })
        });
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), [[round], [round]]);
        }
    }
    assert!(server.first_failure().is_none());
}

#[test]
fn nothing_is_left_behind() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (server, clients) = clients(2);
    drop(clients);
    let address = server.local_addr();
    drop(server);
    // Other tests of this process open and close files meanwhile; that the
    // port is free again shows that the listener is closed.
    drop(TcpListener::bind(address).unwrap());
    assert!(open() > 0);
}
