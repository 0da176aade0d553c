//! Set-up of the links between all ranks.
//!
//! Each step but the last is an exchange at a [rendezvous](Rendezvous): every rank
//! gives its part and gets the others'.
//!
//! 1. Introductions: host identity, settings, listening address. All have to
//!    agree on the settings.
//! 2. Segments, if any ranks share a host: where each rank's is.
//! 3. What each could map. A pair of which either side could not map the
//!    other's memory uses TCP.
//! 4. TCP connections for the remaining pairs, from the higher rank to the
//!    lower.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Link;
use super::rendezvous::Rendezvous;
use super::shared_memory::{Announcement, Layout, Mapping, OwnSegment, SharedMemoryLink, open};
use super::tcp::TcpLink;
use crate::call::name_ranks;
use crate::collective::Topology;
use crate::reception::Reception;
use crate::scope::Scope;
use crate::{Error, Result, Secret, handshake, host};

/// Raised whenever what ranks send each other changes.
const PROTOCOL: u32 = 1;

/// How often a wait for connections looks at the group's fault.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The links of one rank.
pub(crate) struct Mesh {
    /// By rank; `None` at the own place.
    pub(crate) links: Vec<Option<Link>>,
    /// This rank's segment, if any link uses it.
    pub(crate) segment: Option<Arc<Mapping>>,
    /// Whether any link is a TCP connection.
    pub(crate) sockets: bool,
    /// Whether this host has more of the ranks than cores.
    pub(crate) crowded: bool,
    /// The ranks on this host, this one included.
    pub(crate) local: Vec<usize>,
    /// Which ranks can share memory.
    pub(crate) topology: Topology,
    /// See [`ProcessGroup::transport_summary`](crate::ProcessGroup::transport_summary).
    pub(crate) summary: String,
}

/// What every rank tells every other of itself.
#[derive(Serialize, Deserialize)]
struct Introduction {
    protocol: u32,
    timeout_ms: u64,
    /// Equal exactly for ranks that could share memory.
    host: String,
    force_tcp: bool,
    listener: SocketAddr,
}

/// What a connecting rank says of itself.
#[derive(Serialize, Deserialize)]
struct Hello {
    group: u32,
    rank: usize,
}

/// The exchanges, which every rank takes part in, in this order.
const STAGES: [&str; 3] = ["introduction", "segment", "mapped"];

/// One rank's view of the set-up.
pub(crate) struct Setup<'a> {
    /// In the group.
    pub(crate) rank: usize,
    pub(crate) scope: &'a Scope,
    pub(crate) secret: &'a Secret,
    pub(crate) timeout: Duration,
    pub(crate) force_tcp: bool,
    pub(crate) rendezvous: &'a dyn Rendezvous,
    pub(crate) deadline: Instant,
}

/// Takes part in the exchanges of groups that this rank is in none of.
///
/// # Errors
///
/// As for [`connect`].
pub(crate) fn stand_by(rendezvous: &dyn Rendezvous) -> Result<()> {
    let mut stages = STAGES.iter();
    stages.try_for_each(|stage| rendezvous.gather(stage, &[]).map(drop))
}

/// Links a rank of a group with all others.
///
/// # Errors
///
/// Usage: the ranks disagree on settings. Peer: a rank failed or did not arrive.
/// Environment: no connection to a rank that is there.
pub(crate) fn connect(setup: &Setup<'_>) -> Result<Mesh> {
    let [introducing, announcing, mapping] = STAGES;
    let listener = listen(setup.rendezvous.local_ip()?)?;
    let introduction = Introduction {
        protocol: PROTOCOL,
        timeout_ms: u64::try_from(setup.timeout.as_millis()).unwrap_or(u64::MAX),
        host: host::identity(),
        force_tcp: setup.force_tcp,
        listener: listener
            .local_addr()
            .map_err(|error| Error::environment_from("a listener has no address", error))?,
    };
    let all: Vec<usize> = (0..setup.scope.job_ranks.len()).collect();
    let introductions: Vec<Introduction> = setup.exchange(introducing, &introduction)?;
    check_agreement(&introductions).map_err(|error| setup.rendezvous.fail(error))?;

    let hosts: Vec<Option<&str>> = introductions
        .iter()
        .map(|i| (!i.force_tcp).then_some(&*i.host))
        .collect();
    let mut links: Vec<Option<Link>> = all.iter().map(|_| None).collect();
    let neighbours = neighbours(&hosts, setup.rank);
    let segment = share_memory(setup, [announcing, mapping], &neighbours, &mut links)?;
    let by_memory: Vec<usize> = all
        .iter()
        .copied()
        .filter(|&r| links[r].is_some())
        .collect();
    let by_tcp: Vec<usize> = all
        .iter()
        .copied()
        .filter(|&rank| rank != setup.rank && links[rank].is_none())
        .collect();
    connect_all(setup, listener, &introductions, &by_tcp, &mut links)?;

    let on_this_host = |&rank: &usize| introductions[rank].host == introduction.host;
    let local: Vec<usize> = all.into_iter().filter(on_this_host).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Mesh {
        links,
        segment,
        sockets: !by_tcp.is_empty(),
        crowded: local.len() > cores,
        topology: topology(&introductions),
        local,
        summary: summary(
            &setup.scope.in_job(&by_memory),
            &setup.scope.in_job(&by_tcp),
        ),
    })
}

impl Setup<'_> {
    /// Gives `own` as this rank's part of `stage` and returns every rank's, by
    /// rank.
    fn exchange<T: Serialize + DeserializeOwned>(&self, stage: &str, own: &T) -> Result<Vec<T>> {
        let own = rmp_serde::to_vec(own)
            .map_err(|error| Error::environment_from("could not encode a message", error))?;
        self.rendezvous
            .gather(stage, &own)?
            .iter()
            .enumerate()
            .map(|(rank, bytes)| {
                rmp_serde::from_slice(bytes).map_err(|error| {
                    self.rendezvous.fail(Error::usage(format!(
                        "rank {}'s {stage} is unreadable ({error}): start every rank from the \
                         same build",
                        self.scope.job_ranks[rank]
                    )))
                })
            })
            .collect()
    }
}

/// Ranks that don't share memory go between hosts as if each were on its own.
fn topology(introductions: &[Introduction]) -> Topology {
    let hosts = introductions.iter().enumerate();
    let hosts: Vec<(&str, Option<usize>)> = hosts
        .map(|(rank, i)| (&*i.host, i.force_tcp.then_some(rank)))
        .collect();
    Topology::new(&hosts)
}

/// The ranks that share memory with `rank`, and itself. `hosts`: each rank's
/// host, `None` for one that does not share.
fn neighbours(hosts: &[Option<&str>], rank: usize) -> Vec<usize> {
    let on_host = |other: &usize| hosts[*other].is_some() && hosts[*other] == hosts[rank];
    (0..hosts.len()).filter(on_host).collect()
}

fn listen(address: IpAddr) -> Result<TcpListener> {
    TcpListener::bind((address, 0)).map_err(|error| {
        Error::environment_from(format!("could not listen at {address} for ranks"), error)
    })
}

/// Every rank has to have the same settings.
fn check_agreement(introductions: &[Introduction]) -> Result<()> {
    let settings: Vec<String> = introductions
        .iter()
        .map(|i| {
            let seconds = i.timeout_ms as f64 / 1000.0;
            format!("protocol {}, time limit {seconds} s", i.protocol)
        })
        .collect();
    if settings.iter().all(|s| *s == settings[0]) {
        return Ok(());
    }
    let mut parties: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, text) in settings.iter().enumerate() {
        match parties.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => parties.push((text, vec![rank])),
        }
    }
    let parties: Vec<String> = parties
        .iter()
        .map(|(text, ranks)| format!("{}: {text}", name_ranks(ranks)))
        .collect();
    Err(Error::usage(format!(
        "the ranks were started with different settings ({}): start them from the same build, \
         with the same BURN_DDP_TIMEOUT_SECONDS",
        parties.join("; ")
    )))
}

/// Sets up links through shared memory to `neighbours`, which this rank is one
/// of unless there are none, as far as the system allows it.
fn share_memory(
    setup: &Setup<'_>,
    [announcing, mapping]: [&str; 2],
    neighbours: &[usize],
    links: &mut [Option<Link>],
) -> Result<Option<Arc<Mapping>>> {
    let layout = Layout::for_peers(neighbours.len().saturating_sub(1));
    // Ring `i` of a rank's segment is written by the `i`-th of its neighbours.
    let ring = |of: usize, writer: usize| {
        let others = neighbours.iter().filter(|&&rank| rank != of);
        others.take_while(|&&rank| rank != writer).count()
    };
    let own = (neighbours.len() > 1)
        .then(|| OwnSegment::create(layout, rand::random()))
        .transpose()
        .unwrap_or_else(|error| {
            tracing::warn!("no shared memory: {error}; using TCP");
            None
        });
    let announcement = own.as_ref().map(OwnSegment::announcement);
    let announced: Vec<Option<Announcement>> = setup.exchange(announcing, &announcement)?;

    let mut mapped: Vec<(usize, Arc<Mapping>)> = Vec::new();
    for &rank in neighbours.iter().filter(|&&rank| rank != setup.rank) {
        let Some(announcement) = &announced[rank] else {
            continue;
        };
        match open(announcement, layout) {
            Ok(mapping) => mapped.push((rank, mapping)),
            Err(error) => {
                let rank = setup.scope.job_ranks[rank];
                tracing::warn!("can't map rank {rank}'s memory: {error}; using TCP to it");
            }
        }
    }
    let reached: Vec<usize> = mapped.iter().map(|&(rank, _)| rank).collect();
    let reached: Vec<Vec<usize>> = setup.exchange(mapping, &reached)?;

    let Some(own) = own else { return Ok(None) };
    let mut used = false;
    for (rank, mapping) in &mapped {
        if reached[*rank].contains(&setup.rank) {
            let theirs = (mapping, ring(*rank, setup.rank));
            let ours = (&own.mapping, ring(setup.rank, *rank));
            links[*rank] = SharedMemoryLink::new(theirs, ours).map(Link::SharedMemory);
            used = true;
        }
    }
    Ok(used.then(|| Arc::clone(&own.mapping)))
}

/// Connects this rank with `peers` over TCP.
fn connect_all(
    setup: &Setup<'_>,
    listener: TcpListener,
    introductions: &[Introduction],
    peers: &[usize],
    links: &mut [Option<Link>],
) -> Result<()> {
    let (lower, higher): (Vec<usize>, Vec<usize>) =
        peers.iter().partition(|&&rank| rank < setup.rank);
    let accepted = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| accept_all(setup, listener, &higher));
        for &rank in &lower {
            let stream = connect_one(setup, rank, introductions[rank].listener);
            // Also ends the accepting thread.
            let stream = stream.map_err(|error| setup.rendezvous.fail(error))?;
            links[rank] = Some(link(stream)?);
        }
        accepting
            .join()
            .unwrap_or_else(|_| Err(Error::environment("the thread that accepts ranks failed")))
    })?;
    for (rank, stream) in accepted {
        links[rank] = Some(link(stream)?);
    }
    Ok(())
}

fn purpose(group: u32, acceptor: usize) -> Vec<u8> {
    format!("link of group {group} to rank {acceptor}").into_bytes()
}

fn connect_one(setup: &Setup<'_>, rank: usize, address: SocketAddr) -> Result<TcpStream> {
    setup.rendezvous.fault().check()?;
    let name = format!("rank {}", setup.scope.job_ranks[rank]);
    let left = setup.deadline.saturating_duration_since(Instant::now());
    let unreachable = |error| {
        Error::environment_from(
            format!("can't connect to {name} at {address}: check routes and firewalls"),
            error,
        )
    };
    let stream = TcpStream::connect_timeout(&address, left.max(LOOK_AGAIN)).map_err(unreachable)?;
    let hello = Hello {
        group: setup.scope.id,
        rank: setup.rank,
    };
    let hello = rmp_serde::to_vec(&hello)
        .map_err(|error| Error::environment_from("could not encode a message", error))?;
    let purpose = purpose(setup.scope.id, rank);
    handshake::connect(&stream, setup.secret, &purpose, &hello, setup.deadline)
        .map_err(|failure| failure.into_error(&name, address))?;
    Ok(stream)
}

/// Accepts a connection from each of `expected`.
fn accept_all(
    setup: &Setup<'_>,
    listener: TcpListener,
    expected: &[usize],
) -> Result<Vec<(usize, TcpStream)>> {
    let mut missing: Vec<usize> = expected.to_vec();
    let mut accepted = Vec::new();
    if missing.is_empty() {
        return Ok(accepted);
    }
    let fault = setup.rendezvous.fault();
    let accepting = |error| Error::environment_from("could not accept a rank", error);
    let purpose = purpose(setup.scope.id, setup.rank);
    let mut reception =
        Reception::new(listener, setup.secret.clone(), &purpose).map_err(accepting)?;
    let mut ready = VecDeque::new();
    while !missing.is_empty() {
        let guest = reception
            .next(setup.deadline, LOOK_AGAIN, || fault.is_set(), &mut ready)
            .map_err(accepting)?;
        let Some(guest) = guest else {
            fault.check()?;
            let missing = setup.scope.in_job(&missing);
            let ranks = name_ranks(&missing);
            let own = setup.scope.job_ranks[setup.rank];
            return Err(Error::peer(
                missing,
                format!("{ranks} did not connect to rank {own} in time"),
            ));
        };
        // Authenticated, so that another rank's hello is a bug, not an attack.
        let Ok(hello) = rmp_serde::from_slice::<Hello>(&guest.hello) else {
            continue;
        };
        let place = missing.iter().position(|&rank| rank == hello.rank);
        if let (Some(place), true) = (place, hello.group == setup.scope.id) {
            accepted.push((missing.swap_remove(place), guest.stream));
        }
    }
    Ok(accepted)
}

fn link(stream: TcpStream) -> Result<Link> {
    TcpLink::new(stream)
        .map(|link| Link::Tcp(Box::new(link)))
        .map_err(|error| Error::environment_from("could not configure a connection", error))
}

fn summary(by_memory: &[usize], by_tcp: &[usize]) -> String {
    let part = |ranks: &[usize], how: &str| {
        (!ranks.is_empty()).then(|| format!("{how} to {}", ranges(ranks)))
    };
    let parts = [part(by_memory, "shared memory"), part(by_tcp, "TCP")];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join("; ")
}

/// Ascending ranks, neighbours joined: `ranks 1-3, 5`.
fn ranges(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|one, next| one + 1 == *next);
    let runs: Vec<String> = runs
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run.iter().map(usize::to_string).collect(),
        })
        .collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_ranks_in_ranges() {
        assert_eq!(
            summary(&[1, 2, 3, 5], &[7]),
            "shared memory to ranks 1-3, 5; TCP to rank 7"
        );
        assert_eq!(summary(&[0], &[]), "shared memory to rank 0");
    }

    #[test]
    fn different_settings_are_named() {
        let introduction = |timeout_ms| Introduction {
            protocol: PROTOCOL,
            timeout_ms,
            host: String::new(),
            force_tcp: false,
            listener: ([127, 0, 0, 1], 1).into(),
        };
        check_agreement(&[introduction(5), introduction(5)]).unwrap();
        let error = check_agreement(&[introduction(5), introduction(1500), introduction(5)])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "ranks 0, 2: protocol 1, time limit 0.005 s; rank 1: protocol 1, time limit 1.5 s"
            ),
            "{error}"
        );
    }
}
