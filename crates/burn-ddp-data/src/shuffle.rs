//! A seeded shuffle in constant memory.

/// A permutation of `0..len` of which any position is known in constant time
/// and memory.
///
/// A generalised Feistel cipher with modular addition on `Z_a × Z_b`, `a·b` just
/// above `len`, and cycle walking for the few values beyond it: J. Black and
/// P. Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002, methods 2
/// and 3. The rounds' functions are MurmurHash3's 64-bit finaliser. It is a
/// shuffle, not a secret: the seed can be found from its output.
///
/// The permutation depends on `len`, `seed` and `epoch` alone, and stays the same
/// in every version of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shuffle {
    len: u64,
    rows: u64,
    columns: u64,
    keys: [u64; ROUNDS],
}

/// Large sets need a few rounds only. In sets of five to ten items, eight rounds
/// make some orders twice as likely as others and sixteen a quarter more; with 32,
/// no difference is found (see the tests), and a position costs a microsecond at
/// most.
const ROUNDS: usize = 32;

impl Shuffle {
    /// The permutation of `0..len` for `seed` in `epoch`.
    pub fn new(len: usize, seed: u64, epoch: u64) -> Self {
        let len = len as u64;
        // At least 2 × 2: with a single row, the rounds can only rotate the columns.
        let rows = len.isqrt().max(2);
        // Seed and epoch are mixed one after the other, so that (1, 2) and (2, 1)
        // have nothing in common.
        let mut state = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
        state = mix(state ^ epoch.wrapping_mul(0xd1b5_4a32_d192_ed03));
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        });
        Self {
            len,
            rows,
            columns: len.div_ceil(rows).max(2),
            keys,
        }
    }

    /// The value at `position`.
    ///
    /// # Panics
    ///
    /// When `position` is not below the length.
    pub fn get(&self, position: usize) -> usize {
        assert!(
            (position as u64) < self.len,
            "position {position} of a shuffle of {}",
            self.len
        );
        let mut value = position as u64;
        // The cipher permutes 0..rows·columns. From a value below `len`, following
        // it must come back below `len`, at the latest where it started.
        loop {
            value = self.encipher(value);
            if value < self.len {
                return value as usize;
            }
        }
    }

    fn encipher(&self, value: u64) -> u64 {
        let (mut row, mut column) = (value / self.columns, value % self.columns);
        for (round, key) in self.keys.iter().enumerate() {
            if round % 2 == 0 {
                row = add(row, mix(key ^ column), self.rows);
            } else {
                column = add(column, mix(key ^ row), self.columns);
            }
        }
        row * self.columns + column
    }
}

/// `(a + b) mod modulus` for `a` below the modulus, without overflow.
fn add(a: u64, b: u64, modulus: u64) -> u64 {
    // A data set has far less than 2⁶³ items.
    (a + b % modulus) % modulus
}

/// MurmurHash3's 64-bit finaliser (A. Appleby).
fn mix(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
        let shuffle = Shuffle::new(len, seed, epoch);
        (0..len).map(|position| shuffle.get(position)).collect()
    }

    /// Pearson's χ² of `counts`, each expected to be `expected`, has mean `freedom`
    /// and variance `2·freedom`: six deviations, and some for the long tail at low
    /// degrees of freedom.
    fn assert_chi2(counts: &[u32], expected: f64, freedom: f64) {
        let chi2: f64 = counts
            .iter()
            .map(|&n| (f64::from(n) - expected).powi(2) / expected)
            .sum();
        let limit = freedom + 6.0 * (2.0 * freedom).sqrt() + 6.0;
        assert!(chi2 < limit, "χ² {chi2} above {limit}: {counts:?}");
    }

    #[test]
    fn it_is_the_same_on_every_machine_and_in_every_version() {
        assert_eq!(all(10, 0, 0), GOLDEN_10);
        let large = Shuffle::new(60_000, 42, 3);
        let some: Vec<usize> = (0..5).map(|i| large.get(i * 14_999)).collect();
        assert_eq!(some, GOLDEN_60_000);
    }
    const GOLDEN_10: [usize; 10] = [6, 8, 7, 4, 0, 2, 1, 9, 3, 5];
    const GOLDEN_60_000: [usize; 5] = [22595, 16915, 30064, 53772, 15208];

    /// Every item comes to every position about equally often, also in the
    /// smallest sets: Pearson's χ² stays in its range.
    #[test]
    fn positions_are_uniform() {
        for len in [2usize, 3, 5, 7, 10, 16, 31] {
            let trials = 4_000u64;
            let mut counts = vec![vec![0u32; len]; len];
            for epoch in 0..trials {
                for (position, value) in all(len, 7, epoch).into_iter().enumerate() {
                    counts[position][value] += 1;
                }
            }
            let expected = trials as f64 / len as f64;
            for row in &counts {
                assert_chi2(row, expected, (len - 1) as f64);
            }
        }
    }

    /// All orders of few items occur about equally often, which fewer rounds do
    /// not achieve.
    #[test]
    fn orders_of_few_items_are_uniform() {
        for (len, orders) in [
            (2usize, 2.0f64),
            (3, 6.0),
            (4, 24.0),
            (5, 120.0),
            (6, 720.0),
        ] {
            let trials = 500 * orders as u64;
            let mut counts = std::collections::HashMap::new();
            for epoch in 0..trials {
                *counts.entry(all(len, 1, epoch)).or_insert(0u32) += 1;
            }
            assert_eq!(counts.len() as f64, orders, "every order occurs");
            let expected = trials as f64 / orders;
            for (order, &n) in &counts {
                let off = (f64::from(n) - expected).abs() / expected.sqrt();
                assert!(off < 6.0, "{order:?}: {n} instead of {expected}");
            }
            let counts: Vec<u32> = counts.into_values().collect();
            assert_chi2(&counts, expected, orders - 1.0);
        }
    }

    /// Which item comes first says nothing about which comes second.
    #[test]
    fn neighbouring_positions_are_independent() {
        for len in [8usize, 12, 25] {
            let trials = 60_000u64;
            let mut counts = vec![0u32; len * len];
            for epoch in 0..trials {
                let shuffle = Shuffle::new(len, 3, epoch);
                counts[shuffle.get(0) * len + shuffle.get(1)] += 1;
            }
            let pairs = (len * (len - 1)) as f64;
            let cells = counts.into_iter().enumerate();
            let cells: Vec<u32> = cells
                .filter(|(cell, _)| cell / len != cell % len)
                .map(|(_, n)| n)
                .collect();
            assert_chi2(&cells, trials as f64 / pairs, pairs - 1.0);
        }
    }

    /// Two random orders agree in one position on average, however long they are.
    #[test]
    fn epochs_and_seeds_are_independent() {
        let (len, trials) = (100, 1_000);
        let agreements = |other: fn(u64) -> Shuffle| -> usize {
            let at = |trial| {
                let (a, b) = (Shuffle::new(100, 5, trial), other(trial));
                (0..len).filter(|&p| a.get(p) == b.get(p)).count()
            };
            (0..trials).map(at).sum()
        };
        // Mean and variance are the number of trials: six deviations of 31.6.
        let epochs = agreements(|trial| Shuffle::new(100, 5, trial + 1));
        assert!(epochs.abs_diff(1_000) < 190, "{epochs}");
        let seeds = agreements(|trial| Shuffle::new(100, 6, trial));
        assert!(seeds.abs_diff(1_000) < 190, "{seeds}");
    }

    #[test]
    fn neighbours_part() {
        let shuffled = all(10_000, 3, 1);
        let near = shuffled.windows(2).filter(|w| w[0].abs_diff(w[1]) <= 10);
        // 20 of 10,000 values are that near: 20 pairs of 10,000 on average.
        assert!(near.count() < 60);
    }

    proptest! {
        #[test]
        fn it_is_a_permutation(len in 0usize..3_000, seed: u64, epoch: u64) {
            let mut values = all(len, seed, epoch);
            values.sort_unstable();
            prop_assert!(values.into_iter().eq(0..len));
        }

        #[test]
        fn epochs_and_seeds_differ(len in 50usize..500, seed: u64, epoch in 0u64..1_000_000) {
            prop_assert_ne!(all(len, seed, epoch), all(len, seed, epoch + 1));
            prop_assert_ne!(all(len, seed, epoch), all(len, seed.wrapping_add(1), epoch));
        }

        #[test]
        fn huge_sets_cost_nothing(len in 1usize..=1 << 60, position: u64, seed: u64) {
            let shuffle = Shuffle::new(len, seed, 0);
            prop_assert!(shuffle.get((position % len as u64) as usize) < len);
        }
    }
}
