//! What can go wrong, in three kinds that call for three different reactions.

use std::fmt;
use std::sync::Arc;

/// Result of every fallible call in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`]: who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// This program called something wrongly: its author has to change it.
    Usage,
    /// Another rank failed, left, or did not arrive: look there.
    Peer,
    /// The machine, network, disk or a library is not as needed: its
    /// administrator has to act.
    Environment,
}

/// An error of a process group.
///
/// Cheap to clone: once a group has failed, every later operation on it returns
/// the error that made it fail.
///
/// The [`Display`](fmt::Display) text says what failed, where, and what to do.
#[derive(Clone, Debug)]
pub enum Error {
    /// See [`ErrorKind::Usage`].
    Usage {
        /// What was called wrongly and how to call it instead.
        message: String,
    },
    /// See [`ErrorKind::Peer`].
    Peer {
        /// The ranks at fault, ascending; empty where they can't be told.
        ranks: Vec<usize>,
        /// What they did or did not do.
        message: String,
    },
    /// See [`ErrorKind::Environment`].
    Environment {
        /// What was tried and what to do.
        message: String,
        /// The underlying error, if there is one.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
}

impl Error {
    /// A [`Usage`](Self::Usage) error.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
        }
    }

    /// A [`Peer`](Self::Peer) error caused by `ranks`.
    pub fn peer(ranks: impl IntoIterator<Item = usize>, message: impl Into<String>) -> Self {
        let mut ranks: Vec<usize> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Self::Peer {
            ranks,
            message: message.into(),
        }
    }

    /// An [`Environment`](Self::Environment) error without an underlying one.
    pub fn environment(message: impl Into<String>) -> Self {
        Self::Environment {
            message: message.into(),
            source: None,
        }
    }

    /// An [`Environment`](Self::Environment) error caused by `source`.
    pub fn environment_from(
        message: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::Environment {
            message: message.into(),
            source: Some(Arc::new(source)),
        }
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Usage { .. } => ErrorKind::Usage,
            Self::Peer { .. } => ErrorKind::Peer,
            Self::Environment { .. } => ErrorKind::Environment,
        }
    }

    /// The ranks at fault: those of a [`Peer`](Self::Peer) error, else none.
    pub fn ranks(&self) -> &[usize] {
        match self {
            Self::Peer { ranks, .. } => ranks,
            Self::Usage { .. } | Self::Environment { .. } => &[],
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage { message } | Self::Peer { message, .. } => f.write_str(message),
            Self::Environment { message, source } => {
                f.write_str(message)?;
                match source {
                    Some(source) => write!(f, ": {source}"),
                    None => Ok(()),
                }
            }
        }
    }
}

// `source` is part of the text, so it is not handed out again: a reporter that
// walks the chain would print it twice.
impl std::error::Error for Error {}
