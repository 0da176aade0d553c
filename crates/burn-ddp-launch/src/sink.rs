//! Where lines go: gathered, then written at once.

use std::io;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Carriage return, and erase to the end of the line: what a progress bar has
/// drawn makes room for the line, and is drawn again below it.
const CLEAR_LINE: &[u8] = b"\r\x1b[K";

/// Lines that wait to be written to `T`.
pub(crate) struct Sink<T> {
    target: T,
    buffer: Vec<u8>,
    clear: bool,
}

impl<T: AsFd> Sink<T> {
    /// A sink that writes to `target`. `shared` tells that a rank draws on the
    /// launcher's terminal, and takes effect if `target` is a terminal.
    pub(crate) fn new(target: T, shared: bool) -> Self {
        let clear = shared && rustix::termios::isatty(&target);
        Self {
            target,
            buffer: Vec::new(),
            clear,
        }
    }

    /// Where to append whole lines.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    pub(crate) fn target(&self) -> &T {
        &self.target
    }

    /// Writes all of it, as far as possible in one piece, so that other writers
    /// to the same place come between lines.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        if self.clear {
            self.buffer.splice(0..0, CLEAR_LINE.iter().copied());
        }
        let written = write_all(&self.target, &self.buffer);
        self.buffer.clear();
        Ok(written?)
    }
}

/// Writes `bytes`, also where the descriptor is non-blocking, as a parent that
/// shares it may have made it.
fn write_all(target: impl AsFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(&target, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut polled = [PollFd::new(&target, PollFlags::OUT)];
                rustix::io::retry_on_intr(|| poll(&mut polled, None))?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    #[test]
    fn a_full_non_blocking_pipe_is_waited_for() -> io::Result<()> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| i as u8).collect();
        let mut sink = Sink::new(write, false);
        sink.buffer().extend_from_slice(&bytes);
        let reader = std::thread::spawn(move || {
            rustix::fs::fcntl_setfl(&read, rustix::fs::OFlags::empty())?;
            let mut received = Vec::new();
            io::Read::read_to_end(&mut std::fs::File::from(read), &mut received)?;
            io::Result::Ok(received)
        });
        sink.flush()?;
        drop(sink);
        let received = reader.join().map_err(|_| io::Error::other("panicked"))??;
        assert!(received == bytes);
        Ok(())
    }

    #[test]
    fn a_closed_pipe_is_an_error() -> io::Result<()> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        drop(read);
        let mut sink = Sink::new(write, false);
        sink.buffer().extend_from_slice(b"x\n");
        let error = sink.flush().err().map(|error| error.kind());
        assert_eq!(error, Some(io::ErrorKind::BrokenPipe));
        Ok(())
    }
}
