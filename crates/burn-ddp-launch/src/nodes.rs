//! A job on several machines: which of them this is, and where they meet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use burn_ddp_comm::{Error, Result, Secret};

/// This machine's place in a job on several machines, each with a launcher.
///
/// The launcher of the machine with node rank 0 hosts the job's store; all have
/// to be given the same secret, and the same number of ranks per machine.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// Machines in the job.
    pub count: usize,
    /// This machine's number, from 0.
    pub rank: usize,
    /// Name or address under which all of them reach the machine with node rank
    /// 0.
    pub master_addr: String,
    /// The store's port there.
    pub master_port: u16,
    /// The job's secret.
    pub secret: Secret,
}

impl Nodes {
    /// Checks the numbers.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { count, rank, .. } = self;
        if *count == 0 {
            return Err(Error::usage(
                "the number of machines (--nnodes) is 0: give 1 or more",
            ));
        }
        if rank >= count {
            return Err(Error::usage(format!(
                "node rank {rank} (--node-rank) is no machine of {count} (--nnodes): they are numbered from 0 to {}",
                count - 1
            )));
        }
        if self.master_addr.is_empty() {
            return Err(Error::usage(
                "the address of the machine with node rank 0 (--master-addr) is empty",
            ));
        }
        if self.master_port == 0 {
            return Err(Error::usage(
                "port 0 (--master-port) stands for any port, but several machines have to agree on one: choose a number, for example 29500",
            ));
        }
        Ok(())
    }

    /// Where the store listens: on all of this machine's addresses, since the
    /// name under which the others know it may be another one here.
    pub(crate) fn store_address(&self) -> SocketAddr {
        let ip = match self.master_addr.parse() {
            Ok(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            Ok(IpAddr::V4(_)) | Err(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        SocketAddr::new(ip, self.master_port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize, rank: usize, master_addr: &str, master_port: u16) -> Nodes {
        Nodes {
            count,
            rank,
            master_addr: master_addr.into(),
            master_port,
            secret: Secret::generate(),
        }
    }

    #[test]
    fn odd_numbers_are_named() {
        assert!(nodes(2, 1, "host", 29500).check().is_ok());
        for (odd, expected) in [
            (nodes(0, 0, "host", 1), "--nnodes"),
            (nodes(2, 2, "host", 1), "from 0 to 1"),
            (nodes(2, 0, "", 1), "--master-addr"),
            (nodes(2, 0, "host", 0), "--master-port"),
        ] {
            let error = odd.check().map_err(|error| error.to_string());
            assert!(
                error.as_ref().is_err_and(|text| text.contains(expected)),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_store_listens_in_the_address_family_of_the_master() {
        let address = |master| nodes(2, 0, master, 7).store_address().to_string();
        assert_eq!(address("10.0.0.1"), "0.0.0.0:7");
        assert_eq!(address("fd00::1"), "[::]:7");
        assert_eq!(address("gpu-node-0"), "0.0.0.0:7");
    }
}
