//! The IDX format of the MNIST database, plain or compressed with gzip.
//!
//! A file is two zero bytes, the element type, the number of dimensions, each
//! dimension as a big-endian `u32`, and the elements
//! (<http://yann.lecun.com/exdb/mnist/>).

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

/// Element type code of unsigned bytes.
const UNSIGNED_BYTE: u8 = 0x08;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// More elements than any MNIST-format file has: a header that announces more is
/// damaged.
const MAX_ELEMENTS: usize = 1 << 30;

/// An array of unsigned bytes with `D` dimensions, the last one contiguous.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Idx<const D: usize> {
    /// Its dimensions, none of them zero.
    pub(crate) dims: [usize; D],
    /// Its elements: as many as the product of the dimensions.
    pub(crate) elements: Vec<u8>,
}

/// Why a file is not the array that was asked for.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub(crate) struct IdxError {
    /// The file.
    pub(crate) path: PathBuf,
    /// What is wrong with it.
    pub(crate) problem: Problem,
}

/// What is wrong with an IDX file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    #[error("can't be opened: {0}")]
    Open(io::Error),
    #[error("can't be read: {0}; if it was downloaded, download it again")]
    Read(io::Error),
    #[error(
        "is not an IDX file: it begins with the bytes {0:02x?} instead of [00, 00, type, \
         dimensions]; give the files as distributed, or compressed with gzip"
    )]
    Magic([u8; 4]),
    #[error("holds elements of type {0:#04x}, and only unsigned bytes (0x08) can be read")]
    ElementType(u8),
    #[error("has {found} dimensions instead of {expected}: images have 3 and labels 1")]
    Dimensions { found: usize, expected: usize },
    #[error("is empty: its dimensions are {0:?}")]
    Empty(Vec<usize>),
    #[error(
        "announces {0:?} elements, more than the {MAX_ELEMENTS} that are read: its header is damaged"
    )]
    TooLarge(Vec<usize>),
    #[error(
        "is truncated: it ends after {found} of {expected} bytes; if it was downloaded, download \
         it again"
    )]
    Truncated { found: usize, expected: usize },
    #[error("goes on after the {0} bytes that its header announces: it is damaged")]
    TrailingBytes(usize),
}

/// Reads an array of `D` dimensions from a file, compressed or not.
pub(crate) fn read<const D: usize>(path: &Path) -> Result<Idx<D>, IdxError> {
    let at_path = |problem| IdxError {
        path: path.to_owned(),
        problem,
    };
    let file = File::open(path).map_err(|error| at_path(Problem::Open(error)))?;
    parse(BufReader::new(file)).map_err(at_path)
}

/// Reads an array of `D` dimensions from bytes, compressed or not.
pub(crate) fn parse<const D: usize>(mut bytes: impl Read) -> Result<Idx<D>, Problem> {
    let mut start = Vec::with_capacity(GZIP_MAGIC.len());
    read_up_to(&mut bytes, GZIP_MAGIC.len(), &mut start)?;
    let compressed = start == GZIP_MAGIC;
    let whole = io::Cursor::new(start).chain(bytes);
    if compressed {
        parse_plain(MultiGzDecoder::new(whole))
    } else {
        parse_plain(whole)
    }
}

fn parse_plain<const D: usize>(mut bytes: impl Read) -> Result<Idx<D>, Problem> {
    let mut header = Vec::with_capacity(4 + 4 * D);
    read_exactly(&mut bytes, 4, 4 + 4 * D, &mut header)?;
    let magic = [header[0], header[1], header[2], header[3]];
    match magic {
        [0, 0, UNSIGNED_BYTE, dims] if usize::from(dims) == D => {}
        [0, 0, UNSIGNED_BYTE, dims] if dims > 0 => {
            return Err(Problem::Dimensions {
                found: dims.into(),
                expected: D,
            });
        }
        [0, 0, 0x09 | 0x0b..=0x0e, 1..=u8::MAX] => return Err(Problem::ElementType(magic[2])),
        _ => return Err(Problem::Magic(magic)),
    }
    read_exactly(&mut bytes, 4 * D, 4 + 4 * D, &mut header)?;
    let mut dims = [0; D];
    for (dim, raw) in dims.iter_mut().zip(header[4..].chunks_exact(4)) {
        *dim = u32::from_be_bytes([raw[0], raw[1], raw[2], raw[3]]) as usize;
    }
    let len = element_count(&dims)?;
    let elements = read_elements(bytes, len, header.len())?;
    Ok(Idx { dims, elements })
}

/// The product of `dims`, within bounds and not zero.
fn element_count(dims: &[usize]) -> Result<usize, Problem> {
    if dims.contains(&0) {
        return Err(Problem::Empty(dims.to_vec()));
    }
    dims.iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim))
        .filter(|&len| len <= MAX_ELEMENTS)
        .ok_or_else(|| Problem::TooLarge(dims.to_vec()))
}

/// Reads `len` elements and the end of the file after them.
fn read_elements(mut bytes: impl Read, len: usize, header: usize) -> Result<Vec<u8>, Problem> {
    // Grows with what is really there, not with what the header announces.
    let mut elements = Vec::new();
    read_up_to(&mut bytes, len, &mut elements)?;
    if elements.len() < len {
        return Err(Problem::Truncated {
            found: header + elements.len(),
            expected: header + len,
        });
    }
    let mut more = Vec::new();
    read_up_to(&mut bytes, 1, &mut more)?;
    if !more.is_empty() {
        return Err(Problem::TrailingBytes(header + len));
    }
    Ok(elements)
}

/// Appends `count` bytes to `buffer`, which is the start of a file of at least
/// `file_len` bytes.
fn read_exactly(
    bytes: impl Read,
    count: usize,
    file_len: usize,
    buffer: &mut Vec<u8>,
) -> Result<(), Problem> {
    let end = buffer.len() + count;
    read_up_to(bytes, count, buffer)?;
    if buffer.len() < end {
        return Err(Problem::Truncated {
            found: buffer.len(),
            expected: file_len,
        });
    }
    Ok(())
}

/// Appends up to `count` bytes, fewer only at the end of the file.
fn read_up_to(bytes: impl Read, count: usize, buffer: &mut Vec<u8>) -> Result<(), Problem> {
    match bytes.take(count as u64).read_to_end(buffer) {
        Ok(_) => Ok(()),
        // How gzip says that its stream was cut off.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        Err(error) => Err(Problem::Read(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn file(dims: &[u32], elements: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, UNSIGNED_BYTE, dims.len() as u8];
        dims.iter().for_each(|d| bytes.extend(d.to_be_bytes()));
        bytes.extend(elements);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn problem<const D: usize>(bytes: &[u8]) -> String {
        parse::<D>(bytes).expect_err("a bad file").to_string()
    }

    #[test]
    fn a_file_with_another_magic_is_refused() {
        assert!(problem::<3>(b"\x89PNG\r\n").contains("not an IDX file"));
        assert!(problem::<1>(&gzip(b"<html>")).contains("not an IDX file"));
        assert!(problem::<1>(&[0, 0, 0x0d, 1, 0, 0, 0, 0]).contains("type 0x0d"));
    }

    #[test]
    fn labels_are_no_images() {
        let labels = file(&[3], &[1, 2, 3]);
        assert!(problem::<3>(&labels).contains("1 dimensions instead of 3"));
        assert!(problem::<1>(&file(&[1, 1, 1], &[1])).contains("3 dimensions instead of 1"));
    }

    #[test]
    fn a_truncated_file_is_refused_wherever_it_ends() {
        let whole = file(&[2, 2, 2], &[7; 8]);
        for len in 0..whole.len() {
            let text = problem::<3>(&whole[..len]);
            assert!(text.contains("truncated"), "{len}: {text}");
        }
        let compressed = gzip(&file(
            &[1000],
            &(0..1000).map(|i| (i * i) as u8).collect::<Vec<_>>(),
        ));
        for len in 2..compressed.len() - 8 {
            let text = problem::<1>(&compressed[..len]);
            assert!(text.contains("truncated"), "{len}: {text}");
        }
    }

    #[test]
    fn bytes_after_the_elements_are_refused() {
        let text = problem::<1>(&file(&[3], &[1, 2, 3, 4]));
        assert!(text.contains("goes on after the 11 bytes"), "{text}");
        assert!(problem::<1>(&gzip(&file(&[3], &[1, 2, 3, 4]))).contains("goes on"));
    }

    #[test]
    fn damage_inside_gzip_is_found() {
        let elements: Vec<u8> = (0..4000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let mut compressed = gzip(&file(&[4000], &elements));
        let middle = compressed.len() / 2;
        compressed[middle] ^= 0x55;
        assert!(parse::<1>(&compressed[..]).is_err());
    }

    #[test]
    fn no_elements_and_too_many_are_refused() {
        assert!(problem::<3>(&file(&[0, 28, 28], &[])).contains("is empty"));
        let text = problem::<3>(&file(&[u32::MAX, u32::MAX, u32::MAX], &[0; 8]));
        assert!(text.contains("header is damaged"), "{text}");
        let text = problem::<1>(&file(&[1 << 30], &[0; 8]));
        assert!(text.contains("truncated"), "{text}");
    }

    #[test]
    fn the_file_is_named() {
        let error = read::<1>(Path::new("/nonexistent/labels")).expect_err("no such file");
        assert!(
            error
                .to_string()
                .starts_with("/nonexistent/labels: can't be opened")
        );
        let error = read::<1>(Path::new("/")).expect_err("a directory");
        assert!(error.to_string().contains("can't be"), "{error}");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            dims in prop::array::uniform3(1u32..6),
            seed in any::<u8>(),
            compressed in any::<bool>(),
        ) {
            let len: u32 = dims.iter().product();
            let elements: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
            let plain = file(&dims, &elements);
            let bytes = if compressed { gzip(&plain) } else { plain };
            let idx = parse::<3>(&bytes[..]).expect("a whole file");
            prop_assert_eq!(idx.dims, dims.map(|d| d as usize));
            prop_assert_eq!(idx.elements, elements);
        }

        #[test]
        fn arbitrary_bytes_never_panic_nor_allocate_more_than_there_is(
            start in prop::sample::select(vec![
                vec![],
                vec![0, 0, 8, 1],
                vec![0, 0, 8, 3],
                vec![0, 0, 8, 1, 0x3f, 0xff, 0xff, 0xff],
                vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3],
            ]),
            rest in prop::collection::vec(any::<u8>(), 0..400),
        ) {
            let bytes = [start, rest].concat();
            let arrays = [
                parse::<1>(&bytes[..]).map(|idx| idx.elements),
                parse::<3>(&bytes[..]).map(|idx| idx.elements),
            ];
            for elements in arrays.into_iter().flatten() {
                // Deflate expands at most about a thousandfold.
                prop_assert!(elements.capacity() <= 2048 * bytes.len());
            }
        }
    }
}
