//! The environment variables through which a rank learns its place in the job.

use std::net::SocketAddr;

use burn_ddp_comm::Secret;

/// Variables that say how many threads a rank may start; the user's value, if
/// there is one, is kept.
const THREAD_COUNTS: [&str; 3] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS", "BURN_DDP_THREADS"];

/// What all ranks of a job on this machine have in common.
#[derive(Clone, Debug)]
pub(crate) struct JobEnvironment {
    /// Ranks on this machine.
    pub(crate) local_world_size: usize,
    /// Ranks of the job.
    pub(crate) world_size: usize,
    /// Rank of this machine's first one.
    pub(crate) first_rank: usize,
    /// Host name or address of the store.
    pub(crate) master_addr: String,
    /// Port of the store.
    pub(crate) master_port: u16,
    /// The job's secret.
    pub(crate) secret: Secret,
    /// Cores of this machine that the ranks share.
    pub(crate) cores: usize,
}

impl JobEnvironment {
    /// Names and values for the rank with this number on this machine;
    /// `is_set` tells whether the user has set a variable.
    pub(crate) fn variables(
        &self,
        local_rank: usize,
        is_set: impl Fn(&str) -> bool,
    ) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("RANK", (self.first_rank + local_rank).to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("BURN_DDP_SECRET", self.secret.to_hex()),
            ("BURN_DDP_STORE", "launcher".to_owned()),
        ];
        let threads = threads_per_rank(self.cores, self.local_world_size);
        for name in THREAD_COUNTS {
            if !is_set(name) {
                variables.push((name, threads.to_string()));
            }
        }
        variables
    }
}

/// An even share of the cores, at least one thread.
pub(crate) fn threads_per_rank(cores: usize, local_world_size: usize) -> usize {
    (cores / local_world_size.max(1)).max(1)
}

/// `address` as MASTER_ADDR and MASTER_PORT.
pub(crate) fn master_of(address: SocketAddr) -> (String, u16) {
    (address.ip().to_string(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn environment() -> JobEnvironment {
        JobEnvironment {
            local_world_size: 4,
            world_size: 8,
            first_rank: 4,
            master_addr: "10.0.0.1".into(),
            master_port: 29500,
            secret: Secret::generate(),
            cores: 10,
        }
    }

    #[test]
    fn a_rank_learns_its_place() {
        let environment = environment();
        let variables: HashMap<_, _> = environment.variables(1, |_| false).into_iter().collect();
        let get = |name: &str| variables.get(name).map(String::as_str);
        assert_eq!(get("RANK"), Some("5"));
        assert_eq!(get("LOCAL_RANK"), Some("1"));
        assert_eq!(get("WORLD_SIZE"), Some("8"));
        assert_eq!(get("LOCAL_WORLD_SIZE"), Some("4"));
        assert_eq!(get("MASTER_ADDR"), Some("10.0.0.1"));
        assert_eq!(get("MASTER_PORT"), Some("29500"));
        assert_eq!(get("BURN_DDP_STORE"), Some("launcher"));
        assert_eq!(get("BURN_DDP_SECRET"), Some(&*environment.secret.to_hex()));
        for name in THREAD_COUNTS {
            assert_eq!(get(name), Some("2"), "{name}");
        }
    }

    #[test]
    fn a_thread_count_that_the_user_set_is_kept() {
        let variables = environment().variables(0, |name| name == "OMP_NUM_THREADS");
        let names: Vec<_> = variables.iter().map(|(name, _)| *name).collect();
        assert!(!names.contains(&"OMP_NUM_THREADS"));
        assert!(names.contains(&"RAYON_NUM_THREADS"));
    }

    #[test]
    fn more_ranks_than_cores_get_a_thread_each() {
        assert_eq!(threads_per_rank(2, 8), 1);
        assert_eq!(threads_per_rank(8, 3), 2);
        assert_eq!(threads_per_rank(1, 1), 1);
    }
}
