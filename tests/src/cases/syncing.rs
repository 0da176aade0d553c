//! Cases in which ranks synchronise, against plain Burn on the union of their
//! batches.

use burn::module::{Lora, Module};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_ddp::{ProcessGroup, Reduction};

use super::compare::{assert_close, gradients, values};
use super::models::{Branches, Cnn, Mlp, rows};
use super::{config, overlaps, wrap};

const BATCH: usize = 6;
/// Sums in another order: a few units in the last place.
const TOLERANCE: f32 = 1e-5;

/// This rank's rows of global batch `step`.
fn shard(step: usize, group: &ProcessGroup, device: &Device) -> Tensor<2> {
    let start = (step * group.world_size() + group.rank()) * BATCH;
    rows(start, start + BATCH, device)
}

/// The whole of global batch `step`.
fn union(step: usize, group: &ProcessGroup, device: &Device) -> Tensor<2> {
    let size = group.world_size() * BATCH;
    rows(step * size, (step + 1) * size, device)
}

fn plain_gradients<M: Module>(module: &M, loss: Tensor<1>) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), module)
}

/// Every rank's gradients are those of one process on all the data, whatever the
/// size of the buckets, in the first step and after the buckets were rebuilt.
pub(super) fn parity(group: &ProcessGroup, device: &Device) {
    for bucket_bytes in [1, 200, 25 << 20] {
        let config = config()
            .with_first_bucket_bytes(bucket_bytes)
            .with_bucket_bytes(bucket_bytes);
        let model = config
            .init(Mlp::new(32, device), group)
            .expect("same module");
        let baseline = model.clone().into_inner();
        for step in 0..3 {
            let loss = model.forward(|m| m.loss(shard(step, group, device)));
            let grads = model.backward(loss).expect("healthy group");
            let expected = plain_gradients(&baseline, baseline.loss(union(step, group, device)));
            assert_close(
                &gradients(&model, &grads),
                &gradients(&baseline, &expected),
                TOLERANCE,
            );
        }
    }
}

/// Twenty steps of Adam end where one process on all the data ends.
pub(super) fn trajectory(group: &ProcessGroup, device: &Device) {
    let mut model = wrap(Mlp::new(32, device), group);
    let mut baseline = model.clone().into_inner();
    let mut optim = AdamConfig::new().init();
    let mut plain = AdamConfig::new().init();
    for step in 0..20 {
        let loss = model.forward(|m| m.loss(shard(step, group, device)));
        let grads = model.backward(loss).expect("healthy group");
        model = optim.step(1e-3, model, grads);
        let expected = plain_gradients(&baseline, baseline.loss(union(step, group, device)));
        baseline = plain.step(1e-3, baseline, expected);
    }
    // Adam divides by the gradient's magnitude, which widens the differences.
    assert_close(&values(&model), &values(&baseline), 1e-3);
    model.verify_replicas().expect("equal replicas");
}

/// Micro-batches give the gradient of the batch they make up.
pub(super) fn accumulation(group: &ProcessGroup, device: &Device) {
    let model = wrap(Mlp::new(16, device), group);
    let baseline = model.clone().into_inner();
    for (round, micro_batches) in [1usize, 2, 5].into_iter().enumerate() {
        let steps = round * 10..round * 10 + micro_batches;
        let mut step = model.accumulate(micro_batches).expect("healthy group");
        for micro_batch in steps.clone() {
            let loss = step.forward(|m| m.loss(shard(micro_batch, group, device)));
            step.backward(loss).expect("healthy group");
        }
        let grads = step.finish().expect("healthy group");
        let size = group.world_size() * BATCH;
        let all = rows(steps.start * size, steps.end * size, device);
        let expected = plain_gradients(&baseline, baseline.loss(all));
        assert_close(
            &gradients(&model, &grads),
            &gradients(&baseline, &expected),
            TOLERANCE,
        );
        // A step that is dropped half-way leaves nothing behind.
        let mut dropped = model.accumulate(2).expect("healthy group");
        let loss = dropped.forward(|m| m.loss(shard(99, group, device)));
        dropped.backward(loss).expect("healthy group");
        drop(dropped);
    }
}

/// Parameters without a gradient contribute zero, and are named.
pub(super) fn unused(group: &ProcessGroup, device: &Device) {
    let mut model = wrap(Branches::new(device), group);
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        // On another rank in every step.
        let mine = group.rank() == step % group.world_size();
        let baseline = model.clone().into_inner();
        let loss = model.forward(|m| m.loss(shard(step, group, device), mine));
        let grads = model.backward(loss).expect("healthy group");

        let total = (0..group.world_size())
            .map(|rank| {
                let start = (step * group.world_size() + rank) * BATCH;
                let used = rank == step % group.world_size();
                baseline.loss(rows(start, start + BATCH, device), used)
            })
            .reduce(|a, b| a + b)
            .expect("at least one rank");
        let loss = total.div_scalar(group.world_size() as f32);
        let expected = plain_gradients(&baseline, loss);
        assert_close(
            &gradients(&model, &grads),
            &gradients(&baseline, &expected),
            TOLERANCE,
        );

        let unused = model.unused_parameters();
        assert_eq!(unused.on_every_rank, ["never.weight", "never.bias"]);
        let mut here = vec!["never.weight", "never.bias"];
        if !mine {
            here.splice(0..0, ["sometimes.weight", "sometimes.bias"]);
        }
        assert_eq!(unused.on_this_rank, here);
        model = optim.step(1e-2, model, grads);
        model.verify_replicas().expect("equal replicas");
    }
}

/// A loss from the inner module is synchronised too.
pub(super) fn inner_forward(group: &ProcessGroup, device: &Device) {
    let model = wrap(Mlp::new(16, device), group);
    let inner = model.clone().into_inner();
    for step in 0..2 {
        let grads = model
            .backward(inner.loss(shard(step, group, device)))
            .expect("healthy group");
        let expected = plain_gradients(&inner, inner.loss(union(step, group, device)));
        assert_close(
            &gradients(&model, &grads),
            &gradients(&inner, &expected),
            TOLERANCE,
        );
    }
}

/// Two forward passes may share one backward pass, and one may be for nothing.
pub(super) fn two_forwards(group: &ProcessGroup, device: &Device) {
    let model = wrap(Mlp::new(16, device), group);
    let baseline = model.clone().into_inner();
    let _ = model.forward(|m| m.loss(shard(7, group, device)));
    let first = model.forward(|m| m.loss(shard(0, group, device)));
    let second = model.forward(|m| m.loss(shard(1, group, device)));
    let grads = model.backward(first + second).expect("healthy group");
    let loss = baseline.loss(union(0, group, device)) + baseline.loss(union(1, group, device));
    let expected = plain_gradients(&baseline, loss);
    assert_close(
        &gradients(&model, &grads),
        &gradients(&baseline, &expected),
        TOLERANCE,
    );
}

/// Replicas start equal and stay equal, whatever each rank made.
pub(super) fn replicas(group: &ProcessGroup, device: &Device) {
    device.seed(group.rank() as u64);
    let own = Mlp::new(16, device);
    let before = values(&own);
    let mut model = wrap(own, group);
    let changed = values(&model) != before;
    assert_eq!(changed, !group.is_main(), "rank 0's values are everybody's");
    let fingerprint = model.verify_replicas().expect("equal replicas");

    let ids = burn::module::list_param_ids(&model);
    let ids: Vec<u64> = ids.iter().map(|id| id.val()).collect();
    let all = group.all_gather_object(&ids).expect("healthy group");
    assert!(all.iter().all(|other| *other == ids), "ids are everybody's");

    let mut optim = AdamConfig::new().init();
    for step in 0..5 {
        let loss = model.forward(|m| m.loss(shard(step, group, device)));
        let grads = model.backward(loss).expect("healthy group");
        model = optim.step(1e-3, model, grads);
    }
    let after = model.verify_replicas().expect("equal replicas");
    assert_ne!(after, fingerprint);

    // The record is the inner module's.
    let loaded = Mlp::new(16, device).load_record(model.clone().into_record());
    assert_eq!(values(&loaded), values(&model));
}

/// Running statistics follow rank 0.
pub(super) fn batch_norm(group: &ProcessGroup, device: &Device) {
    let mut model = wrap(Cnn::new(device), group);
    let mut optim = SgdConfig::new().init();
    let start = model.verify_replicas().expect("equal replicas");
    for step in 0..4 {
        let images = rows(0, 9, device).reshape([2, 1, 6, 6]);
        let images = images * (step * group.world_size() + group.rank() + 1) as f32;
        let loss = model.forward(|m| m.loss(images));
        let grads = model.backward(loss).expect("healthy group");
        model = optim.step(1e-2, model, grads);
        model.verify_replicas().expect("equal replicas");
    }
    let mean = model.clone().into_inner().norm.running_mean.value_sync();
    let mean = mean.into_data().try_into_vec::<f32>().expect("f32");
    assert!(mean.iter().any(|x| *x != 0.0), "it has been updated");
    let _ = model.valid();
    assert_ne!(model.verify_replicas().expect("equal replicas"), start);
}

/// Buckets start while the backward pass goes on, in the order in which
/// gradients become ready.
pub(super) fn overlap(group: &ProcessGroup, device: &Device) {
    let config = config().with_first_bucket_bytes(1).with_bucket_bytes(1);
    let model = config
        .init(Mlp::new(32, device), group)
        .expect("same module");
    let traversal = ["first", "second", "third"]
        .iter()
        .flat_map(|l| [format!("{l}.weight"), format!("{l}.bias")]);
    let mut reversed: Vec<String> = traversal.collect();
    reversed.reverse();
    assert_eq!(model.bucket_order(), reversed);
    for step in 0..3 {
        let loss = model.forward(|m| m.loss(shard(step, group, device)));
        model.backward(loss).expect("healthy group");
        let stats = model.sync_stats();
        assert_eq!(stats.buckets, 6);
        if overlaps() {
            assert_eq!(stats.overlapped, 6, "all full before the pass ended");
        }
        assert!(stats.wait <= stats.backward);
    }
    let order = model.bucket_order();
    assert!(order[0].starts_with("third"), "{order:?}");
    assert!(order[5].starts_with("first"), "{order:?}");
    let all = group.all_gather_object(&order).expect("healthy group");
    assert!(all.iter().all(|other| *other == order));
}

/// Gradients can be summed instead.
pub(super) fn sum(group: &ProcessGroup, device: &Device) {
    let config = config().with_reduction(Reduction::Sum);
    let model = config
        .init(Mlp::new(16, device), group)
        .expect("same module");
    let baseline = model.clone().into_inner();
    let loss = model.forward(|m| m.loss(shard(0, group, device)));
    let grads = model.backward(loss).expect("healthy group");
    let loss = baseline.loss(union(0, group, device));
    let expected = plain_gradients(&baseline, loss.mul_scalar(group.world_size() as f32));
    assert_close(
        &gradients(&model, &grads),
        &gradients(&baseline, &expected),
        TOLERANCE,
    );
}

/// Half-precision parameters keep their dtype, beside single-precision ones.
pub(super) fn half(group: &ProcessGroup, device: &Device) {
    use burn::module::Param;

    #[derive(Module, Debug)]
    struct Mixed {
        half: Param<Tensor<1>>,
        single: Param<Tensor<1>>,
    }
    let half = Tensor::<1>::from_data([1.0f32, 2.0], (device, DType::F16));
    let module = Mixed {
        half: Param::from_tensor(half),
        single: Param::from_tensor(Tensor::from_floats([3.0, 4.0], device)),
    };
    let model = wrap(module, group);
    let factor = (group.rank() + 1) as f32;
    let loss = model.forward(|m| {
        let half = m.half.val().mul_scalar(factor).sum();
        half.cast(DType::F32) + m.single.val().mul_scalar(factor).sum()
    });
    let grads = model.backward(loss).expect("healthy group");
    let inner = model.into_inner();
    let expected = (group.world_size() + 1) as f32 / 2.0;
    let half = grads.get::<1>(inner.half.id).expect("a gradient");
    assert_eq!(half.dtype(), DType::F16);
    let single = grads.get::<1>(inner.single.id).expect("a gradient");
    assert_eq!(single.dtype(), DType::F32);
    for grad in [half, single] {
        let values = grad
            .into_data_as::<f32>()
            .try_into_vec::<f32>()
            .expect("f32");
        assert_eq!(values, [expected; 2]);
    }
}

/// A module in validation is only called, and trains on afterwards.
pub(super) fn validation(group: &ProcessGroup, device: &Device) {
    let model = wrap(Mlp::new(16, device), group);
    let valid = model.valid();
    let plain = device.clone().without_autodiff();
    // Not collective: rank 0 alone may evaluate.
    if group.is_main() {
        let loss = valid.forward(|m| m.loss(rows(0, 4, &plain)));
        assert!(!loss.is_require_grad());
    }
    let trained = valid.train();
    let loss = trained.forward(|m| m.loss(shard(0, group, device)));
    let grads = trained.backward(loss).expect("healthy group");
    assert_eq!(grads.len(), 6);
}

/// Adapters stay adapters: they are trained, and the weights under them are not.
pub(super) fn lora(group: &ProcessGroup, device: &Device) {
    let adapted = Mlp::new(16, device).apply_lora(Lora::new(2, 4.0));
    let tensors = values(&adapted).len();
    let mut model = wrap(adapted, group);
    assert_eq!(values(&model).len(), tensors, "none was merged");
    let mut optim = SgdConfig::new().init();
    for step in 0..3 {
        let baseline = model.clone().into_inner();
        let loss = model.forward(|m| m.loss(shard(step, group, device)));
        let grads = model.backward(loss).expect("healthy group");
        let expected = plain_gradients(&baseline, baseline.loss(union(step, group, device)));
        assert!(!expected.is_empty());
        assert_close(
            &gradients(&model, &grads),
            &gradients(&baseline, &expected),
            TOLERANCE,
        );
        model = optim.step(1e-1, model, grads);
    }
    model.verify_replicas().expect("equal replicas");
}
