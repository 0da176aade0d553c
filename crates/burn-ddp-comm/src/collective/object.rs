//! Objects: their encoded length, then their bytes, along the tree of a
//! broadcast or directly from all to all.

use super::broadcast::Tree;
use super::variable::{Arriving, LENGTH_BYTES, MAX_OBJECT_BYTES, Variable};
use super::{Exchange, Peers};
use crate::Result;
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::Moved;

struct BroadcastObject {
    tree: Tree,
    object: Arriving,
}

impl Exchange for BroadcastObject {
    fn segments(&self, rank: usize) -> (usize, usize) {
        self.tree.segments(rank, 2)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        // How far the object has arrived: segment, and bytes of it.
        let mut arrived = (3, 0);
        if let Some(parent) = self.tree.parent.and_then(|rank| peers[rank].as_mut()) {
            moved |= self.object.receive(parent)?;
            arrived = (parent.receiving(), parent.received());
        }
        for &child in &self.tree.children {
            let Some(peer) = &mut peers[child] else {
                continue;
            };
            if peer.sending() == 1 && arrived.0 > 1 {
                moved |= peer.send(&self.object.length, LENGTH_BYTES)?;
            }
            if peer.sending() == 2 && arrived.0 > 1 {
                let len = self.object.body.len();
                let ready = if arrived.0 == 2 {
                    arrived.1.min(len)
                } else {
                    len
                };
                moved |= peer.send(&self.object.body, ready)?;
            }
        }
        Ok(moved)
    }
}

impl Communicator {
    /// The bytes that `root` gives.
    pub(crate) fn broadcast_bytes(
        &mut self,
        bytes: Result<Option<Vec<u8>>>,
        root: usize,
    ) -> Result<Vec<u8>> {
        let call = Call::without_elements(Collective::BroadcastObject, Some(root));
        self.check_root(&call, root)?;
        let object = if self.rank() == root {
            let Some(bytes) = self.accept_object(&call, bytes)? else {
                return Err(self.refuse(&call, "the root has to give a value, and gave `None`"));
            };
            Arriving::whole(bytes)
        } else {
            Arriving::object()
        };
        let tree = Tree::new(self.rank(), self.world_size(), root);
        let mut exchange = BroadcastObject { tree, object };
        self.perform(&call, &mut exchange)?;
        Ok(exchange.object.body)
    }

    /// Every rank's bytes, in rank order.
    pub(crate) fn all_gather_bytes(&mut self, bytes: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let call = Call::without_elements(Collective::AllGatherObject, None);
        let bytes = self
            .accept_object(&call, bytes.map(Some))?
            .unwrap_or_default();
        let rank = self.rank();
        let mut exchange = Variable {
            outgoing: |_: usize| Some(bytes.as_slice()),
            incoming: (0..self.world_size())
                .map(|from| (from != rank).then(Arriving::object))
                .collect(),
        };
        self.perform(&call, &mut exchange)?;
        Ok(exchange.into_bodies(&bytes))
    }

    /// Every rank's bytes on `root`, in rank order, and nothing elsewhere.
    pub(crate) fn gather_bytes(
        &mut self,
        bytes: Result<Vec<u8>>,
        root: usize,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        let call = Call::without_elements(Collective::GatherObject, Some(root));
        self.check_root(&call, root)?;
        let bytes = self
            .accept_object(&call, bytes.map(Some))?
            .unwrap_or_default();
        let rank = self.rank();
        let is_root = rank == root;
        let mut exchange = Variable {
            outgoing: |to: usize| (to == root).then_some(bytes.as_slice()),
            incoming: (0..self.world_size())
                .map(|from| (is_root && from != rank).then(Arriving::object))
                .collect(),
        };
        self.perform(&call, &mut exchange)?;
        Ok(is_root.then(|| exchange.into_bodies(&bytes)))
    }

    fn accept_object(
        &mut self,
        call: &Call,
        bytes: Result<Option<Vec<u8>>>,
    ) -> Result<Option<Vec<u8>>> {
        match bytes {
            Ok(Some(bytes)) if bytes.len() > MAX_OBJECT_BYTES => Err(self.refuse(
                call,
                &format!(
                    "the object takes {} bytes, and {MAX_OBJECT_BYTES} are the limit",
                    bytes.len()
                ),
            )),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(self.refuse(call, &error.to_string())),
        }
    }
}
