//! How a rank gets its connection to the store, which may start later than the
//! rank.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::client::StoreClient;
use super::frame::FrameBuffer;
use super::presence;
use super::protocol::{Event, Hello, MAX_EVENT_BYTES, PURPOSE, VERSION, truncated};
use super::server::StoreServer;
use super::session::{Session, seconds};
use crate::panic_message::{self, PanicListener};
use crate::socket::{is_transient, notice_silence, poll_until};
use crate::{Error, Result, Secret, handshake, host};

/// How long one attempt to connect may take.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);

/// Pause after the first attempt; it doubles from one to the next.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// After how long the log says what is being waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// How a rank finds the store, and who it is.
#[derive(Clone, Debug)]
pub(crate) struct StoreConfig {
    /// `host:port`.
    pub(crate) address: String,
    /// May be `None` where the address is on the loopback interface.
    pub(crate) secret: Option<Secret>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Whether this process hosts the store.
    pub(crate) host_store: bool,
    /// How long to try to reach the store.
    pub(crate) timeout: Duration,
    /// How long this rank, and the store, may be silent.
    pub(crate) silence: Duration,
}

/// Why an attempt failed.
enum Attempt {
    /// For now.
    Transient(String),
    /// For good.
    Fatal(Error),
}

impl StoreClient {
    /// Connects to the store, which it starts first if this rank is the one
    /// that hosts it, and waits for it otherwise.
    ///
    /// # Errors
    ///
    /// Usage: there is no secret and the address is not a loopback address; or
    /// the store refuses this rank, since its number is taken or its world size
    /// is another. Environment: the address can't be listened at, can't be
    /// reached within the time limit, or is another job's.
    pub(crate) fn connect(config: &StoreConfig) -> Result<Self> {
        let started = Instant::now();
        let server = match config.host_store {
            true => Some(host_store(config)?),
            false => None,
        };
        let connected = connect(config, started)?;
        let session = Session::new(
            (config.rank, config.world_size),
            connected.stream,
            connected.address,
            connected.host,
            started,
            config.silence,
        );
        let presence = presence::start(Arc::clone(&session), connected.received)
            .map_err(|error| Error::environment_from("can't start a thread", error))?;
        let listener: Arc<dyn PanicListener> = Arc::clone(&session) as _;
        panic_message::listen(Weak::clone(&Arc::downgrade(&listener)));
        Ok(Self::new(session, presence, server))
    }
}

fn host_store(config: &StoreConfig) -> Result<StoreServer> {
    let addresses = resolve(&config.address).map_err(|error| {
        Error::environment_from(
            format!(
                "can't host the store at {:?}: no such address",
                config.address
            ),
            error,
        )
    })?;
    let secret = secret_for(config, &addresses)?;
    StoreServer::bind_hosted(&addresses, secret, config.world_size, Some(config.rank))
}

/// The secret to use at `addresses`: none is needed where nobody but this
/// machine's processes can connect.
fn secret_for(config: &StoreConfig, addresses: &[SocketAddr]) -> Result<Secret> {
    if let Some(secret) = &config.secret {
        return Ok(secret.clone());
    }
    match addresses.iter().find(|a| !is_loopback(a)) {
        None => Ok(Secret::none()),
        Some(address) => Err(Error::usage(format!(
            "the store's address {address} is not on the loopback interface, so that a secret is \
             required: set BURN_DDP_SECRET to the same 64 hexadecimal digits on every rank \
             (`openssl rand -hex 32` makes them)"
        ))),
    }
}

fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
    match addresses.is_empty() {
        true => Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the name has no address",
        )),
        false => Ok(addresses),
    }
}

struct Connected {
    stream: TcpStream,
    address: SocketAddr,
    /// What has arrived after the welcome.
    received: FrameBuffer,
    /// The rank that hosts the store.
    host: Option<usize>,
}

fn connect(config: &StoreConfig, started: Instant) -> Result<Connected> {
    let deadline = started + config.timeout;
    let mut pause = FIRST_PAUSE;
    let mut reported = false;
    loop {
        let why = match attempt(config, deadline) {
            Ok(connected) => return Ok(connected),
            Err(Attempt::Fatal(error)) => return Err(error),
            Err(Attempt::Transient(why)) => why,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::environment(format!(
                "rank {} could not reach the store at {} within {}: {why}; is the launcher or \
                 rank 0 running there, and are MASTER_ADDR and MASTER_PORT right?",
                config.rank,
                config.address,
                seconds(config.timeout),
            )));
        }
        if !reported && started.elapsed() > PATIENCE {
            reported = true;
            let address = &config.address;
            tracing::warn!(
                "rank {} waits for the store at {address}: {why}",
                config.rank
            );
        }
        thread::sleep(pause.min(left));
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Tries each address that the store may have.
fn attempt(config: &StoreConfig, deadline: Instant) -> Result<Connected, Attempt> {
    let addresses =
        resolve(&config.address).map_err(|error| Attempt::Transient(error.to_string()))?;
    let secret = secret_for(config, &addresses).map_err(Attempt::Fatal)?;
    let mut reasons = Vec::new();
    for address in addresses {
        match attempt_at(address, &secret, config, deadline) {
            Err(Attempt::Transient(why)) => reasons.push(format!("{address}: {why}")),
            result => return result,
        }
    }
    Err(Attempt::Transient(reasons.join("; ")))
}

fn attempt_at(
    address: SocketAddr,
    secret: &Secret,
    config: &StoreConfig,
    deadline: Instant,
) -> Result<Connected, Attempt> {
    let transient = |error: io::Error| Attempt::Transient(error.to_string());
    let left = deadline.saturating_duration_since(Instant::now());
    // At least one real attempt is made, however short the time limit.
    let limit = left.clamp(Duration::from_millis(1), ATTEMPT_LIMIT);
    let stream = TcpStream::connect_timeout(&address, limit).map_err(transient)?;
    // To a free port in the range from which the kernel takes ports for
    // connections, one in some thousand attempts gets through to itself.
    if stream.local_addr().map_err(transient)? == address {
        return Err(Attempt::Transient("nobody listens there".to_owned()));
    }
    stream.set_nodelay(true).map_err(transient)?;
    notice_silence(&stream).map_err(transient)?;
    stream.set_nonblocking(true).map_err(transient)?;

    let limit = deadline.min(Instant::now() + ATTEMPT_LIMIT);
    let hello = hello(config).map_err(Attempt::Fatal)?;
    handshake::connect(&stream, secret, PURPOSE, &hello, limit).map_err(|failure| match failure
        .is_transient()
    {
        true => Attempt::Transient(failure.into_error("the store", address).to_string()),
        false => Attempt::Fatal(failure.into_error("the store", address)),
    })?;
    let mut received = FrameBuffer::default();
    match first_event(&stream, &mut received, limit) {
        Ok(Event::Welcome { host }) => Ok(Connected {
            stream,
            address,
            received,
            host,
        }),
        Ok(Event::Refused { message }) => Err(Attempt::Fatal(Error::usage(format!(
            "the store at {address} refuses this rank: {message}"
        )))),
        Ok(_) => Err(Attempt::Transient(
            "it sent an unexpected message".to_owned(),
        )),
        Err(error) => Err(transient(error)),
    }
}

fn hello(config: &StoreConfig) -> Result<Vec<u8>> {
    let hello = Hello {
        version: VERSION,
        rank: config.rank,
        world_size: config.world_size,
        pid: std::process::id(),
        host: truncated(&host::name(), 255).to_owned(),
        silence_ms: config.silence.as_millis() as u64,
    };
    rmp_serde::to_vec(&hello).map_err(|error| Error::environment_from("can't say hello", error))
}

/// Reads the event with which the store begins.
fn first_event(
    mut stream: &TcpStream,
    received: &mut FrameBuffer,
    deadline: Instant,
) -> io::Result<Event> {
    let invalid = |error: String| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut buffer = [0; 4096];
    loop {
        let message = received
            .next(MAX_EVENT_BYTES)
            .map_err(|long| invalid(format!("it sent a message of {} bytes", long.0)))?;
        if let Some(message) = message {
            return rmp_serde::from_slice(message).map_err(|error| invalid(error.to_string()));
        }
        let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        poll_until(&mut fds, Some(deadline))?;
        if fds[0].revents().is_empty() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => received.extend(&buffer[..n]),
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
}
