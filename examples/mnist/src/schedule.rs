//! The learning rate over a run.

use std::f64::consts::PI;

/// The part of the run over which the rate rises.
const WARM_UP: f64 = 0.1;

/// The learning rate after `progress`, from 0 to 1, of a run: it rises linearly
/// from 0 to `peak`, then falls to 0 along half a cosine (Loshchilov and Hutter
/// 2017, "SGDR: Stochastic gradient descent with warm restarts").
///
/// A function of the progress alone, so that a run resumed at another world size
/// or batch size goes on at the same rate.
pub(crate) fn learning_rate(peak: f64, progress: f64) -> f64 {
    if progress < WARM_UP {
        peak * progress / WARM_UP
    } else {
        let rest = ((progress - WARM_UP) / (1.0 - WARM_UP)).min(1.0);
        peak * (1.0 + (PI * rest).cos()) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_rises_and_falls() {
        assert_eq!(learning_rate(0.1, 0.0), 0.0);
        assert!((learning_rate(0.1, WARM_UP / 2.0) - 0.05).abs() < 1e-12);
        assert!((learning_rate(0.1, WARM_UP) - 0.1).abs() < 1e-12);
        assert!((learning_rate(0.1, (1.0 + WARM_UP) / 2.0) - 0.05).abs() < 1e-12);
        assert!(learning_rate(0.1, 1.0) < 1e-12);
    }

    proptest! {
        #[test]
        fn it_stays_within_bounds(peak in 1e-6f64..10.0, progress in 0.0f64..2.0) {
            let rate = learning_rate(peak, progress);
            prop_assert!((0.0..=peak * (1.0 + 1e-12)).contains(&rate), "{}", rate);
        }
    }
}
