//! A directory of MNIST-format files as Burn data sets.

use std::path::{Path, PathBuf};

use burn::data::dataset::{Dataset, DatasetError};

use crate::idx::{self, Idx};

/// Side of an image, in pixels.
pub(crate) const SIDE: usize = 28;
/// Number of digits, or of kinds of garments.
pub(crate) const CLASSES: usize = 10;

/// Images of one kind of object in [`CLASSES`] variants, and which one each is.
#[derive(Debug)]
pub(crate) struct Images {
    /// `SIDE * SIDE` bytes per image.
    pixels: Vec<u8>,
    labels: Vec<u8>,
}

/// An image and its label.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    /// Rows from the top, `SIDE * SIDE` bytes; 0 is background.
    pub(crate) pixels: Vec<u8>,
    /// `0..CLASSES`.
    pub(crate) label: u8,
}

/// Why a directory is no data set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error(
        "there is no directory {}: `--data-dir` takes one with the four MNIST files ({})",
        .0.display(), names()
    )]
    NoDirectory(PathBuf),
    #[error(
        "{} has no {}: it must hold {}, each as it is or compressed with gzip (`.gz`)",
        directory.display(), missing.join(", "), names()
    )]
    MissingFiles {
        directory: PathBuf,
        missing: Vec<&'static str>,
    },
    #[error(transparent)]
    Idx(#[from] idx::IdxError),
    #[error("{}: images are {found:?} pixels instead of [28, 28]", path.display())]
    ImageSize { path: PathBuf, found: [usize; 2] },
    #[error(
        "{} has {images} images and {} has {labels} labels: they are not of the same set",
        image_path.display(), label_path.display()
    )]
    Counts {
        image_path: PathBuf,
        label_path: PathBuf,
        images: usize,
        labels: usize,
    },
    #[error("{}: label {index} is {label}, and labels go from 0 to 9", path.display())]
    Label {
        path: PathBuf,
        index: usize,
        label: u8,
    },
}

const FILES: [&str; 4] = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
];

fn names() -> String {
    FILES.join(", ")
}

/// Reads the training and the test images of a directory.
pub(crate) fn load(directory: &Path) -> Result<(Images, Images), DataError> {
    if !directory.is_dir() {
        return Err(DataError::NoDirectory(directory.to_owned()));
    }
    let found = FILES.map(|name| find(directory, name));
    let missing: Vec<_> = FILES
        .into_iter()
        .zip(&found)
        .filter_map(|(name, path)| path.is_none().then_some(name))
        .collect();
    let [
        Some(images),
        Some(labels),
        Some(test_images),
        Some(test_labels),
    ] = found
    else {
        return Err(DataError::MissingFiles {
            directory: directory.to_owned(),
            missing,
        });
    };
    Ok((
        Images::read(&images, &labels)?,
        Images::read(&test_images, &test_labels)?,
    ))
}

/// The file `name` in one of the spellings under which it is distributed.
fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    let dotted = name.replace("-idx", ".idx");
    [name, &dotted]
        .into_iter()
        .flat_map(|name| [name.to_owned(), format!("{name}.gz")])
        .map(|name| directory.join(name))
        .find(|path| path.exists())
}

impl Images {
    fn read(image_path: &Path, label_path: &Path) -> Result<Self, DataError> {
        let images: Idx<3> = idx::read(image_path)?;
        let labels: Idx<1> = idx::read(label_path)?;
        let [count, height, width] = images.dims;
        if [height, width] != [SIDE, SIDE] {
            return Err(DataError::ImageSize {
                path: image_path.to_owned(),
                found: [height, width],
            });
        }
        if count != labels.dims[0] {
            return Err(DataError::Counts {
                image_path: image_path.to_owned(),
                label_path: label_path.to_owned(),
                images: count,
                labels: labels.dims[0],
            });
        }
        let wrong = |&label: &u8| usize::from(label) >= CLASSES;
        if let Some(index) = labels.elements.iter().position(wrong) {
            return Err(DataError::Label {
                path: label_path.to_owned(),
                index,
                label: labels.elements[index],
            });
        }
        Ok(Self {
            pixels: images.elements,
            labels: labels.elements,
        })
    }

    /// Number of images.
    pub(crate) fn count(&self) -> usize {
        self.labels.len()
    }

    /// Only the first `count` images, or all if there are no more.
    pub(crate) fn truncate(mut self, count: usize) -> Self {
        self.labels.truncate(count);
        self.pixels.truncate(count.saturating_mul(SIDE * SIDE));
        self
    }

    /// A CRC-32 of all images and labels, by which a resumed run recognises its
    /// data.
    pub(crate) fn checksum(&self) -> u32 {
        let mut crc = flate2::Crc::new();
        crc.update(&self.labels);
        crc.update(&self.pixels);
        crc.sum()
    }
}

impl Dataset<Item> for Images {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        let start = index * SIDE * SIDE;
        Ok(Item {
            pixels: self.pixels[start..start + SIDE * SIDE].to_vec(),
            label: self.labels[index],
        })
    }

    fn len(&self) -> usize {
        self.count()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// An IDX file of images, or of labels if `pixels` is `None`.
    fn idx(count: u32, pixels: Option<(u32, u32)>, element: u8) -> Vec<u8> {
        let (kind, mut dims) = (if pixels.is_some() { 3 } else { 1 }, vec![count]);
        dims.extend(pixels.into_iter().flat_map(|(h, w)| [h, w]));
        let len = dims.iter().product::<u32>() as usize;
        let mut bytes = vec![0, 0, 8, kind];
        dims.iter().for_each(|d| bytes.extend(d.to_be_bytes()));
        bytes.resize(bytes.len() + len, element);
        bytes
    }

    /// A directory with five training and three test images.
    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes| fs::write(directory.path().join(name), bytes).unwrap();
        write(FILES[0], idx(5, Some((28, 28)), 200));
        write(FILES[1], idx(5, None, 7));
        write(FILES[2], idx(3, Some((28, 28)), 9));
        write(FILES[3], idx(3, None, 0));
        directory
    }

    fn error(directory: &tempfile::TempDir) -> String {
        load(directory.path()).expect_err("bad data").to_string()
    }

    #[test]
    fn the_digits_of_the_repository_are_read() {
        let (train, test) = load(&crate::options::digits()).expect("they are whole");
        assert_eq!((train.count(), test.count()), (8000, 2000));
        let mut counts = [0; CLASSES];
        for index in 0..train.len() {
            let item = train.get(index).unwrap();
            assert!(
                item.pixels.iter().any(|&p| p > 128),
                "image {index} is blank"
            );
            counts[usize::from(item.label)] += 1;
        }
        assert!(counts.iter().all(|&c| c > 600), "{counts:?}");
    }

    #[test]
    fn every_spelling_is_found() {
        let directory = directory();
        let at = |name: &str| directory.path().join(name);
        fs::rename(at(FILES[0]), at("train-images.idx3-ubyte")).unwrap();
        fs::rename(at(FILES[3]), at("t10k-labels.idx1-ubyte.gz")).unwrap();
        let (train, test) = load(directory.path()).expect("all there");
        assert_eq!((train.len(), test.len()), (5, 3));
        assert_eq!(train.get(4).unwrap().label, 7);
        assert_eq!(test.get(2).unwrap().pixels, [9; SIDE * SIDE]);
        assert_ne!(train.checksum(), test.checksum());
        assert_eq!(train.truncate(2).count(), 2);
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let text = load(Path::new("/no/such/place"))
            .expect_err("none")
            .to_string();
        assert!(text.contains("no directory /no/such/place"), "{text}");
        assert!(FILES.iter().all(|name| text.contains(name)), "{text}");
    }

    #[test]
    fn all_missing_files_are_named() {
        let directory = directory();
        fs::remove_file(directory.path().join(FILES[1])).unwrap();
        fs::remove_file(directory.path().join(FILES[2])).unwrap();
        let text = error(&directory);
        let expected = format!("has no {}, {}:", FILES[1], FILES[2]);
        assert!(text.contains(&expected), "{text}");
    }

    #[test]
    fn files_that_do_not_fit_each_other_are_named() {
        let directory = directory();
        fs::write(directory.path().join(FILES[1]), idx(4, None, 1)).unwrap();
        let text = error(&directory);
        assert!(text.contains("has 5 images"), "{text}");
        assert!(text.contains("has 4 labels"), "{text}");
    }

    #[test]
    fn images_of_another_size_are_refused() {
        let directory = directory();
        fs::write(directory.path().join(FILES[2]), idx(3, Some((32, 28)), 1)).unwrap();
        let text = error(&directory);
        assert!(
            text.contains("[32, 28] pixels instead of [28, 28]"),
            "{text}"
        );
    }

    #[test]
    fn a_label_out_of_range_is_refused() {
        let directory = directory();
        let mut labels = idx(5, None, 1);
        labels[8 + 3] = 10;
        fs::write(directory.path().join(FILES[1]), labels).unwrap();
        let text = error(&directory);
        assert!(text.contains("label 3 is 10"), "{text}");
        assert!(text.contains(FILES[1]), "{text}");
    }

    #[test]
    fn a_truncated_file_is_named() {
        let directory = directory();
        let path = directory.path().join(FILES[0]);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..1000]).unwrap();
        let text = error(&directory);
        assert!(text.contains(FILES[0]), "{text}");
        assert!(text.contains("ends after 1000 of 3936 bytes"), "{text}");
    }
}
