//! A short digest of a module's parameters, to compare replicas by.

use std::fmt;

use burn::module::Module;
use sha2::{Digest, Sha256};

use crate::parameters::{self, name_ranks};
use crate::{Error, ProcessGroup, Result, replicate};

/// A digest of the values of all parameters of a module: equal on two ranks if
/// and only if their replicas are, bit for bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl fmt::Display for Fingerprint {
    /// The first 8 bytes, in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// The digest of every tensor of `module`, by path.
fn digests<M: Module>(module: &M) -> Result<Vec<(String, [u8; 32])>> {
    let paths = parameters::list(module).into_iter().map(|p| p.path);
    let data = replicate::read(module)?;
    let digest = |data: burn::tensor::TensorData| Sha256::digest(&data.bytes()[..]).into();
    Ok(paths.zip(data.into_iter().map(digest)).collect())
}

/// Compares `module` over the ranks of `group`. Collective.
pub(crate) fn verify<M: Module>(module: &M, group: &ProcessGroup) -> Result<Fingerprint> {
    crate::buffers::settle(module);
    let digests = digests(module)?;
    let mut hasher = Sha256::new();
    for (path, digest) in &digests {
        hasher.update(path.as_bytes());
        hasher.update([0]);
        hasher.update(digest);
    }
    let own: [u8; 32] = hasher.finalize().into();
    let mut all = vec![0; 32 * group.world_size()];
    group.all_gather(&own, &mut all)?;
    if all.chunks(32).all(|other| other == own) {
        return Ok(Fingerprint(own));
    }
    // Every rank sees that some differ, so every rank comes here.
    Err(Error::usage(describe(&group.all_gather_object(&digests)?)))
}

/// Names the first tensor that differs from rank 0's, and the ranks.
fn describe(all: &[Vec<(String, [u8; 32])>]) -> String {
    let hint = "every rank must start from the same parameters, load the same checkpoint and take \
                the same optimizer steps";
    let Some((reference, others)) = all.split_first() else {
        return hint.to_owned();
    };
    for (position, (path, digest)) in reference.iter().enumerate() {
        let differs = |list: &Vec<(String, [u8; 32])>| {
            list.get(position)
                .is_none_or(|(p, d)| p != path || d != digest)
        };
        let ranks: Vec<usize> = (1..)
            .zip(others)
            .filter(|(_, list)| differs(list))
            .map(|(rank, _)| rank)
            .collect();
        if !ranks.is_empty() {
            return format!(
                "the replicas have drifted apart: `{path}` of {} differs from rank 0's; {hint}",
                name_ranks(&ranks)
            );
        }
    }
    format!("the replicas have different numbers of parameters; {hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_tensor_that_differs_and_its_ranks_are_named() {
        let same = vec![("a".to_owned(), [0; 32]), ("b".to_owned(), [0; 32])];
        let mut other = same.clone();
        other[1].1 = [1; 32];
        let text = describe(&[same.clone(), other.clone(), same.clone(), other]);
        assert!(text.contains("`b` of ranks 1, 3"), "{text}");
        let text = describe(&[same.clone(), same[..1].to_vec()]);
        assert!(text.contains("`b` of rank 1"), "{text}");
        let text = describe(&[same[..1].to_vec(), same]);
        assert!(text.contains("different numbers"), "{text}");
    }
}
