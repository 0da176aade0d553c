//! Reading from and writing to a TCP connection until a deadline, whether it
//! blocks or not, and the options that make a dead connection noticed.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt;

/// After how long a peer that acknowledges nothing is taken to be gone.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Waits until one of `fds` is ready or `deadline` has passed; `None` waits
/// without one. Interrupted waits are resumed.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match rustix::event::poll(fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result.map(drop)?),
        }
    }
}

/// Waits until `fd` has one of `events`; [`io::ErrorKind::TimedOut`] when
/// `deadline` passes before.
fn await_events(fd: impl AsFd, events: PollFlags, deadline: Instant) -> io::Result<()> {
    let mut fds = [PollFd::new(&fd, events)];
    poll_until(&mut fds, Some(deadline))?;
    if fds[0].revents().is_empty() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

/// Fills `bytes` from `stream` by `deadline`.
///
/// [`io::ErrorKind::UnexpectedEof`] when the peer closes before.
pub(crate) fn read_until(
    mut stream: &TcpStream,
    mut bytes: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        await_events(stream, PollFlags::IN, deadline)?;
        match stream.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes = &mut bytes[n..],
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` to `stream` by `deadline`.
pub(crate) fn write_until(
    mut stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        await_events(stream, PollFlags::OUT, deadline)?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the call can be made again.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Makes `stream` notice within some ten seconds that the peer's host has
/// vanished without closing its connections.
///
/// Only for a peer that reads all the time: one that lets its window close for
/// as long is taken to be gone too.
pub(crate) fn notice_silence(stream: &TcpStream) -> io::Result<()> {
    // For a side that sends: unacknowledged data ends the connection.
    sockopt::set_tcp_user_timeout(stream, SILENCE_LIMIT.as_millis() as u32)?;
    // For a side that only listens: unanswered probes do.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, listener.accept().unwrap().0)
    }

    #[test]
    fn bytes_pass_and_a_closed_peer_is_noticed() {
        for nonblocking in [false, true] {
            let (a, b) = pair();
            notice_silence(&a).unwrap();
            a.set_nonblocking(nonblocking).unwrap();
            b.set_nonblocking(nonblocking).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            write_until(&a, b"abc", deadline).unwrap();
            let mut bytes = [0; 3];
            read_until(&b, &mut bytes, deadline).unwrap();
            assert_eq!(&bytes, b"abc");
            drop(a);
            let error = read_until(&b, &mut bytes, deadline).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_deadline_ends_a_read_and_a_write() {
        let (a, _b) = pair();
        a.set_nonblocking(true).unwrap();
        let soon = Instant::now() + Duration::from_millis(30);
        let error = read_until(&a, &mut [0], soon).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let soon = Instant::now() + Duration::from_millis(30);
        let error = write_until(&a, &vec![0; 64 << 20], soon).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
