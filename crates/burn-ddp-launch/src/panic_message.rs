//! A Rust panic, recognised in the lines that a process writes to stderr.

use std::time::{Duration, Instant};

/// Panics that follow each other within this time are one cascade (a worker
/// thread panics, then the thread that joins it), of which the first is the
/// cause.
const CASCADE: Duration = Duration::from_secs(1);

/// Bytes of a panic's message that are kept.
const MESSAGE_LIMIT: usize = 4096;

/// A panic's message and place.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PanicMessage {
    /// Name of the thread, `<unnamed>` if it had none.
    pub thread: String,
    /// `file:line:column`.
    pub location: String,
    /// What it said; may have several lines.
    pub message: String,
}

impl std::fmt::Display for PanicMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "panicked at {}: {}", self.location, self.message)
    }
}

/// Finds the panic that ended a process in its stderr, line by line.
#[derive(Debug, Default)]
pub(crate) struct PanicWatcher {
    first_of_cascade: Option<PanicMessage>,
    last_seen: Option<Instant>,
    reading: Reading,
}

/// Where in a panic's text the watcher is.
#[derive(Debug, Default, PartialEq)]
enum Reading {
    /// In other output.
    #[default]
    Other,
    /// In the lines of the message that is being kept.
    Kept,
    /// In the lines of a message that is not kept.
    Skipped,
}

impl PanicWatcher {
    /// Takes the next line, which arrived `at`.
    pub(crate) fn line(&mut self, line: &str, at: Instant) {
        if let Some(panic) = parse_header(line) {
            let follows = self
                .last_seen
                .is_some_and(|last| at.saturating_duration_since(last) < CASCADE);
            self.last_seen = Some(at);
            if follows {
                self.reading = Reading::Skipped;
            } else {
                // Old compilers put the message before the location.
                self.reading = match panic.message.is_empty() {
                    true => Reading::Kept,
                    false => Reading::Other,
                };
                self.first_of_cascade = Some(panic);
            }
        } else if is_end_of_message(line) {
            self.reading = Reading::Other;
        } else if self.reading == Reading::Kept
            && let Some(panic) = &mut self.first_of_cascade
        {
            if panic.message.len() + line.len() > MESSAGE_LIMIT {
                self.reading = Reading::Skipped;
                return;
            }
            if !panic.message.is_empty() {
                panic.message.push('\n');
            }
            panic.message.push_str(line);
        }
    }

    /// The panic that ended the process, as far as the lines tell.
    pub(crate) fn finish(self) -> Option<PanicMessage> {
        self.first_of_cascade.map(|mut panic| {
            panic.message.truncate(panic.message.trim_end().len());
            panic
        })
    }
}

/// What the standard library prints after a panic's message.
fn is_end_of_message(line: &str) -> bool {
    line.starts_with("note: run with `RUST_BACKTRACE=")
        || line.starts_with("stack backtrace:")
        || line.starts_with("thread caused non-unwinding panic")
}

/// Reads `thread 'main' (4711) panicked at src/main.rs:1:2:` (Rust 1.90 and
/// later), the same without a thread id (1.73 and later), and
/// `thread 'main' panicked at 'message', src/main.rs:1:2` (before).
fn parse_header(line: &str) -> Option<PanicMessage> {
    // A progress bar may stand on the same line before it.
    let start = line.find("thread '")?;
    let rest = &line[start + "thread '".len()..];
    let name_end = rest.find('\'')?;
    let (thread, rest) = (&rest[..name_end], &rest[name_end + 1..]);
    let rest = match rest.strip_prefix(" (") {
        Some(id) => {
            let end = id.find(')')?;
            if !id[..end].bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            &id[end + 1..]
        }
        None => rest,
    };
    let place = rest.strip_prefix(" panicked at ")?;
    let (location, message) = match place.strip_prefix('\'') {
        Some(old) => {
            let end = old.rfind("', ")?;
            (&old[end + 3..], &old[..end])
        }
        None => (place.strip_suffix(':')?, ""),
    };
    if !is_location(location) {
        return None;
    }
    Some(PanicMessage {
        thread: thread.to_owned(),
        location: location.to_owned(),
        message: message.to_owned(),
    })
}

/// Whether `text` is `file:line:column`.
fn is_location(text: &str) -> bool {
    let mut parts = text.rsplitn(3, ':');
    let mut number = || {
        parts
            .next()
            .is_some_and(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    number() && number() && parts.next().is_some_and(|file| !file.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watch(text: &str) -> Option<PanicMessage> {
        let mut watcher = PanicWatcher::default();
        let now = Instant::now();
        for line in text.lines() {
            watcher.line(line, now);
        }
        watcher.finish()
    }

    fn panic(thread: &str, location: &str, message: &str) -> Option<PanicMessage> {
        Some(PanicMessage {
            thread: thread.into(),
            location: location.into(),
            message: message.into(),
        })
    }

    #[test]
    fn formats_of_three_generations() {
        let note = "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace";
        for header in [
            "thread 'main' (4711) panicked at src/x.rs:12:5:\nindex out of bounds",
            "\nthread 'main' panicked at src/x.rs:12:5:\nindex out of bounds",
            "thread 'main' panicked at 'index out of bounds', src/x.rs:12:5",
        ] {
            assert_eq!(
                watch(&format!("epoch 1\n{header}\n{note}\nmore")),
                panic("main", "src/x.rs:12:5", "index out of bounds"),
                "{header}"
            );
        }
    }

    #[test]
    fn several_lines_and_a_backtrace() {
        let text = "thread '<unnamed>' (1) panicked at /a b/x.rs:1:2:\nassertion failed\n  left: 1\n right: 2\nstack backtrace:\n   0: f\n";
        assert_eq!(
            watch(text),
            panic(
                "<unnamed>",
                "/a b/x.rs:1:2",
                "assertion failed\n  left: 1\n right: 2"
            )
        );
    }

    #[test]
    fn the_first_of_a_cascade_but_the_last_cascade() {
        let mut watcher = PanicWatcher::default();
        let start = Instant::now();
        let mut at = |seconds: u64, text: &str| {
            for line in text.lines() {
                watcher.line(line, start + Duration::from_secs(seconds));
            }
        };
        at(0, "thread 'a' (1) panicked at a.rs:1:1:\ncaught");
        at(
            100,
            "thread 'worker' (2) panicked at b.rs:1:1:\nthe cause\nnote: run with `RUST_BACKTRACE=1` x",
        );
        at(
            100,
            "thread 'main' (3) panicked at c.rs:1:1:\ncalled unwrap on Any",
        );
        assert_eq!(watcher.finish(), panic("worker", "b.rs:1:1", "the cause"));
    }

    #[test]
    fn what_only_looks_like_a_panic() {
        assert_eq!(watch("the thread 'main' panicked at nothing"), None);
        assert_eq!(watch("thread 'main' (x) panicked at a.rs:1:1:\nm"), None);
        assert_eq!(watch("thread 'main' panicked at a.rs::1:"), None);
    }

    #[test]
    fn an_endless_message_is_cut() {
        let mut text = String::from("thread 'main' (1) panicked at a.rs:1:1:\n");
        text.extend(std::iter::repeat_n("0123456789\n", 100_000));
        let message = watch(&text).map(|panic| panic.message.len());
        assert!(message.is_some_and(|length| length <= MESSAGE_LIMIT));
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "(thread '|' \\(|\\) panicked at |[a:1'\n ]|.){0,30}") {
            watch(&text);
        }
    }
}
