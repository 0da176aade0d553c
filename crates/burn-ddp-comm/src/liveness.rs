//! Whether a wait without progress is for somebody who is merely busy, or in vain.

use std::time::Duration;

use crate::flight_recorder::Activity;

/// How long a rank waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Without progress, where nobody who is waited for is known to be busy.
    pub(crate) timeout: Duration,
    /// Without progress, in any case.
    pub(crate) patience: Duration,
}

/// How a rank of the job stands, as the store knows it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    /// For how long nothing was heard of it; `None` if it is not here.
    pub(crate) silent: Option<Duration>,
    /// "process 17 on node3", where known.
    pub(crate) process: Option<String>,
    /// What it was last seen doing.
    pub(crate) activity: Option<Activity>,
}

impl Standing {
    /// `rank 2 (process 17 on node3), heard of 0.4 s ago, is busy elsewhere ...`.
    pub(crate) fn describe(&self, rank: usize) -> String {
        let process = match &self.process {
            Some(process) => format!(" ({process})"),
            None => String::new(),
        };
        let Some(silent) = self.silent else {
            return format!("rank {rank}{process} is not there");
        };
        let activity = self.activity.as_ref();
        format!(
            "rank {rank}{process}, heard of {:.1} s ago, was {}",
            silent.as_secs_f64(),
            activity.map_or("not seen doing anything yet", |activity| &activity.text)
        )
    }
}

/// Whether somebody for whom a rank waits is known to be busy: it is heard of, and
/// is outside of operations or in one that moves. Those who wait themselves are
/// followed to those for whom they wait, so that ranks that wait for each other in
/// a circle excuse nobody.
///
/// `awaited`: by their number in the job. `limit`: how long a rank may be silent,
/// and how long an operation that has stopped moving still counts as moving.
pub(crate) fn is_excused(awaited: &[usize], standings: &[Standing], limit: Duration) -> bool {
    let mut seen = vec![false; standings.len()];
    let mut open: Vec<usize> = awaited.to_vec();
    while let Some(rank) = open.pop() {
        let Some(standing) = standings.get(rank) else {
            continue;
        };
        if std::mem::replace(&mut seen[rank], true) {
            continue;
        }
        if standing.silent.is_none_or(|silent| silent >= limit) {
            continue;
        }
        // One that has only begun has not said yet what it does.
        match standing.activity.as_ref().and_then(|a| a.wait.as_ref()) {
            None => return true,
            Some(wait) if Duration::from_millis(wait.still_ms) < limit => return true,
            Some(wait) => open.extend(&wait.ranks),
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flight_recorder::Waiting;

    const LIMIT: Duration = Duration::from_secs(10);

    fn standing(silent: u64, wait: Option<(&[usize], u64)>) -> Standing {
        Standing {
            silent: Some(Duration::from_secs(silent)),
            process: None,
            activity: Some(Activity {
                text: "x".to_owned(),
                wait: wait.map(|(ranks, still)| Waiting {
                    ranks: ranks.to_vec(),
                    still_ms: still * 1000,
                }),
            }),
        }
    }

    #[test]
    fn a_busy_rank_excuses_those_who_wait_for_it() {
        let busy = standing(1, None);
        let moving = standing(1, Some((&[], 0)));
        let waiting = |ranks| standing(1, Some((ranks, 20)));
        for last in [busy, moving] {
            let standings = [waiting(&[1]), waiting(&[2]), last];
            assert!(is_excused(&[2], &standings, LIMIT));
            assert!(is_excused(&[1], &standings, LIMIT), "by way of rank 1");
        }
    }

    #[test]
    fn a_circle_a_silent_rank_and_an_unknown_one_excuse_nobody() {
        let waiting = |ranks| standing(1, Some((ranks, 20)));
        let circle = [waiting(&[1]), waiting(&[2]), waiting(&[0])];
        assert!(!is_excused(&[1], &circle, LIMIT));
        let silent = [waiting(&[1]), standing(10, None)];
        assert!(!is_excused(&[1], &silent, LIMIT));
        let unknown = [waiting(&[1]), Standing::default()];
        assert!(!is_excused(&[1], &unknown, LIMIT));
        assert!(!is_excused(&[7], &unknown, LIMIT));
        // Busy ranks that have nothing to do with it.
        let apart = [waiting(&[1]), waiting(&[0]), standing(0, None)];
        assert!(!is_excused(&[1], &apart, LIMIT));
    }

    #[test]
    fn who_has_only_begun_to_wait_may_be_served_yet() {
        let standings = [
            standing(1, None),
            standing(1, Some((&[2], 9))),
            standing(50, None),
        ];
        assert!(is_excused(&[1], &standings, LIMIT));
    }
}
