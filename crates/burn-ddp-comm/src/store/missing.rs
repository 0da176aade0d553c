//! Errors that name the ranks for which others wait in vain.

use super::protocol::{MemberStatus, PresenceStatus};
use crate::Error;

/// The error when some of `members` are missing in gathering `key`, after this
/// rank has `waited` so long.
pub(super) fn missing_error(
    members: &[MemberStatus],
    key: &str,
    store: &str,
    waited: &str,
) -> Error {
    let missing = members
        .iter()
        .enumerate()
        .filter(|(_, member)| !member.gathered);
    let (absent, late): (Vec<_>, Vec<_>) =
        missing.partition(|(_, member)| member.presence == PresenceStatus::Absent);
    let mut parts = Vec::new();
    let absent_ranks: Vec<usize> = absent.iter().map(|(rank, _)| *rank).collect();
    if !absent_ranks.is_empty() {
        parts.push(format!(
            "{} did not arrive at the {store} within {waited} (was \
             every rank started, with the same MASTER_ADDR and MASTER_PORT?)",
            name_ranks(&absent_ranks)
        ));
    }
    for (rank, member) in &late {
        let process = member.process.as_deref().unwrap_or("unknown process");
        parts.push(match member.presence {
            PresenceStatus::Present { silent_ms } => format!(
                "rank {rank} ({process}) is there, last heard of {:.1} s ago, but did not reach \
                 {key:?} within {waited}",
                silent_ms as f64 / 1000.0
            ),
            _ => format!("rank {rank} ({process}) is gone"),
        });
    }
    if parts.is_empty() {
        parts.push(format!("{key:?} was not complete within {waited}"));
    }
    let late_ranks = late.iter().map(|(rank, _)| *rank);
    Error::peer(absent_ranks.into_iter().chain(late_ranks), parts.join("; "))
}

/// The error when `ranks` have left and are missing in gathering `key`.
pub(super) fn departed_error(ranks: &[usize], key: &str) -> Error {
    let (them, they) = match ranks.len() {
        1 => ("it", "it"),
        _ => ("them", "they"),
    };
    Error::peer(
        ranks.iter().copied(),
        format!(
            "{} left the group: {they} finished while this rank was waiting for {them} in {key:?}",
            name_ranks(ranks)
        ),
    )
}

/// `rank 2`, or `ranks 0, 1`.
fn name_ranks(ranks: &[usize]) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(presence: PresenceStatus, process: Option<&str>, gathered: bool) -> MemberStatus {
        MemberStatus {
            presence,
            process: process.map(str::to_owned),
            gathered,
            activity: None,
        }
    }

    #[test]
    fn missing_ranks_are_named_by_what_became_of_them() {
        let present = PresenceStatus::Present { silent_ms: 1250 };
        let members = [
            member(present, Some("process 10 on a"), true),
            member(present, Some("process 11 on a"), true),
            member(present, Some("process 12 on b"), false),
            member(PresenceStatus::Absent, None, false),
            member(PresenceStatus::Gone, Some("process 14 on b"), false),
        ];
        let error = missing_error(&members, "links", "store at x:1 (launcher)", "300 s");
        assert_eq!(error.ranks(), [2, 3, 4]);
        assert_eq!(
            error.to_string(),
            "rank 3 did not arrive at the store at x:1 (launcher) within 300 s (was every \
             rank started, with the same MASTER_ADDR and MASTER_PORT?); rank 2 (process 12 on b) is \
             there, last heard of 1.2 s ago, but did not reach \"links\" within 300 s; rank 4 \
             (process 14 on b) is gone"
        );
        let error = missing_error(&members[..2], "links", "store", "1 s");
        assert!(error.to_string().contains("was not complete"), "{error}");
    }

    #[test]
    fn ranks_that_left_are_named() {
        let error = departed_error(&[1, 3], "links");
        assert_eq!(error.ranks(), [1, 3]);
        assert_eq!(
            error.to_string(),
            "ranks 1, 3 left the group: they finished while this rank was waiting for them in \
             \"links\""
        );
    }
}
