//! The first bytes of every connection of a job: each side proves to the other
//! that it knows the job's secret.
//!
//! A challenge and response with HMAC-SHA256, of the shape of ISO/IEC 9798-4's
//! three-pass mutual authentication:
//!
//! ```text
//! connecting → accepting   magic, random nonce C
//! accepting → connecting   magic, random nonce A, code("accept", purpose, C, A)
//! connecting → accepting   length, hello, code("connect", purpose, C, A, hello)
//! ```
//!
//! The side's role and the connection's purpose are part of each code, so that
//! none can be reflected or taken to another of the job's listeners, and both
//! nonces are, so that none can be replayed. The accepting side proves itself
//! first: whoever else listens there learns neither the secret nor the hello.
//! What follows on the connection is neither encrypted nor authenticated.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use crate::secret::CODE_BYTES;
use crate::socket::{read_until, write_until};
use crate::{Error, Secret};

/// Most bytes that a hello may have.
pub(crate) const MAX_HELLO_BYTES: usize = 1024;

const MAGIC_BYTES: usize = 8;
const NONCE_BYTES: usize = 32;
const CONNECTING_MAGIC: &[u8; MAGIC_BYTES] = b"bddp/1 c";
const ACCEPTING_MAGIC: &[u8; MAGIC_BYTES] = b"bddp/1 a";
const CHALLENGE_BYTES: usize = MAGIC_BYTES + NONCE_BYTES;
const RESPONSE_BYTES: usize = CHALLENGE_BYTES + CODE_BYTES;
const LENGTH_BYTES: usize = 2;

/// Why a handshake failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The other side has another secret, or is there for another purpose.
    WrongSecret,
    /// The other side speaks something else.
    Stranger,
    /// The connection broke, or the deadline passed.
    Io(io::Error),
}

impl Failure {
    /// Whether another attempt could succeed.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Io(_))
    }

    /// The connecting side's error; `peer` says who should have been at
    /// `address`: "the store", "rank 3".
    pub(crate) fn into_error(self, peer: &str, address: SocketAddr) -> Error {
        match self {
            Self::WrongSecret => Error::environment(format!(
                "the secret does not match that of {peer} at {address}: start every rank with \
                 the same BURN_DDP_SECRET"
            )),
            Self::Stranger => Error::environment(format!(
                "what answers at {address} is not {peer} of this version of burn-ddp: check the \
                 address, and that no other program uses that port"
            )),
            Self::Io(source) => Error::environment_from(
                format!("{peer} at {address} did not complete the handshake"),
                source,
            ),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongSecret => f.write_str("its secret is another one"),
            Self::Stranger => f.write_str("it does not speak burn-ddp's protocol"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Proves to whoever accepted `stream` that this process knows `secret`, has it
/// prove the same, and sends it `hello`, of at most [`MAX_HELLO_BYTES`].
///
/// `purpose` says what the connection is for; both sides give the same.
pub(crate) fn connect(
    stream: &TcpStream,
    secret: &Secret,
    purpose: &[u8],
    hello: &[u8],
    deadline: Instant,
) -> Result<(), Failure> {
    let length = u16::try_from(hello.len())
        .ok()
        .filter(|_| hello.len() <= MAX_HELLO_BYTES)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the hello is too long"))?;
    let own: [u8; NONCE_BYTES] = rand::random();
    write_until(stream, &[&CONNECTING_MAGIC[..], &own].concat(), deadline)?;

    let mut response = [0; RESPONSE_BYTES];
    // The magic alone first: a stranger may send less than a response and wait.
    read_until(stream, &mut response[..MAGIC_BYTES], deadline)?;
    if response[..MAGIC_BYTES] != ACCEPTING_MAGIC[..] {
        return Err(Failure::Stranger);
    }
    read_until(stream, &mut response[MAGIC_BYTES..], deadline)?;
    let (challenge, code) = response.split_at(CHALLENGE_BYTES);
    let other = &challenge[MAGIC_BYTES..];
    if !secret.verify(&[b"accept", purpose, &own, other], code) {
        return Err(Failure::WrongSecret);
    }

    let code = secret.code(&[b"connect", purpose, &own, other, hello]);
    let proof = [&length.to_le_bytes()[..], hello, &code].concat();
    Ok(write_until(stream, &proof, deadline)?)
}

/// Has whoever connected `stream` prove that it knows `secret`, proves the
/// same, and returns its hello.
///
/// A listener that strangers can reach should use
/// [`Reception`](crate::reception::Reception) instead: this waits for one peer.
#[cfg(test)]
pub(crate) fn accept(
    stream: &TcpStream,
    secret: &Secret,
    purpose: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>, Failure> {
    let mut acceptor = Acceptor::new(secret.clone(), purpose.to_vec());
    loop {
        let mut bytes = vec![0; acceptor.wanted()];
        read_until(stream, &mut bytes, deadline)?;
        match acceptor.receive(&bytes)? {
            Step::Read => {}
            Step::Send(bytes) => write_until(stream, &bytes, deadline)?,
            Step::Done(hello) => return Ok(hello),
        }
    }
}

/// The accepting side, without its connection: it is told what was received
/// and says what to do next.
#[derive(Debug)]
pub(crate) struct Acceptor {
    secret: Secret,
    purpose: Vec<u8>,
    stage: Stage,
    received: Vec<u8>,
}

#[derive(Debug)]
enum Stage {
    Challenge,
    Length {
        nonces: Nonces,
    },
    Proof {
        nonces: Nonces,
        hello_bytes: usize,
    },
    /// The handshake is over.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Nonces {
    connecting: [u8; NONCE_BYTES],
    accepting: [u8; NONCE_BYTES],
}

/// What the accepting side does next.
#[derive(Debug)]
pub(crate) enum Step {
    /// Read on.
    Read,
    /// Send these bytes, then read on.
    Send(Vec<u8>),
    /// The peer is one of the job's; this is its hello.
    Done(Vec<u8>),
}

impl Acceptor {
    pub(crate) fn new(secret: Secret, purpose: Vec<u8>) -> Self {
        Self {
            secret,
            purpose,
            stage: Stage::Challenge,
            received: Vec::new(),
        }
    }

    /// How many bytes to read at most before the next [`receive`](Self::receive):
    /// what lies behind them is not the handshake's.
    pub(crate) fn wanted(&self) -> usize {
        self.stage_bytes() - self.received.len()
    }

    fn stage_bytes(&self) -> usize {
        match self.stage {
            Stage::Challenge => CHALLENGE_BYTES,
            Stage::Length { .. } => LENGTH_BYTES,
            Stage::Proof { hello_bytes, .. } => hello_bytes + CODE_BYTES,
            Stage::Ended => 0,
        }
    }

    /// Takes the bytes that were read, at most [`wanted`](Self::wanted).
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<Step, Failure> {
        self.received.extend_from_slice(bytes);
        let magic = self.received.len().min(MAGIC_BYTES);
        if matches!(self.stage, Stage::Challenge)
            && self.received[..magic] != CONNECTING_MAGIC[..magic]
        {
            return Err(Failure::Stranger);
        }
        if self.received.len() < self.stage_bytes() {
            return Ok(Step::Read);
        }
        let received = std::mem::take(&mut self.received);
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Challenge => {
                let mut connecting = [0; NONCE_BYTES];
                connecting.copy_from_slice(&received[MAGIC_BYTES..CHALLENGE_BYTES]);
                let nonces = Nonces {
                    connecting,
                    accepting: rand::random(),
                };
                self.stage = Stage::Length { nonces };
                Ok(Step::Send(self.response(&nonces)))
            }
            Stage::Length { nonces } => {
                let hello_bytes = usize::from(u16::from_le_bytes([received[0], received[1]]));
                if hello_bytes > MAX_HELLO_BYTES {
                    return Err(Failure::Stranger);
                }
                self.stage = Stage::Proof {
                    nonces,
                    hello_bytes,
                };
                Ok(Step::Read)
            }
            Stage::Proof {
                nonces,
                hello_bytes,
            } => {
                let (hello, code) = received.split_at(hello_bytes);
                let parts = [
                    b"connect",
                    &self.purpose[..],
                    &nonces.connecting,
                    &nonces.accepting,
                    hello,
                ];
                match self.secret.verify(&parts, code) {
                    true => Ok(Step::Done(hello.to_vec())),
                    false => Err(Failure::WrongSecret),
                }
            }
            Stage::Ended => Err(Failure::Stranger),
        }
    }

    fn response(&self, nonces: &Nonces) -> Vec<u8> {
        let parts = [
            b"accept",
            &self.purpose[..],
            &nonces.connecting,
            &nonces.accepting,
        ];
        let code = self.secret.code(&parts);
        [&ACCEPTING_MAGIC[..], &nonces.accepting, &code].concat()
    }
}

#[cfg(test)]
mod tests;
