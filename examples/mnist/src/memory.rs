//! How much memory this process has used.

/// The most memory this process has had resident so far, in bytes; `None` where
/// the system does not say.
pub(crate) fn peak_bytes() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// Finds the high-water mark in the text of proc(5)'s `status`.
fn parse(status: &str) -> Option<u64> {
    let mark = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = mark.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_found() {
        assert_eq!(
            parse("Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t 1 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(parse("Name:\tx\n"), None);
        assert_eq!(parse("VmHWM:\t lots\n"), None);
    }

    #[test]
    fn memory_in_use_is_counted() {
        if cfg!(target_os = "linux") {
            let before = peak_bytes().expect("Linux says");
            let block = vec![1u8; 64 << 20];
            let after = peak_bytes().expect("Linux says");
            assert!(after >= before && after >= 64 << 20, "{before} {after}");
            drop(std::hint::black_box(block));
        }
    }
}
