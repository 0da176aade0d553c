//! What the ranks print, passed on whole lines at a time.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::time::Instant;

use burn_ddp_comm::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::line_splitter::{LINE_LIMIT, LineSplitter};
use crate::panic_message::{PanicMessage, PanicWatcher};
use crate::sink::Sink;
use crate::supervisor::{Event, OutputFailure};

/// Lines of a rank's stderr that a report shows.
const TAIL_LINES: usize = 20;

/// Bytes of such a line that a report shows.
const TAIL_LINE_BYTES: usize = 1000;

/// Bytes read from a rank before the others have their turn.
const CHUNK: usize = 64 * 1024;

/// Which of its two outputs a rank wrote to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    /// `stdout` or `stderr`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// A line that a rank printed.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// The rank.
    pub rank: usize,
    /// Where it printed it.
    pub stream: Stream,
    /// The line without its end, invalid UTF-8 replaced. At most 64 KiB: a
    /// longer line comes in pieces.
    pub text: &'a str,
}

/// Called with each line, in the order in which they are passed on.
pub(crate) type OnLine = Box<dyn FnMut(&Line<'_>) + Send>;

/// What is to be done with the ranks' output.
pub(crate) struct OutputOptions {
    /// Start each line with the rank it is from.
    pub(crate) prefix: bool,
    /// Print to the launcher's own stdout and stderr.
    pub(crate) print: bool,
    /// Rank 0's stderr is the launcher's terminal.
    pub(crate) shared_terminal: bool,
    pub(crate) on_line: Option<OnLine>,
}

/// The read end of a rank's pipe.
pub(crate) struct Source {
    /// Index of the rank on this machine.
    pub(crate) index: usize,
    pub(crate) rank: usize,
    pub(crate) stream: Stream,
    pub(crate) pipe: OwnedFd,
}

/// A file that also gets a rank's output.
pub(crate) struct LogFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

/// What is kept of a rank's stderr.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    pub(crate) tail: Vec<String>,
    pub(crate) panic: Option<PanicMessage>,
}

/// The thread that passes output on.
pub(crate) struct OutputThread {
    stop: OwnedFd,
}

impl OutputThread {
    /// Starts it. `logs` has one entry per rank of this machine, in order.
    ///
    /// It sends [`Event::OutputFailed`] when it can't print any more (and goes
    /// on reading, so that no rank blocks), and [`Event::OutputDone`] at its
    /// end.
    pub(crate) fn start(
        sources: Vec<Source>,
        logs: Vec<Option<LogFile>>,
        options: OutputOptions,
        events: Sender<Event>,
    ) -> Result<Self> {
        let cannot = |error| Error::environment_from("can't pass on the ranks' output", error);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| cannot(error.into()))?;
        let stop_of_thread = stop.try_clone().map_err(cannot)?;
        let mut pump = Pump::new(sources, logs, options, stop_of_thread, events.clone());
        std::thread::Builder::new()
            .name("launch-output".into())
            .spawn(move || {
                // Nothing but the caller's `on_line` panics.
                let captured = std::panic::catch_unwind(AssertUnwindSafe(|| pump.run()));
                let captured = captured.unwrap_or_else(|_| {
                    let failure = OutputFailure {
                        stream: "the `on_line` callback".into(),
                        closed: false,
                        message: "it panicked".into(),
                    };
                    // Both fail only when nobody listens any more.
                    let _ = events.send(Event::OutputFailed(failure));
                    Vec::new()
                });
                drop(pump);
                let _ = events.send(Event::OutputDone(captured));
            })
            .map_err(cannot)?;
        Ok(Self { stop })
    }

    /// Tells it that every rank has ended: it passes on what is in the pipes,
    /// and does not wait for someone else to close them.
    pub(crate) fn stop(&self) {
        // Can't fail: the counter is far from full.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }
}

/// A pipe, and what is known of its line in progress.
struct Reader {
    source: Source,
    lines: LineSplitter,
    prefix: Vec<u8>,
}

/// What is remembered of a rank.
#[derive(Default)]
struct Memory {
    tail: VecDeque<String>,
    panic: PanicWatcher,
    log: Option<Sink<LogFile>>,
}

struct Pump {
    readers: Vec<Reader>,
    memories: Vec<Memory>,
    stdout: Option<Sink<io::Stdout>>,
    stderr: Option<Sink<io::Stderr>>,
    on_line: Option<OnLine>,
    stop: OwnedFd,
    events: Sender<Event>,
}

impl Pump {
    fn new(
        sources: Vec<Source>,
        logs: Vec<Option<LogFile>>,
        options: OutputOptions,
        stop: OwnedFd,
        events: Sender<Event>,
    ) -> Self {
        let reader = |source: Source| Reader {
            lines: LineSplitter::new(LINE_LIMIT),
            prefix: match options.prefix {
                true => format!("[rank {}] ", source.rank).into_bytes(),
                false => Vec::new(),
            },
            source,
        };
        let memory = |log: Option<LogFile>| Memory {
            log: log.map(|log| Sink::new(log, false)),
            ..Memory::default()
        };
        let shared = options.shared_terminal;
        Self {
            readers: sources.into_iter().map(reader).collect(),
            memories: logs.into_iter().map(memory).collect(),
            stdout: options.print.then(|| Sink::new(io::stdout(), shared)),
            stderr: options.print.then(|| Sink::new(io::stderr(), shared)),
            on_line: options.on_line,
            stop,
            events,
        }
    }

    /// Passes on everything until all pipes are closed, or until it is told to
    /// stop and the pipes are empty.
    fn run(&mut self) -> Vec<Captured> {
        let mut chunk = vec![0; CHUNK];
        let mut stopping = false;
        while !self.readers.is_empty() {
            let ready = self.wait(&mut stopping);
            if stopping && ready.is_empty() {
                break;
            }
            // From the back, so that a removal leaves the rest in place.
            for &position in ready.iter().rev() {
                if !self.read(position, &mut chunk) {
                    let mut reader = self.readers.remove(position);
                    self.end(&mut reader);
                }
            }
            self.flush();
        }
        for mut reader in std::mem::take(&mut self.readers) {
            self.end(&mut reader);
        }
        self.flush();
        let memories = std::mem::take(&mut self.memories);
        let captured = |memory: Memory| Captured {
            tail: memory.tail.into(),
            panic: memory.panic.finish(),
        };
        memories.into_iter().map(captured).collect()
    }

    /// Waits until pipes can be read, and gives their positions, ascending.
    fn wait(&self, stopping: &mut bool) -> Vec<usize> {
        let pipes = self.readers.iter().map(|reader| &reader.source.pipe);
        // Once the stop is seen, only what is there already is waited for.
        let wake = if *stopping { None } else { Some(&self.stop) };
        let first_pipe = usize::from(wake.is_some());
        let mut polled: Vec<PollFd<'_>> = wake
            .into_iter()
            .chain(pipes)
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let no_wait = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let limit = stopping.then_some(&no_wait);
        // An interrupted call is repeated; others would be errors of this code.
        if rustix::io::retry_on_intr(|| poll(&mut polled, limit)).is_err() {
            *stopping = true;
            return Vec::new();
        }
        let ready = polled
            .iter()
            .skip(first_pipe)
            .enumerate()
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(position, _)| position)
            .collect();
        if first_pipe == 1 && !polled[0].revents().is_empty() {
            *stopping = true;
        }
        ready
    }

    /// Takes one chunk of a pipe; false at its end.
    fn read(&mut self, position: usize, chunk: &mut [u8]) -> bool {
        let reader = &mut self.readers[position];
        let length = match rustix::io::retry_on_intr(|| {
            rustix::io::read(&reader.source.pipe, &mut *chunk)
        }) {
            Ok(0) | Err(_) => return false,
            Ok(length) => length,
        };
        let Reader {
            source,
            lines,
            prefix,
        } = reader;
        let mut outlet = Outlet {
            source,
            prefix,
            memory: &mut self.memories[source.index],
            buffer: buffer_of(source.stream, &mut self.stdout, &mut self.stderr),
            on_line: &mut self.on_line,
        };
        lines.push(&chunk[..length], |line| outlet.line(line));
        true
    }

    /// Passes on a pipe's last line that has no newline.
    fn end(&mut self, reader: &mut Reader) {
        let Reader {
            source,
            lines,
            prefix,
        } = reader;
        let mut outlet = Outlet {
            source,
            prefix,
            memory: &mut self.memories[source.index],
            buffer: buffer_of(source.stream, &mut self.stdout, &mut self.stderr),
            on_line: &mut self.on_line,
        };
        lines.finish(|line| outlet.line(line));
    }

    /// Writes what has gathered. A stream that can't be written to is given up.
    fn flush(&mut self) {
        let failures = [
            flush(&mut self.stdout).map(|error| (Stream::Stdout, error)),
            flush(&mut self.stderr).map(|error| (Stream::Stderr, error)),
        ];
        for (stream, error) in failures.into_iter().flatten() {
            let failure = OutputFailure {
                stream: stream.name().into(),
                closed: error.kind() == io::ErrorKind::BrokenPipe,
                message: error.to_string(),
            };
            // Fails only when nobody listens any more.
            let _ = self.events.send(Event::OutputFailed(failure));
        }
        for memory in &mut self.memories {
            let path = memory.log.as_ref().map(|log| log.target().path.clone());
            if let (Some(path), Some(error)) = (path, flush(&mut memory.log)) {
                // A full disk shall not end the training; the output is on the
                // launcher's own streams as well.
                let _ = writeln!(
                    io::stderr(),
                    "can't write to {}: {error}; this rank's output is no longer recorded there",
                    path.display()
                );
            }
        }
    }
}

/// Writes what a sink has gathered; on an error the sink is closed.
fn flush<T: AsFd>(sink: &mut Option<Sink<T>>) -> Option<io::Error> {
    let error = sink.as_mut()?.flush().err()?;
    *sink = None;
    Some(error)
}

fn buffer_of<'a>(
    stream: Stream,
    stdout: &'a mut Option<Sink<io::Stdout>>,
    stderr: &'a mut Option<Sink<io::Stderr>>,
) -> Option<&'a mut Vec<u8>> {
    match stream {
        Stream::Stdout => stdout.as_mut().map(Sink::buffer),
        Stream::Stderr => stderr.as_mut().map(Sink::buffer),
    }
}

impl AsFd for LogFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Everywhere that a line of one pipe goes.
struct Outlet<'a> {
    source: &'a Source,
    prefix: &'a [u8],
    memory: &'a mut Memory,
    buffer: Option<&'a mut Vec<u8>>,
    on_line: &'a mut Option<OnLine>,
}

impl Outlet<'_> {
    fn line(&mut self, line: &[u8]) {
        if let Some(buffer) = &mut self.buffer {
            for part in [self.prefix, line, b"\n"] {
                buffer.extend_from_slice(part);
            }
        }
        if let Some(log) = &mut self.memory.log {
            log.buffer().extend_from_slice(line);
            log.buffer().push(b'\n');
        }
        if self.source.stream == Stream::Stdout && self.on_line.is_none() {
            return;
        }
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\r').unwrap_or(&text);
        if let Some(on_line) = self.on_line {
            on_line(&Line {
                rank: self.source.rank,
                stream: self.source.stream,
                text,
            });
        }
        if self.source.stream == Stream::Stderr {
            self.memory.remember(text);
        }
    }
}

impl Memory {
    fn remember(&mut self, text: &str) {
        self.panic.line(text, Instant::now());
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(visible(text).to_owned());
    }
}

/// What is seen of a line on a terminal: what follows the last carriage return;
/// not more than a report can use.
fn visible(text: &str) -> &str {
    let text = text.rsplit('\r').next().unwrap_or(text);
    let end = text.floor_char_boundary(TAIL_LINE_BYTES);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_of_a_line() {
        assert_eq!(visible("10 %\r20 %"), "20 %");
        assert_eq!(visible("plain"), "plain");
        assert_eq!(visible(&"ä".repeat(2000)).len(), TAIL_LINE_BYTES);
    }
}
