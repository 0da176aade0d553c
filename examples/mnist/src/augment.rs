//! Shifted images: more variety from few images.

use burn::tensor::Tensor;

use crate::batch::BACKGROUND;
use crate::dataset::SIDE;

/// The largest shift, in pixels.
const REACH: usize = 1;

/// Shifts the images of a batch, `[batch, 1, SIDE, SIDE]`, by up to [`REACH`]
/// pixels in each direction, all by the same, which is a function of `seed`.
pub(crate) fn shift(images: Tensor<4>, seed: u64) -> Tensor<4> {
    let places = 2 * REACH as u64 + 1;
    let top = (seed % places) as usize;
    let left = (seed / places % places) as usize;
    let batch = images.dims()[0];
    images.pad((REACH, REACH, REACH, REACH), BACKGROUND).slice([
        0..batch,
        0..1,
        top..top + SIDE,
        left..left + SIDE,
    ])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_pixel_moves_and_background_follows() {
        let device = Device::flex();
        let at = |row: usize, column: usize| row * SIDE + column;
        let mut places = HashSet::new();
        for seed in 0..9 {
            let image = Tensor::<4>::full([1, 1, SIDE, SIDE], BACKGROUND, &device);
            let bright = Tensor::<4>::ones([1, 1, 1, 1], &device);
            let image = image.slice_assign([0..1, 0..1, 10..11, 5..6], bright);
            let shifted = shift(image, seed);
            assert_eq!(shifted.dims(), [1, 1, SIDE, SIDE]);
            let pixels = shifted.into_data().try_into_vec::<f32>().unwrap();
            let place = pixels
                .iter()
                .position(|&p| p == 1.0)
                .expect("it is still there");
            assert!([9, 10, 11].contains(&(place / SIDE)) && [4, 5, 6].contains(&(place % SIDE)));
            assert!((0..pixels.len()).all(|p| p == place || pixels[p] == BACKGROUND));
            places.insert(place);
        }
        assert_eq!(places.len(), 9);
        assert!(places.contains(&at(10, 5)));
    }
}
