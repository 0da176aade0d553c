//! Which processes can share memory, and what this machine is called.

use std::path::Path;

/// A text that is equal for two processes exactly if they can map each other's
/// memory through `/proc/<pid>/fd`: same boot of the same machine, same process
/// and user namespaces (a container has its own). The network namespace is part
/// of it too, so that processes which cannot even reach each other's loopback
/// interface are never taken for neighbours.
pub(crate) fn identity() -> String {
    identity_from(Path::new("/proc")).unwrap_or_else(|| {
        // Without /proc no memory can be shared, so this equals nobody's.
        format!("unknown {:032x}", rand::random::<u128>())
    })
}

fn identity_from(proc: &Path) -> Option<String> {
    let boot = std::fs::read_to_string(proc.join("sys/kernel/random/boot_id")).ok()?;
    let mut identity = boot.trim().to_owned();
    for namespace in ["net", "pid", "user"] {
        // Reads as `net:[4026531840]`.
        let link = std::fs::read_link(proc.join("self/ns").join(namespace)).ok()?;
        identity.push(' ');
        identity.push_str(link.to_str()?);
    }
    Some(identity)
}

/// This machine's name, for messages.
pub(crate) fn name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_one_host_have_one_identity() {
        let own = identity();
        assert!(own.contains("pid:["), "{own}");
        let parent = format!("/proc/{}", std::os::unix::process::parent_id());
        let parent_namespace = std::fs::read_link(Path::new(&parent).join("ns/pid")).unwrap();
        assert!(own.contains(parent_namespace.to_str().unwrap()));
        assert_eq!(own, identity());
    }

    #[test]
    fn without_proc_nobody_is_a_neighbour() {
        assert_eq!(identity_from(Path::new("/nowhere")), None);
    }

    #[test]
    fn the_host_has_a_name() {
        assert!(!name().is_empty());
    }
}
