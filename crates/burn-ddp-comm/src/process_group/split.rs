//! Groups of some of a group's ranks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::ProcessGroup;
use crate::scope::Scope;
use crate::transport::mesh::{self, Setup};
use crate::transport::rendezvous::InGroup;
use crate::{Result, Secret};

/// What every rank says when a group is split.
#[derive(Clone, Serialize, Deserialize)]
struct Choice {
    color: Option<u32>,
    key: i64,
    /// The number of this split.
    split: u64,
    /// For the new group's identity.
    nonce: u32,
}

impl ProcessGroup {
    /// Splits the group: ranks that give the same `color` make up a new group,
    /// ordered by `key` and, where keys are equal, by their rank in this group.
    /// A rank that gives no color gets `None`.
    ///
    /// Every rank of this group has to call this, in the same order as its other
    /// operations. The new group has links, a communication thread and numbers of
    /// operations of its own, so that operations of several groups can be in
    /// flight at once. As MPI's `MPI_Comm_split`.
    ///
    /// ```no_run
    /// # let group = burn_ddp_comm::ProcessGroup::from_env()?;
    /// // Two ranks on each of several nodes: one group per node.
    /// let node = group.rank() / 2;
    /// let within_node = group.split(Some(node as u32), 0)?;
    /// # Ok::<(), burn_ddp_comm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`all_reduce`](Self::all_reduce). Environment: another rank of the new
    /// group can't be reached.
    #[track_caller]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let started = Instant::now();
        let choice = Choice {
            color,
            key,
            split: self.inner.splits.fetch_add(1, Ordering::Relaxed) + 1,
            nonce: rand::random(),
        };
        let choices = self.all_gather_object(&choice)?;
        let members = members(&choices, color);
        let new = self.link_up(&choices, &members, started);
        new.map_err(|error| self.fail(error))
    }

    /// Links this rank with the other `members`; ranks without a group stand by.
    fn link_up(
        &self,
        choices: &[Choice],
        members: &[usize],
        started: Instant,
    ) -> Result<Option<Self>> {
        let rendezvous = InGroup {
            parent: self,
            members,
        };
        let own = members.iter().position(|&rank| rank == self.rank());
        let membership = &self.inner.membership;
        let (Some(rank), Some(config)) = (own, &self.inner.config) else {
            // A world of one is split without anyone's help.
            if self.world_size() > 1 {
                mesh::stand_by(&rendezvous)?;
            }
            let config = self.inner.config.clone();
            return Ok(own.map(|_| {
                let scope = self.scope_of(choices, members);
                Self::alone(Arc::new(scope), Arc::clone(membership), config)
            }));
        };
        let scope = Arc::new(self.scope_of(choices, members));
        let mesh = mesh::connect(&Setup {
            rank,
            scope: &scope,
            secret: &config.secret.clone().unwrap_or_else(Secret::none),
            timeout: config.timeout,
            force_tcp: config.force_tcp,
            rendezvous: &rendezvous,
            deadline: started + config.store_timeout,
        })?;
        let mut config = config.clone();
        config.local_world_size = mesh.local.len();
        config.local_rank = mesh.local.iter().position(|&r| r == rank).unwrap_or(0);
        let membership = Arc::clone(membership);
        Self::connected(rank, scope, mesh, membership, config, started).map(Some)
    }

    /// The identity of the new group of `members`, which have chosen alike.
    fn scope_of(&self, choices: &[Choice], members: &[usize]) -> Scope {
        let first = &choices[members[0]];
        let name = format!(
            "split {}, color {}",
            first.split,
            first.color.unwrap_or_default()
        );
        Scope {
            // 0 is the world's.
            id: first.nonce.max(1),
            name: match self.inner.scope.id {
                0 => name,
                _ => format!("{}: {name}", self.inner.scope.name),
            },
            job_ranks: self.inner.scope.in_job(members),
        }
    }

    /// What errors call this group: `world`, or `split 1, color 0`.
    pub fn name(&self) -> &str {
        &self.inner.scope.name
    }

    /// The number in the job of each rank of this group: `0..world_size` in the
    /// group of the whole job.
    pub fn job_ranks(&self) -> &[usize] {
        &self.inner.scope.job_ranks
    }
}

/// The ranks that chose `color`, in the order of the new group; none if it is
/// `None`.
fn members(choices: &[Choice], color: Option<u32>) -> Vec<usize> {
    let mut members: Vec<usize> = (0..choices.len())
        .filter(|&rank| color.is_some() && choices[rank].color == color)
        .collect();
    members.sort_by_key(|&rank| (choices[rank].key, rank));
    members
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn choice(color: Option<u32>, key: i64) -> Choice {
        Choice {
            color,
            key,
            split: 1,
            nonce: 0,
        }
    }

    proptest! {
        #[test]
        fn every_rank_with_a_color_is_in_one_group_in_order_of_keys(
            chosen in proptest::collection::vec((proptest::option::of(0..4_u32), -2..3_i64), 1..40),
        ) {
            let choices: Vec<Choice> = chosen.iter().map(|&(c, k)| choice(c, k)).collect();
            let mut seen = vec![0; choices.len()];
            for color in 0..4 {
                let members = members(&choices, Some(color));
                for &rank in &members {
                    seen[rank] += 1;
                    prop_assert_eq!(choices[rank].color, Some(color));
                }
                let order: Vec<_> = members.iter().map(|&r| (choices[r].key, r)).collect();
                prop_assert!(order.is_sorted());
            }
            for (rank, choice) in choices.iter().enumerate() {
                prop_assert_eq!(seen[rank], usize::from(choice.color.is_some()));
            }
            prop_assert!(members(&choices, None).is_empty());
        }
    }
}
