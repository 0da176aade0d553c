//! What a rank was last seen doing, as the others are told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What a rank is doing: in an operation of a group, or outside, which is the
/// program's own business (it computes, compiles, saves).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Activity {
    /// For an error or a log: `in all_reduce #12 (f32 sum, 8), called at ...`.
    pub(crate) text: String,
    /// Of a rank in an operation.
    pub(crate) wait: Option<Waiting>,
}

/// How an operation stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    /// The ranks that it waits for, by their number in the job; empty while it
    /// moves.
    pub(crate) ranks: Vec<usize>,
    /// For how long nothing has moved.
    pub(crate) still_ms: u64,
}

impl Activity {
    /// A rank in an operation, in which nothing has moved for `still` for want of
    /// `ranks`.
    pub(super) fn in_operation(operation: &str, ranks: Vec<usize>, still: Duration) -> Self {
        let text = if still.is_zero() {
            format!("in {operation}")
        } else {
            let still = still.as_secs_f64();
            format!("in {operation}, without progress for {still:.1} s")
        };
        let still_ms = still.as_millis() as u64;
        Self {
            text,
            wait: Some(Waiting { ranks, still_ms }),
        }
    }

    /// A rank outside of operations, since its `last` ended so long ago.
    pub(super) fn outside(last: Option<(String, Duration)>) -> Self {
        let text = match last {
            Some((operation, ago)) => {
                let ago = ago.as_secs_f64();
                format!("busy elsewhere since it ended {operation}, {ago:.1} s ago")
            }
            None => "busy elsewhere, before its first operation".to_owned(),
        };
        Self { text, wait: None }
    }
}
