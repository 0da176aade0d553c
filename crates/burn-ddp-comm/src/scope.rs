//! Which group a rank speaks of, and which of the job's ranks are in it.

use crate::call::name_ranks;

/// A group's identity: what its messages carry and what errors name.
///
/// Errors name ranks by their number in the job, in every group: it is the one
/// that launchers and logs show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    /// Tells the groups of a job apart; 0 is the group of all its ranks.
    pub(crate) id: u32,
    /// `world`, or `split 1, color 0`.
    pub(crate) name: String,
    /// The number in the job of each rank of the group.
    pub(crate) job_ranks: Vec<usize>,
}

impl Scope {
    /// The group of all ranks of a job.
    pub(crate) fn world(world_size: usize) -> Self {
        Self {
            id: 0,
            name: "world".to_owned(),
            job_ranks: (0..world_size).collect(),
        }
    }

    /// The numbers in the job of these ranks of the group.
    pub(crate) fn in_job(&self, ranks: &[usize]) -> Vec<usize> {
        ranks.iter().map(|&rank| self.job_ranks[rank]).collect()
    }

    /// A sentence about several ranks' calls, and in which group if that is not
    /// the world.
    pub(crate) fn locate(&self, sentence: String) -> String {
        if self.id == 0 {
            return sentence;
        }
        format!("in {}: {sentence}", self.name)
    }

    /// An operation's description, and in which group if that is not the world.
    pub(crate) fn located(&self, text: &str) -> String {
        if self.id == 0 {
            return text.to_owned();
        }
        let ranks = name_ranks(&self.job_ranks);
        format!("{text} in {} ({ranks} of the job)", self.name)
    }
}
