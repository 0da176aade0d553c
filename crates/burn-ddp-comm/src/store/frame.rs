//! Messages in a byte stream: each is preceded by its length, as 4 bytes, little
//! endian.

use std::sync::Arc;

use serde::Serialize;

const LENGTH_BYTES: usize = 4;

/// An encoded message with its length. Shared, since many ranks may be sent
/// the same.
pub(super) type Frame = Arc<[u8]>;

/// A message's frame.
///
/// The error says what can't be encoded: a message that has no place in a
/// frame.
pub(super) fn encode<T: Serialize>(message: &T) -> Result<Frame, String> {
    let mut bytes = vec![0; LENGTH_BYTES];
    rmp_serde::encode::write(&mut bytes, message).map_err(|error| error.to_string())?;
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).map_err(|error| error.to_string())?;
    bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    Ok(bytes.into())
}

/// Received bytes, until they make a message.
#[derive(Debug, Default)]
pub(super) struct FrameBuffer {
    bytes: Vec<u8>,
    /// Those before it have been taken.
    start: usize,
}

/// A frame that announces more bytes than it may have.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong(pub(super) usize);

impl FrameBuffer {
    /// Adds what was received.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, if it is there whole. It may have `limit` bytes; a
    /// length is believed only as far as bytes arrive.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<&[u8]>, TooLong> {
        let received = &self.bytes[self.start..];
        let Some(length) = received.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > limit {
            return Err(TooLong(length));
        }
        let Some(message) = received.get(LENGTH_BYTES..LENGTH_BYTES + length) else {
            return Ok(None);
        };
        self.start += LENGTH_BYTES + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_arrive_whole_however_they_are_cut(
            messages in proptest::collection::vec(".{0,100}", 0..20),
            cuts in proptest::collection::vec(1..50_usize, 1..10),
        ) {
            let stream: Vec<u8> =
                messages.iter().flat_map(|m| encode(m).unwrap().to_vec()).collect();
            let mut buffer = FrameBuffer::default();
            let mut arrived: Vec<String> = Vec::new();
            let mut cuts = cuts.into_iter().cycle();
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at(cuts.next().unwrap().min(rest.len()));
                rest = later;
                buffer.extend(now);
                while let Some(message) = buffer.next(1 << 20).unwrap() {
                    arrived.push(rmp_serde::from_slice(message).unwrap());
                }
            }
            prop_assert_eq!(arrived, messages);
        }

        #[test]
        fn any_bytes_are_cut_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut buffer = FrameBuffer::default();
            buffer.extend(&bytes);
            while let Ok(Some(message)) = buffer.next(64) {
                prop_assert!(message.len() <= 64);
            }
            prop_assert!(buffer.bytes.capacity() <= 400);
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_arrive() {
        let mut buffer = FrameBuffer::default();
        buffer.extend(&u32::MAX.to_le_bytes());
        assert_eq!(buffer.next(1 << 20), Err(TooLong(u32::MAX as usize)));
    }
}
