//! Bytes as they arrive from a pipe, cut into lines in bounded memory.

/// Longest line that is kept whole, in bytes.
pub(crate) const LINE_LIMIT: usize = 64 * 1024;

/// Cuts a byte stream at newlines.
///
/// A line longer than the limit is handed out in pieces of at most that many
/// bytes, cut between UTF-8 characters where the bytes are UTF-8, so that what
/// is held is bounded whatever a process prints.
#[derive(Debug)]
pub(crate) struct LineSplitter {
    pending: Vec<u8>,
    limit: usize,
}

impl LineSplitter {
    /// A splitter for lines of at most `limit` bytes (at least 4, the longest
    /// UTF-8 character).
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            pending: Vec::new(),
            limit: limit.max(4),
        }
    }

    /// Takes the next bytes, and hands every line that they complete to `emit`
    /// without its newline.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut emit: impl FnMut(&[u8])) {
        while let Some(newline) = bytes.iter().position(|&byte| byte == b'\n') {
            let line = &bytes[..newline];
            if self.pending.is_empty() && line.len() <= self.limit {
                emit(line);
            } else {
                self.extend(line, &mut emit);
                emit(&self.pending);
                self.pending.clear();
            }
            bytes = &bytes[newline + 1..];
        }
        self.extend(bytes, &mut emit);
    }

    /// Ends the stream: hands out a last line that had no newline.
    pub(crate) fn finish(&mut self, mut emit: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            emit(&self.pending);
            self.pending = Vec::new();
        }
    }

    /// Appends bytes without a newline, handing out a piece whenever the limit
    /// is exceeded.
    fn extend(&mut self, mut bytes: &[u8], emit: &mut impl FnMut(&[u8])) {
        while self.pending.len() + bytes.len() > self.limit {
            let taken = self.limit - self.pending.len();
            self.pending.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            let next = bytes.first().copied();
            let cut = character_boundary(&self.pending, next);
            emit(&self.pending[..cut]);
            self.pending.drain(..cut);
        }
        self.pending.extend_from_slice(bytes);
    }
}

/// Where to cut `bytes`, which `next` follows, so that no UTF-8 character is cut
/// in two; at the end if they are not UTF-8.
fn character_boundary(bytes: &[u8], next: Option<u8>) -> usize {
    let is_continuation = |byte: u8| byte & 0b1100_0000 == 0b1000_0000;
    if !next.is_some_and(is_continuation) {
        return bytes.len();
    }
    let longest = bytes.len().saturating_sub(3).max(1);
    (longest..bytes.len())
        .rev()
        .find(|&start| !is_continuation(bytes[start]))
        .unwrap_or(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(chunks: &[&[u8]], limit: usize) -> Vec<Vec<u8>> {
        let mut splitter = LineSplitter::new(limit);
        let mut lines = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |line| lines.push(line.to_vec()));
            assert!(splitter.pending.len() <= splitter.limit);
        }
        splitter.finish(|line| lines.push(line.to_vec()));
        lines
    }

    #[test]
    fn lines_and_a_last_one_without_newline() {
        let lines = split(&[b"one\ntw", b"o\n\nthr", b"ee"], 100);
        assert_eq!(lines, [&b"one"[..], b"two", b"", b"three"]);
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_one_line() {
        assert_eq!(
            split(&[b"12345678\nx\n"], 8),
            [b"12345678".to_vec(), b"x".to_vec()]
        );
        assert_eq!(split(&[b"1234", b"5678", b"\n"], 8), [b"12345678".to_vec()]);
    }

    #[test]
    fn characters_are_not_cut() {
        let text = "ääääääääää€€€€€€€🦀🦀🦀🦀🦀";
        for limit in 4..20 {
            let pieces = split(&[text.as_bytes()], limit);
            assert!(
                pieces
                    .iter()
                    .all(|piece| std::str::from_utf8(piece).is_ok())
            );
            assert_eq!(pieces.concat(), text.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn chunking_does_not_matter(
            chunks in prop::collection::vec(prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..40), 0..12),
        ) {
            let whole = chunks.concat();
            let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let lines = split(&chunks, 1000);
            let mut expected: Vec<Vec<u8>> = whole.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
            if expected.last().is_some_and(Vec::is_empty) {
                expected.pop();
            }
            prop_assert_eq!(lines, expected);
        }

        #[test]
        fn nothing_is_lost_and_pieces_are_bounded(
            chunks in prop::collection::vec(prop::collection::vec(prop_oneof![1 => Just(b'\n'), 30 => any::<u8>()], 0..60), 0..12),
            limit in 4usize..20,
        ) {
            let whole = chunks.concat();
            let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let pieces = split(&chunks, limit);
            prop_assert!(pieces.iter().all(|piece| piece.len() <= limit));
            let text: Vec<u8> = whole.into_iter().filter(|&byte| byte != b'\n').collect();
            prop_assert_eq!(pieces.concat(), text);
        }
    }
}
