use super::*;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Runs a handshake: what the connecting and the accepting side got.
fn run(
    connecting: (Secret, &'static [u8]),
    accepting: (Secret, &'static [u8]),
) -> (Result<(), Failure>, Result<Vec<u8>, Failure>) {
    let (a, b) = pair();
    let accepting = thread::spawn(move || accept(&b, &accepting.0, accepting.1, later()));
    let connected = connect(&a, &connecting.0, connecting.1, b"I am rank 3", later());
    drop(a);
    (connected, accepting.join().unwrap())
}

#[test]
fn both_sides_know_the_secret() {
    let secret = Secret::generate();
    let (connected, hello) = run((secret.clone(), b"store"), (secret, b"store"));
    connected.unwrap();
    assert_eq!(hello.unwrap(), b"I am rank 3");
}

#[test]
fn a_wrong_secret_is_noticed_by_the_side_that_connects() {
    let (connected, accepted) = run(
        (Secret::generate(), b"store"),
        (Secret::generate(), b"store"),
    );
    let error = connected
        .unwrap_err()
        .into_error("the store", SocketAddr::from(([10, 0, 0, 1], 29500)));
    assert_eq!(
        error.to_string(),
        "the secret does not match that of the store at 10.0.0.1:29500: start every rank with \
         the same BURN_DDP_SECRET"
    );
    assert!(accepted.is_err(), "it sends no hello");
}

#[test]
fn a_connection_for_another_purpose_is_refused() {
    let secret = Secret::generate();
    let (connected, accepted) = run((secret.clone(), b"store"), (secret, b"link to rank 1"));
    assert!(matches!(connected, Err(Failure::WrongSecret)));
    assert!(accepted.is_err());
}

#[test]
fn a_stranger_that_listens_learns_no_hello() {
    let (a, mut b) = pair();
    let stranger = thread::spawn(move || {
        let mut bytes = vec![0; CHALLENGE_BYTES];
        b.read_exact(&mut bytes).unwrap();
        // It reflects the challenge as its own.
        let mut response = ACCEPTING_MAGIC.to_vec();
        response.extend_from_slice(&bytes[MAGIC_BYTES..]);
        response.extend_from_slice(&[0; CODE_BYTES]);
        b.write_all(&response).unwrap();
        let mut rest = Vec::new();
        b.read_to_end(&mut rest).unwrap();
        rest
    });
    let result = connect(&a, &Secret::generate(), b"store", b"hello", later());
    assert!(matches!(result, Err(Failure::WrongSecret)));
    drop(a);
    assert_eq!(stranger.join().unwrap(), b"");
}

#[test]
fn another_protocol_is_told_from_a_wrong_secret() {
    let (a, mut b) = pair();
    b.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").unwrap();
    let failure = connect(&a, &Secret::generate(), b"store", b"", later()).unwrap_err();
    assert!(matches!(failure, Failure::Stranger));
    assert!(!failure.is_transient());

    let (mut a, b) = pair();
    a.write_all(b"GET / HTTP/1.1\r\nHost: localhost:29500\r\n\r\n")
        .unwrap();
    let failure = accept(&b, &Secret::generate(), b"store", later()).unwrap_err();
    assert!(matches!(failure, Failure::Stranger));
}

#[test]
fn a_silent_peer_is_given_up_at_the_deadline() {
    let (a, b) = pair();
    let soon = || Instant::now() + Duration::from_millis(30);
    let failure = connect(&a, &Secret::generate(), b"store", b"", soon()).unwrap_err();
    assert!(failure.is_transient());
    let (_a, b) = (a, b);
    assert!(accept(&b, &Secret::generate(), b"store", soon()).is_err());
}

#[test]
fn a_recorded_proof_is_of_no_use() {
    let secret = Secret::generate();
    let purpose = b"store".to_vec();
    let mut recorded = Vec::new();
    let mut acceptor = Acceptor::new(secret.clone(), purpose.clone());
    let own = [7; NONCE_BYTES];
    recorded.extend_from_slice(CONNECTING_MAGIC);
    recorded.extend_from_slice(&own);
    let Step::Send(response) = acceptor.receive(&recorded).unwrap() else {
        panic!("it answers a challenge");
    };
    let other = &response[MAGIC_BYTES..CHALLENGE_BYTES];
    let code = secret.code(&[b"connect", b"store", &own, other, b"hi"]);
    let proof = [&2_u16.to_le_bytes()[..], b"hi", &code].concat();
    acceptor.receive(&proof[..LENGTH_BYTES]).unwrap();
    assert!(matches!(
        acceptor.receive(&proof[LENGTH_BYTES..]),
        Ok(Step::Done(_))
    ));

    let mut again = Acceptor::new(secret.clone(), purpose.clone());
    again.receive(&recorded).unwrap();
    again.receive(&proof[..LENGTH_BYTES]).unwrap();
    assert!(matches!(
        again.receive(&proof[LENGTH_BYTES..]),
        Err(Failure::WrongSecret)
    ));

    // Nor is the acceptor's own code.
    let mut reflected = Acceptor::new(secret, purpose);
    reflected.receive(&recorded).unwrap();
    reflected.receive(&0_u16.to_le_bytes()).unwrap();
    assert!(matches!(
        reflected.receive(&response[CHALLENGE_BYTES..]),
        Err(Failure::WrongSecret)
    ));
}

#[test]
fn a_hello_that_is_too_long_is_not_sent() {
    let (a, _b) = pair();
    let hello = vec![0; MAX_HELLO_BYTES + 1];
    assert!(connect(&a, &Secret::generate(), b"store", &hello, later()).is_err());
}

proptest! {
    #[test]
    fn no_bytes_get_past_the_acceptor(
        chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 0..20),
        right_start: bool,
    ) {
        let mut acceptor = Acceptor::new(Secret::generate(), b"store".to_vec());
        if right_start {
            acceptor.receive(CONNECTING_MAGIC).unwrap();
        }
        'feed: for chunk in chunks {
            let mut rest = &chunk[..];
            while !rest.is_empty() {
                let n = acceptor.wanted().min(rest.len());
                prop_assert!(n > 0);
                match acceptor.receive(&rest[..n]) {
                    Ok(Step::Done(_)) => prop_assert!(false, "it let a stranger in"),
                    Ok(_) => {}
                    Err(_) => break 'feed,
                }
                prop_assert!(acceptor.received.capacity() < 4096);
                rest = &rest[n..];
            }
        }
    }
}
