//! Which gradients travel together: the assignment of parameters to buckets.
//!
//! A bucket is reduced by one all-reduce. Few large ones use the link well, and
//! small ones start early; the sizes are PyTorch DDP's (S. Li et al., *PyTorch
//! Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020).

use burn_ddp_comm::DType;

/// Sizes of the buckets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketSizes {
    /// Of the bucket that is filled first: small, so that communication starts
    /// as soon as the first layers of the backward pass are done.
    pub(crate) first: usize,
    /// Of every other one.
    pub(crate) others: usize,
}

/// A trainable parameter, as far as buckets are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gradient {
    /// Position in module traversal order.
    pub(crate) parameter: usize,
    /// Number of elements.
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

/// A gradient's place in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) parameter: usize,
    /// First element in the bucket.
    pub(crate) start: usize,
    /// Number of elements.
    pub(crate) len: usize,
}

/// The layout of one bucket: its gradients one after the other, then one flag
/// per gradient, 1 where the parameter took part in this rank's loss.
///
/// The flags are reduced with the gradients, so every rank learns which
/// parameters took part anywhere without another collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketLayout {
    pub(crate) dtype: DType,
    pub(crate) slots: Vec<Slot>,
    /// Number of elements of all gradients: where the flags start.
    pub(crate) flags_start: usize,
}

impl BucketLayout {
    fn new(dtype: DType) -> Self {
        Self {
            dtype,
            slots: Vec::new(),
            flags_start: 0,
        }
    }

    fn push(&mut self, gradient: Gradient) {
        self.slots.push(Slot {
            parameter: gradient.parameter,
            start: self.flags_start,
            len: gradient.len,
        });
        self.flags_start += gradient.len;
    }

    /// Number of elements, flags included.
    pub(crate) fn len(&self) -> usize {
        self.flags_start + self.slots.len()
    }

    /// Size in bytes, flags included.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// The buckets, in the order in which their all-reduces start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketPlan {
    pub(crate) buckets: Vec<BucketLayout>,
    /// For each parameter of the module: its bucket and slot, if it is trainable.
    places: Vec<Option<(usize, usize)>>,
}

impl BucketPlan {
    /// Fills buckets with `gradients` in the order in which they are expected.
    ///
    /// A bucket holds one dtype. It is closed when the next gradient of that
    /// dtype would overflow it; one larger than a bucket has one of its own.
    pub(crate) fn new(
        parameters: usize,
        gradients: impl IntoIterator<Item = Gradient>,
        sizes: BucketSizes,
    ) -> Self {
        let mut closed: Vec<BucketLayout> = Vec::new();
        // In order of their first gradient, so that what is left open at the end
        // starts in the order in which it began to fill.
        let mut open: Vec<BucketLayout> = Vec::new();
        for gradient in gradients {
            let limit = if closed.is_empty() {
                sizes.first
            } else {
                sizes.others
            };
            let bytes = gradient.len * gradient.dtype.size();
            if let Some(at) = open.iter().position(|b| b.dtype == gradient.dtype) {
                if open[at].bytes() + bytes <= limit {
                    open[at].push(gradient);
                    continue;
                }
                closed.push(open.remove(at));
            }
            let mut bucket = BucketLayout::new(gradient.dtype);
            bucket.push(gradient);
            open.push(bucket);
        }
        closed.append(&mut open);

        let mut places = vec![None; parameters];
        for (b, bucket) in closed.iter().enumerate() {
            for (s, slot) in bucket.slots.iter().enumerate() {
                places[slot.parameter] = Some((b, s));
            }
        }
        Self {
            buckets: closed,
            places,
        }
    }

    /// Bucket and slot of a parameter, `None` where it has no gradient.
    pub(crate) fn place(&self, parameter: usize) -> Option<(usize, usize)> {
        self.places.get(parameter).copied().flatten()
    }

    /// Every trainable parameter, in the order of the buckets.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> + '_ {
        self.buckets
            .iter()
            .flat_map(|bucket| bucket.slots.iter().map(|slot| slot.parameter))
    }

    /// Size of all buckets together, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.iter().map(BucketLayout::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gradient(parameter: usize, len: usize) -> Gradient {
        Gradient {
            parameter,
            len,
            dtype: DType::F32,
        }
    }

    const SIZES: BucketSizes = BucketSizes {
        first: 16,
        others: 48,
    };

    #[test]
    fn the_first_bucket_is_small_and_a_large_gradient_has_one_of_its_own() {
        let plan = BucketPlan::new(
            6,
            [
                gradient(5, 2),
                gradient(4, 2),
                gradient(3, 4),
                gradient(2, 4),
                gradient(1, 100),
                gradient(0, 1),
            ],
            SIZES,
        );
        let buckets: Vec<Vec<usize>> = plan
            .buckets
            .iter()
            .map(|b| b.slots.iter().map(|s| s.parameter).collect())
            .collect();
        assert_eq!(buckets, [vec![5], vec![4, 3, 2], vec![1], vec![0]]);
        assert_eq!(plan.buckets[1].flags_start, 10);
        assert_eq!(plan.buckets[1].len(), 13);
        assert_eq!(plan.place(3), Some((1, 1)));
    }

    #[test]
    fn dtypes_do_not_mix() {
        let mut half = gradient(1, 2);
        half.dtype = DType::F16;
        let plan = BucketPlan::new(3, [gradient(2, 1), half, gradient(0, 1)], SIZES);
        assert_eq!(plan.buckets.len(), 2);
        assert_eq!(plan.buckets[0].slots.len(), 2);
        assert_eq!(plan.buckets[1].dtype, DType::F16);
    }

    #[test]
    fn no_gradient_no_bucket() {
        let plan = BucketPlan::new(3, [], SIZES);
        assert!(plan.buckets.is_empty());
        assert_eq!(plan.place(2), None);
        assert_eq!(plan.bytes(), 0);
    }

    proptest! {
        #[test]
        fn every_gradient_has_one_place_of_its_size(
            lens in prop::collection::vec((0usize..40, prop::bool::ANY), 0..60),
            first in 1usize..200,
            others in 1usize..400,
        ) {
            let gradients: Vec<Gradient> = lens
                .iter()
                .enumerate()
                .map(|(parameter, &(len, half))| Gradient {
                    parameter,
                    len,
                    dtype: if half { DType::F16 } else { DType::F32 },
                })
                .rev()
                .collect();
            let plan = BucketPlan::new(
                lens.len(),
                gradients.iter().copied(),
                BucketSizes { first, others },
            );
            let mut order: Vec<usize> = plan.order().collect();
            order.sort_unstable();
            prop_assert_eq!(order, (0..lens.len()).collect::<Vec<_>>());
            for gradient in &gradients {
                let (b, s) = plan.place(gradient.parameter).expect("it has a gradient");
                prop_assert_eq!(plan.buckets[b].dtype, gradient.dtype);
                prop_assert_eq!(plan.buckets[b].slots[s].len, gradient.len);
            }
            for bucket in &plan.buckets {
                let mut next = 0;
                for slot in &bucket.slots {
                    prop_assert_eq!(slot.start, next);
                    next += slot.len;
                }
                prop_assert_eq!(bucket.flags_start, next);
                prop_assert!(bucket.slots.len() == 1 || bucket.bytes() <= first.max(others)
                    + bucket.slots.len() * bucket.dtype.size());
            }
        }
    }
}
