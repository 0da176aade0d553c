//! Byte streams between pairs of ranks.

/// A non-blocking byte stream to and from one peer.
pub(crate) enum Link {}

impl Link {
    pub(crate) fn send(&mut self, _bytes: &[u8]) -> Result<usize, String> {
        match *self {}
    }
    pub(crate) fn receive(&mut self, _bytes: &mut [u8]) -> Result<usize, String> {
        match *self {}
    }
    pub(crate) fn peek(&mut self, _wanted: usize) -> Result<&[u8], String> {
        match *self {}
    }
    pub(crate) fn consume(&mut self, _n: usize) {
        match *self {}
    }
}
