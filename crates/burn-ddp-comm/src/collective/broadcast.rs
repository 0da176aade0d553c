//! Broadcast along a tree, each rank passing on what it has while the rest
//! still arrives.

use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::Moved;
use crate::{DType, Result};

/// Up to this many ranks the root sends to everyone itself: one hop.
const FLAT_WORLD_SIZE: usize = 4;

/// The edges of the tree that touch one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// Whom it receives from; `None` for the root.
    pub(super) parent: Option<usize>,
    /// Whom it sends to.
    pub(super) children: Vec<usize>,
}

impl Tree {
    /// The tree of `root` as `rank` sees it: flat for few ranks, else binomial,
    /// in which rank `root + v` receives from `root + (v without its lowest
    /// set bit)`, all modulo `world_size`.
    pub(super) fn new(rank: usize, world_size: usize, root: usize) -> Self {
        let number = |rank: usize| (rank + world_size - root) % world_size;
        let rank_of = |number: usize| (number + root) % world_size;
        let own = number(rank);
        if world_size <= FLAT_WORLD_SIZE {
            return Self {
                parent: (own != 0).then_some(root),
                children: if own == 0 {
                    (1..world_size).map(rank_of).collect()
                } else {
                    Vec::new()
                },
            };
        }
        let bits = if own == 0 {
            usize::BITS
        } else {
            own.trailing_zeros()
        };
        // The largest subtree first: it has the longest way to go.
        let children = (0..bits)
            .map_while(|bit| 1_usize.checked_shl(bit).map(|step| own + step))
            .take_while(|&child| child < world_size)
            .map(rank_of)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        Self {
            parent: (own != 0).then(|| rank_of(own & (own - 1))),
            children,
        }
    }

    /// Segments to and from `rank` for messages of `segments` segments.
    pub(super) fn segments(&self, rank: usize, segments: usize) -> (usize, usize) {
        (
            if self.children.contains(&rank) {
                segments
            } else {
                0
            },
            if self.parent == Some(rank) {
                segments
            } else {
                0
            },
        )
    }
}

struct Broadcast<'a> {
    tree: Tree,
    data: &'a mut [u8],
}

impl Exchange for Broadcast<'_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        self.tree.segments(rank, 1)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let mut ready = self.data.len();
        if let Some(parent) = self.tree.parent.and_then(|rank| peers[rank].as_mut()) {
            if parent.receiving() == 1 {
                moved |= parent.receive(self.data)?;
            }
            ready = match parent.receiving() {
                0 => 0,
                1 => parent.received().min(ready),
                _ => ready,
            };
        }
        for &child in &self.tree.children {
            let Some(peer) = &mut peers[child] else {
                continue;
            };
            if peer.sending() == 1 {
                moved |= peer.send(self.data, ready)?;
            }
        }
        Ok(moved)
    }
}

impl Communicator {
    /// Replaces every rank's `data` by `root`'s.
    pub(crate) fn broadcast(&mut self, dtype: DType, data: &mut [u8], root: usize) -> Result<()> {
        let mut call = Call::with_elements(Collective::Broadcast, dtype, data.len());
        call.root = Some(root);
        self.broadcast_from(&call, data, root)
    }

    pub(super) fn broadcast_from(
        &mut self,
        call: &Call,
        data: &mut [u8],
        root: usize,
    ) -> Result<()> {
        self.check_root(call, root)?;
        let tree = Tree::new(self.rank(), self.world_size(), root);
        self.perform(call, &mut Broadcast { tree, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_hangs_on_the_root_in_few_steps() {
        for world_size in 1..70 {
            for root in [0, world_size / 2, world_size - 1] {
                let trees: Vec<Tree> = (0..world_size)
                    .map(|rank| Tree::new(rank, world_size, root))
                    .collect();
                let depth_limit = if world_size <= FLAT_WORLD_SIZE {
                    1
                } else {
                    world_size.ilog2() as usize + 1
                };
                for rank in 0..world_size {
                    for &child in &trees[rank].children {
                        assert_eq!(trees[child].parent, Some(rank));
                    }
                    let mut at = rank;
                    let mut depth = 0;
                    while let Some(parent) = trees[at].parent {
                        assert!(trees[parent].children.contains(&at));
                        at = parent;
                        depth += 1;
                    }
                    assert_eq!(at, root);
                    assert!(depth <= depth_limit);
                }
                let edges: usize = trees.iter().map(|tree| tree.children.len()).sum();
                assert_eq!(edges, world_size - 1);
            }
        }
    }
}
