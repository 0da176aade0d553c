//! What a rank does while nothing moves: it says for whom it waits, and decides
//! whether to wait on.

use std::time::{Duration, Instant};

use super::Communicator;
use crate::call::name_ranks;
use crate::liveness::{Limits, is_excused};
use crate::operation::Operation;
use crate::peer::Stop;
use crate::{Error, Result};

/// How often a long wait is told of in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// How often a wait past its time limit is looked at, at least and at most.
const SHORTEST_LOOK: Duration = Duration::from_millis(50);
const LONGEST_LOOK: Duration = Duration::from_secs(10);

/// How many awaited ranks are described one by one.
const DESCRIBED: usize = 4;

impl Communicator {
    /// Looks at a wait in which nothing has moved for `still`.
    pub(super) fn look_around(
        &mut self,
        operation: &Operation,
        still: Duration,
    ) -> Result<(), Stop> {
        let Limits { timeout, patience } = self.limits;
        let (awaited, _) = self.awaited();
        let since = Instant::now().checked_sub(still);
        self.membership.recorder().waits(
            self.flight,
            awaited.clone(),
            since.unwrap_or_else(Instant::now),
        );
        self.still = still;
        if still >= patience {
            return Err(Stop::Deadline);
        }
        if still >= timeout {
            let standings = self.membership.standings().unwrap_or_default();
            if !is_excused(&awaited, &standings, timeout) {
                return Err(Stop::Deadline);
            }
        }
        if still >= self.next_log {
            let name = self
                .scope
                .located(&operation.describe(&self.scope, self.rank));
            tracing::warn!(
                "rank {} has been waiting for {} in {name} for {:.0} s{}",
                self.job_rank(),
                name_ranks(&awaited),
                still.as_secs_f64(),
                self.last_seen(&awaited)
            );
            self.next_log = still + LOG_INTERVAL;
        } else if still < LOG_INTERVAL {
            self.next_log = LOG_INTERVAL;
        }
        let limit = if still < timeout {
            timeout
        } else {
            still + (timeout / 4).clamp(SHORTEST_LOOK, LONGEST_LOOK)
        };
        let next = limit.min(patience).min(self.next_log);
        if let Some(waiter) = &mut self.waiter {
            waiter.look_again(next);
        }
        Ok(())
    }

    /// For how long nothing had moved in the current operation at the last look.
    pub(super) fn still(&self) -> Duration {
        self.still
    }

    /// What these ranks of the job were last seen doing, to be put behind a
    /// sentence about them.
    pub(super) fn last_seen(&self, ranks: &[usize]) -> String {
        let Some(standings) = self.membership.standings() else {
            return String::new();
        };
        let mut text = String::new();
        for &rank in ranks.iter().take(DESCRIBED) {
            if let Some(standing) = standings.get(rank) {
                text.push_str("; ");
                text.push_str(&standing.describe(rank));
            }
        }
        if ranks.len() > DESCRIBED {
            text.push_str("; ...");
        }
        text
    }

    /// A barrier that fails after `timeout` even if the missing ranks are known to
    /// be busy.
    pub(crate) fn monitored_barrier(&mut self, timeout: Duration) -> Result<()> {
        if timeout.is_zero() {
            let error = Error::usage("monitored_barrier: a time limit has to be longer than 0 s");
            return Err(self.fail(error));
        }
        let limits = Limits {
            timeout,
            patience: timeout,
        };
        let usual = std::mem::replace(&mut self.limits, limits);
        let result = self.barrier();
        self.limits = usual;
        result
    }
}
