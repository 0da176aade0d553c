//! Point-to-point messages: each goes straight to its receiver, and only the two
//! ranks take part. A batch of them runs at once.

use super::{Exchange, Peers};
use crate::communicator::Communicator;
use crate::pair_call::PairCall;
use crate::peer::Moved;
use crate::{DType, Error, Result};

/// Messages by peer, at most one a peer and direction.
struct PointToPoint<'a, 'o, 'i> {
    outgoing: &'a [(usize, &'o [u8])],
    incoming: &'a mut [(usize, &'i mut [u8])],
}

impl Exchange for PointToPoint<'_, '_, '_> {
    fn segments(&self, rank: usize) -> (usize, usize) {
        let sends = self.outgoing.iter().any(|&(to, _)| to == rank);
        let receives = self.incoming.iter().any(|&(from, _)| from == rank);
        (usize::from(sends), usize::from(receives))
    }

    fn advance(&mut self, peers: &mut Peers) -> Moved {
        let mut moved = false;
        for &(to, data) in self.outgoing {
            if let Some(peer) = &mut peers[to]
                && peer.sending() == 1
            {
                moved |= peer.send(data, data.len())?;
            }
        }
        for (from, data) in &mut *self.incoming {
            if let Some(peer) = &mut peers[*from]
                && peer.receiving() == 1
            {
                moved |= peer.receive(data)?;
            }
        }
        Ok(moved)
    }
}

impl Communicator {
    /// Sends to the ranks of `outgoing` and receives from those of `incoming`, at
    /// most one message a rank and direction. A message to this rank itself is
    /// copied.
    pub(crate) fn transfer(
        &mut self,
        dtype: DType,
        outgoing: &[(usize, &[u8])],
        incoming: &mut [(usize, &mut [u8])],
    ) -> Result<()> {
        let (own, world_size) = (self.rank(), self.world_size());
        let sizes = |len: usize| len / dtype.size();
        let mut out: Vec<(usize, usize)> =
            outgoing.iter().map(|m| (m.0, sizes(m.1.len()))).collect();
        let mut inc: Vec<(usize, usize)> =
            incoming.iter().map(|m| (m.0, sizes(m.1.len()))).collect();
        if let Some(problem) = problem(own, world_size, &mut out, &mut inc) {
            let rank = self.job_rank();
            return Err(self.fail(Error::usage(format!(
                "{} on rank {rank}: {problem}",
                name(&out, &inc)
            ))));
        }
        let sent_to_self = outgoing.iter().find(|&&(to, _)| to == own);
        if let Some(&(_, sent)) = sent_to_self
            && let Some((_, received)) = incoming.iter_mut().find(|(from, _)| *from == own)
        {
            received.copy_from_slice(sent);
        }
        let count = |list: &[(usize, usize)], rank| {
            list.iter()
                .find(|&&(r, _)| r == rank)
                .map(|&(_, count)| count)
        };
        let calls: Vec<(usize, PairCall)> = (0..world_size)
            .filter(|&peer| peer != own)
            .map(|peer| (peer, count(&out, peer), count(&inc, peer)))
            .filter(|&(_, sends, receives)| sends.is_some() || receives.is_some())
            .map(|(peer, sends, receives)| {
                (peer, PairCall::new(dtype, (own, peer), sends, receives))
            })
            .collect();
        self.perform_pairs(&calls, &mut PointToPoint { outgoing, incoming })
    }
}

fn name(outgoing: &[(usize, usize)], incoming: &[(usize, usize)]) -> String {
    match (outgoing, incoming) {
        ([(to, _)], []) => format!("send to rank {to}"),
        ([], [(from, _)]) => format!("recv from rank {from}"),
        ([(to, _)], [(from, _)]) => format!("send_recv to rank {to} and from rank {from}"),
        _ => format!(
            "an exchange of {} messages",
            outgoing.len() + incoming.len()
        ),
    }
}

/// What is wrong with messages of so many elements to and from these ranks. Sorts
/// them.
fn problem(
    own: usize,
    world_size: usize,
    outgoing: &mut [(usize, usize)],
    incoming: &mut [(usize, usize)],
) -> Option<String> {
    for (list, direction) in [(&mut *outgoing, "to"), (&mut *incoming, "from")] {
        if let Some((rank, _)) = list.iter().find(|&&(rank, _)| rank >= world_size) {
            return Some(format!(
                "there is no rank {rank} in a group of {world_size}"
            ));
        }
        list.sort_unstable();
        if let Some(pair) = list.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Some(format!(
                "there are several messages {direction} rank {}: one a rank and direction can go \
                 at a time",
                pair[0].0
            ));
        }
    }
    let with_self = |list: &[(usize, usize)]| list.iter().find(|m| m.0 == own).map(|m| m.1);
    match (with_self(outgoing), with_self(incoming)) {
        (None, None) => None,
        (Some(sent), Some(received)) if sent == received => None,
        (Some(sent), Some(received)) => Some(format!(
            "it sends itself {sent} elements and receives {received}"
        )),
        (Some(_), None) => Some("it sends to itself and does not receive it".to_owned()),
        (None, Some(_)) => Some("it receives from itself and sends nothing".to_owned()),
    }
}
