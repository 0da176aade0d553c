//! Objects: their encoded length, then their bytes, along the tree of a
//! broadcast or directly from all to all.

use super::broadcast::Tree;
use super::{Exchange, Peers};
use crate::call::{Call, Collective};
use crate::communicator::Communicator;
use crate::peer::{Moved, Stop};
use crate::{Error, Result};

/// Most bytes that an encoded object may have: 1 GiB.
pub(crate) const MAX_OBJECT_BYTES: usize = 1 << 30;

const LENGTH_BYTES: usize = size_of::<u64>();

/// An object on its way in.
#[derive(Default)]
struct Incoming {
    length: [u8; LENGTH_BYTES],
    body: Vec<u8>,
}

impl Incoming {
    fn whole(body: Vec<u8>) -> Self {
        Self {
            length: (body.len() as u64).to_le_bytes(),
            body,
        }
    }

    /// Makes room for the body whose length has arrived from `rank`.
    fn allocate(&mut self, rank: usize) -> Result<(), Stop> {
        let length = u64::from_le_bytes(self.length);
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_OBJECT_BYTES)
            .ok_or_else(|| Stop::Broken {
                rank,
                reason: format!("it announced an object of {length} bytes"),
            })?;
        self.body.try_reserve_exact(length).map_err(|error| {
            Stop::Failed(Error::environment_from(
                format!("no memory for an object of {length} bytes from rank {rank}"),
                error,
            ))
        })?;
        self.body.resize(length, 0);
        Ok(())
    }

    /// Receives on from `peer`.
    fn receive(&mut self, peer: &mut crate::peer::Peer) -> Moved {
        let mut moved = false;
        if peer.receiving() == 1 {
            moved |= peer.receive(&mut self.length)?;
            if peer.receiving() == 2 {
                self.allocate(peer.rank)?;
            }
        }
        if peer.receiving() == 2 {
            moved |= peer.receive(&mut self.body)?;
        }
        Ok(moved)
    }
}

struct BroadcastObject {
    tree: Tree,
    object: Incoming,
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

struct AllGatherObject {
    rank: usize,
    objects: Vec<Incoming>,
}

impl Exchange for AllGatherObject {
    fn segments(&self, _rank: usize) -> (usize, usize) {
        (2, 2)
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            let own = &self.objects[self.rank];
            if peer.sending() == 1 {
                moved |= peer.send(&own.length, LENGTH_BYTES)?;
            }
            if peer.sending() == 2 {
                moved |= peer.send(&own.body, own.body.len())?;
            }
            moved |= self.objects[rank].receive(peer)?;
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
            Incoming::whole(bytes)
        } else {
            Incoming::default()
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
        let mut objects: Vec<Incoming> = Vec::new();
        objects.resize_with(self.world_size(), Incoming::default);
        let rank = self.rank();
        objects[rank] = Incoming::whole(bytes);
        let mut exchange = AllGatherObject { rank, objects };
        self.perform(&call, &mut exchange)?;
        Ok(exchange.objects.into_iter().map(|o| o.body).collect())
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
