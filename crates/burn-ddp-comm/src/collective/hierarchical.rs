//! All-reduce over several hosts: within each host through shared memory, and
//! between hosts along rings, so that each byte crosses the network as rarely as
//! it can.
//!
//! As many ranks of every host as the smallest host has are *lanes*. The elements
//! are cut in one slice per lane, and each slice in one *block* per host. Lane
//! *k* of a host folds its host's elements of slice *k*, takes part in a ring
//! with the other hosts' lanes *k* that reduces the blocks and then gathers them
//! (Patarasu and Yuan, 2009), and hands the results to the ranks of its host. All
//! of that goes on at once, piece by piece.

use super::all_reduce::{Plan, fold, slice};
use super::{Exchange, Peers};
use crate::peer::{BURST, Moved, Peer};

/// Which ranks of a group share a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    /// The ranks of each host, ascending; hosts in the order of their first.
    hosts: Vec<Vec<usize>>,
}

impl Topology {
    /// `host_of`: anything that is equal exactly for ranks of one host, by rank.
    pub(crate) fn new<T: PartialEq>(host_of: &[T]) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (rank, host) in host_of.iter().enumerate() {
            match hosts.iter_mut().find(|ranks| host_of[ranks[0]] == *host) {
                Some(ranks) => ranks.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        Self { hosts }
    }

    /// Whether there are hosts to go between, and ranks within one to save it.
    pub(crate) fn is_hierarchical(&self) -> bool {
        self.hosts.len() > 1 && self.hosts.iter().any(|ranks| ranks.len() > 1)
    }

    /// Lanes of each host.
    fn lanes(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// Where `rank` stands.
    pub(super) fn place(&self, rank: usize) -> Place {
        let lanes = self.lanes();
        let on_host = |ranks: &Vec<usize>| ranks.contains(&rank);
        let host = self.hosts.iter().position(on_host).unwrap_or(0);
        let local = self.hosts[host].clone();
        let number = local.iter().position(|&r| r == rank);
        let lane = number.filter(|&number| number < lanes);
        let hosts = self.hosts.len();
        let in_lane = |host: usize| self.hosts[host % hosts][lane.unwrap_or(0)];
        Place {
            hosts,
            host,
            lanes,
            lane,
            next: in_lane(host + 1),
            previous: in_lane(host + hosts - 1),
            local,
        }
    }
}

/// One rank's place in a [`Topology`].
pub(super) struct Place {
    hosts: usize,
    /// The number of this rank's host.
    host: usize,
    lanes: usize,
    /// The lane that this rank is, if it is one.
    lane: Option<usize>,
    /// This lane's rank on the next host, and on the one before.
    next: usize,
    previous: usize,
    /// The ranks of this host.
    local: Vec<usize>,
}

impl Place {
    /// The block that is reduced as the `i`-th: this host begins with the one of
    /// its own number, sends it on, and goes on with the one that the host before
    /// began with.
    fn reducing(&self, i: usize) -> usize {
        (self.host + self.hosts - i % self.hosts) % self.hosts
    }

    /// The block whose result is there as the `i`-th.
    fn gathering(&self, i: usize) -> usize {
        self.reducing(i + self.hosts - 1)
    }

    /// The lane that a rank of this host is.
    fn lane_of(&self, rank: usize) -> Option<usize> {
        self.local[..self.lanes].iter().position(|&r| r == rank)
    }

    /// The bytes of block `block` of lane `lane`'s slice of `len` bytes.
    fn block(&self, len: usize, lane: usize, block: usize) -> std::ops::Range<usize> {
        let whole = slice(len, self.lanes, lane);
        let part = slice(whole.len(), self.hosts, block);
        whole.start + part.start..whole.start + part.end
    }
}

/// How far a lane has folded its host's elements.
#[derive(Default)]
struct Folding {
    /// Blocks done, in the order of [`Place::reducing`].
    blocks: usize,
    /// Bytes done of the next one.
    reduced: usize,
    /// The rank, by its number on the host, whose elements of the current piece
    /// are being folded, and how many bytes of them are.
    turn: usize,
    folded: usize,
}

/// One all-reduce on one rank.
pub(super) struct Hierarchical<'a> {
    plan: Plan,
    place: Place,
    data: &'a mut [u8],
    /// Of this lane's slice.
    accumulator: &'a mut [u8],
    folding: Folding,
    /// Bytes of the own blocks merged with what came from the host before: of
    /// block `i + 1` in the order of [`Place::reducing`].
    merged: Vec<usize>,
}

impl<'a> Hierarchical<'a> {
    /// Bytes of accumulators that `place` needs for data of `len` bytes.
    pub(super) fn accumulator_bytes(plan: &Plan, place: &Place, len: usize) -> usize {
        let lane = place
            .lane
            .map_or(0, |lane| slice(len, place.lanes, lane).len());
        lane / plan.element * plan.reduction.accumulator_size()
    }

    pub(super) fn new(
        plan: Plan,
        place: Place,
        data: &'a mut [u8],
        accumulator: &'a mut [u8],
    ) -> Self {
        Self {
            merged: vec![0; place.hosts - 1],
            plan,
            place,
            data,
            accumulator,
            folding: Folding::default(),
        }
    }

    fn block(&self, lane: usize, block: usize) -> std::ops::Range<usize> {
        self.place.block(self.data.len(), lane, block)
    }

    /// Where in the accumulator the bytes of a range of this lane's slice are.
    fn accumulated(&self, lane: usize, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
        let start = slice(self.data.len(), self.place.lanes, lane).start;
        self.wide(range.start - start)..self.wide(range.end - start)
    }

    /// Bytes of accumulators for `bytes` of elements.
    fn wide(&self, bytes: usize) -> usize {
        bytes / self.plan.element * self.plan.reduction.accumulator_size()
    }

    /// Bytes that are folded of the `i`-th block in the order of reducing.
    fn folded(&self, lane: usize, i: usize) -> usize {
        match i.cmp(&self.folding.blocks) {
            std::cmp::Ordering::Less => self.block(lane, self.place.reducing(i)).len(),
            std::cmp::Ordering::Equal => self.folding.reduced,
            std::cmp::Ordering::Greater => 0,
        }
    }

    /// Bytes whose results are there of the `i`-th block in the order of
    /// gathering.
    fn finished(&self, peers: &Peers, lane: usize, i: usize) -> usize {
        let Some(step) = i.checked_sub(1) else {
            return self.merged[self.place.hosts - 2];
        };
        let Some(previous) = &peers[self.place.previous] else {
            return 0;
        };
        let len = self.block(lane, self.place.gathering(i)).len();
        match previous.receiving().cmp(&(self.place.hosts + step)) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => previous.received().min(len),
            std::cmp::Ordering::Greater => len,
        }
    }

    /// Sends this rank's elements to the lanes of its host, and takes their
    /// results.
    fn exchange_within_host(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        let hosts = self.place.hosts;
        for number in 0..self.place.local.len() {
            let rank = self.place.local[number];
            let Some(their_lane) = self.place.lane_of(rank) else {
                continue;
            };
            let Some(peer) = &mut peers[rank] else {
                continue;
            };
            if let i @ 1.. = peer.sending()
                && i <= hosts
            {
                let range = self.block(their_lane, self.place.reducing(i - 1));
                moved |= peer.send(&self.data[range.clone()], range.len())?;
            }
            // Behind what it sends to this lane, if this is one.
            let before = self.place.lane.map_or(0, |_| hosts);
            if let i @ 1.. = peer.receiving().saturating_sub(before)
                && i <= hosts
            {
                // Over elements that have been sent: their results depend on
                // them.
                let range = self.block(their_lane, self.place.gathering(i - 1));
                moved |= peer.receive(&mut self.data[range])?;
            }
        }
        Ok(moved)
    }

    /// Folds the elements of this host in this lane's slice, as far as they have
    /// arrived.
    fn fold_host(&mut self, peers: &mut Peers, lane: usize) -> Moved {
        let mut moved = self.pass_ends(peers, lane)?;
        while self.folding.blocks < self.place.hosts {
            let block = self.block(lane, self.place.reducing(self.folding.blocks));
            while self.folding.reduced < block.len() {
                let piece = (block.len() - self.folding.reduced).min(BURST);
                while self.folding.turn < self.place.local.len() {
                    if !self.fold_turn(peers, lane, block.start, block.len(), piece)? {
                        return Ok(moved);
                    }
                    moved = true;
                }
                self.folding.reduced += piece;
                self.folding.turn = 0;
            }
            self.folding.blocks += 1;
            self.folding.reduced = 0;
        }
        Ok(moved)
    }

    /// Folds what has arrived of the current piece from the rank whose turn it
    /// is; whether that was anything.
    fn fold_turn(
        &mut self,
        peers: &mut Peers,
        lane: usize,
        start: usize,
        len: usize,
        piece: usize,
    ) -> Moved {
        let turn = self.folding.turn;
        let at = start + self.folding.reduced + self.folding.folded;
        let end = start + self.folding.reduced + piece;
        let range = self.accumulated(lane, at..end);
        let accumulator = &mut self.accumulator[range];
        let before = self.folding.folded;
        match &mut peers[self.place.local[turn]] {
            None => {
                fold(&self.plan, turn, accumulator, 0, &self.data[at..end]);
                self.folding.folded = piece;
            }
            Some(peer) if peer.receiving() == self.folding.blocks + 1 => {
                let folded = &mut self.folding.folded;
                peer.read(len, self.plan.element, end - at, |_, bytes| {
                    fold(&self.plan, turn, accumulator, 0, bytes);
                    *folded += bytes.len();
                })?;
            }
            Some(_) => {}
        }
        let moved = self.folding.folded > before;
        if self.folding.folded == piece {
            self.folding.folded = 0;
            self.folding.turn += 1;
        }
        Ok(moved)
    }

    /// Passes the ends of blocks from the ranks of this host that are read up to
    /// there.
    fn pass_ends(&self, peers: &mut Peers, lane: usize) -> Moved {
        let mut moved = false;
        for &rank in &self.place.local {
            let Some(peer) = &mut peers[rank] else {
                continue;
            };
            while let i @ 1.. = peer.receiving()
                && i <= self.place.hosts
            {
                let len = self.block(lane, self.place.reducing(i - 1)).len();
                if !peer.read(len, 1, 0, |_, _| {})? {
                    break;
                }
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Takes part in this lane's ring.
    fn exchange_between_hosts(&mut self, peers: &mut Peers, lane: usize) -> Moved {
        let mut moved = false;
        if let Some(previous) = &mut peers[self.place.previous] {
            moved |= self.receive_in_ring(previous, lane)?;
        }
        let hosts = self.place.hosts;
        let Some(next) = &peers[self.place.next] else {
            return Ok(moved);
        };
        let segment = next.sending();
        if segment == 0 || segment > 2 * (hosts - 1) {
            return Ok(moved);
        }
        let (bytes, ready) = if segment < hosts {
            let range = self.block(lane, self.place.reducing(segment - 1));
            let ready = match segment {
                1 => self.folded(lane, 0),
                _ => self.merged[segment - 2],
            };
            let range = self.accumulated(lane, range);
            (&self.accumulator[range], self.wide(ready))
        } else {
            let step = segment - hosts;
            let range = self.block(lane, self.place.gathering(step));
            (&self.data[range], self.finished(peers, lane, step))
        };
        match &mut peers[self.place.next] {
            Some(next) => Ok(moved | next.send(bytes, ready)?),
            None => Ok(moved),
        }
    }

    fn receive_in_ring(&mut self, previous: &mut Peer, lane: usize) -> Moved {
        let hosts = self.place.hosts;
        let segment = previous.receiving();
        if segment == 0 || segment > 2 * (hosts - 1) {
            return Ok(false);
        }
        if segment >= hosts {
            let block = self.place.gathering(segment - hosts + 1);
            let range = self.block(lane, block);
            return previous.receive(&mut self.data[range]);
        }
        let step = segment - 1;
        let block = self.block(lane, self.place.reducing(step + 1));
        let merged = self.merged[step];
        let limit = self.wide(self.folded(lane, step + 1) - merged);
        let range = self.accumulated(lane, block.clone());
        let len = range.len();
        let size = self.plan.reduction.accumulator_size();
        let mut elements = 0;
        let accumulator = &mut self.accumulator[range];
        let moved = previous.read(len, size, limit, |at, bytes| {
            let target = &mut accumulator[at..at + bytes.len()];
            self.plan.reduction.merge(target, bytes);
            elements = bytes.len() / size;
        })?;
        let bytes = elements * self.plan.element;
        self.merged[step] += bytes;
        if step + 2 == hosts {
            // All hosts are in it.
            let at = block.start + merged;
            let range = self.accumulated(lane, at..at + bytes);
            let reduction = &self.plan.reduction;
            reduction.finish(&mut self.data[at..at + bytes], &self.accumulator[range]);
        }
        Ok(moved)
    }

    /// Sends this lane's results to the ranks of its host.
    fn distribute(&self, peers: &mut Peers, lane: usize) -> Moved {
        let mut moved = false;
        for &rank in &self.place.local {
            // Behind what this rank sends to that lane, if it is one.
            let before = self.place.lane_of(rank).map_or(0, |_| self.place.hosts);
            let Some(peer) = &peers[rank] else { continue };
            let i = peer.sending().saturating_sub(before);
            if i == 0 || i > self.place.hosts {
                continue;
            }
            let range = self.block(lane, self.place.gathering(i - 1));
            let ready = self.finished(peers, lane, i - 1);
            if let Some(peer) = &mut peers[rank] {
                moved |= peer.send(&self.data[range], ready)?;
            }
        }
        Ok(moved)
    }
}

impl Exchange for Hierarchical<'_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let hosts = self.place.hosts;
        let ring = 2 * (hosts - 1);
        if self.place.local.contains(&rank) {
            let theirs = self.place.lane_of(rank).map_or(0, |_| hosts);
            let own = self.place.lane.map_or(0, |_| hosts);
            return (theirs + own, own + theirs);
        }
        if self.place.lane.is_none() {
            return (0, 0);
        }
        (
            if rank == self.place.next { ring } else { 0 },
            if rank == self.place.previous { ring } else { 0 },
        )
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = self.exchange_within_host(peers)?;
        if let Some(lane) = self.place.lane {
            moved |= self.fold_host(peers, lane)?;
            moved |= self.exchange_between_hosts(peers, lane)?;
            moved |= self.distribute(peers, lane)?;
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every byte is in one block of one lane, and rings are rings.
        #[test]
        fn blocks_cover_the_data_and_lanes_form_rings(
            host_of in proptest::collection::vec(0..5_u8, 1..40),
            len in 0..50_000_usize,
        ) {
            let topology = Topology::new(&host_of);
            let places: Vec<Place> = (0..host_of.len()).map(|r| topology.place(r)).collect();
            let lanes = places[0].lanes;
            let hosts = places[0].hosts;
            let mut end = 0;
            for lane in 0..lanes {
                for block in 0..hosts {
                    let range = places[0].block(len, lane, block);
                    prop_assert_eq!(range.start, end);
                    end = range.end;
                }
            }
            prop_assert_eq!(end, len);
            for (rank, place) in places.iter().enumerate() {
                prop_assert!(place.local.contains(&rank));
                prop_assert_eq!(place.lane_of(rank), place.lane);
                let order: std::collections::BTreeSet<_> = (0..hosts).map(|i| place.reducing(i)).collect();
                prop_assert_eq!(order.len(), hosts);
                if place.lane.is_some() {
                    prop_assert_eq!(places[place.next].previous, rank);
                    prop_assert_eq!(places[place.next].lane, place.lane);
                    // What one host sends on, the next reduces a step later.
                    for i in 0..hosts {
                        prop_assert_eq!(places[place.next].reducing(i + 1), place.reducing(i));
                        prop_assert_eq!(places[place.next].gathering(i + 1), place.gathering(i));
                    }
                }
            }
            let with_lane = places.iter().filter(|place| place.lane.is_some()).count();
            prop_assert_eq!(with_lane, lanes * hosts);
        }
    }
}
