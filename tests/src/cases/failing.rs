//! Cases in which something goes wrong, on one rank or on all.

use std::path::PathBuf;
use std::time::Duration;

use burn::module::Module;
use burn::optim::AdamConfig;
use burn::tensor::Device;
use burn_ddp::{Checkpointer, Ddp, ErrorKind, ProcessGroup};

use super::compare::values;
use super::models::{Mlp, rows};
use super::{config, fail, wrap};

fn wrapped(group: &ProcessGroup, device: &Device) -> Ddp<Mlp> {
    wrap(Mlp::new(16, device), group)
}

/// A backward pass around the wrapper is refused at once.
pub(super) fn bypass(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    let loss = model.forward(|m| m.loss(rows(0, 4, device)));
    let _ = loss.backward();
    unreachable!("its gradients would be this rank's own");
}

/// A forward pass serves one backward pass.
pub(super) fn spent_pass(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    let first = model.forward(|m| m.loss(rows(0, 4, device)));
    let second = model.forward(|m| m.loss(rows(4, 8, device)));
    model.backward(first).expect("the first one");
    let _ = model.backward(second);
    unreachable!("its gradients were not hooked for this pass");
}

/// Every rank says which parameter differs, and where.
pub(super) fn different_models(group: &ProcessGroup, device: &Device) {
    let width = if group.rank() == 1 { 17 } else { 16 };
    match config().init(Mlp::new(width, device), group) {
        Ok(_) => unreachable!("rank 1's module is wider"),
        Err(error) => fail(&error),
    }
}

/// Replicas that drifted apart are found.
pub(super) fn drifted(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    model.verify_replicas().expect("equal replicas");
    let model = if group.rank() == 1 {
        let record = Mlp::new(16, device).into_record();
        model.load_record(record)
    } else {
        model
    };
    match model.verify_replicas() {
        Ok(_) => unreachable!("rank 1 has other values"),
        Err(error) => fail(&error),
    }
}

/// Micro-batches are counted.
pub(super) fn missing_micro_batch(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    assert_eq!(
        model.accumulate(0).expect_err("nothing").kind(),
        ErrorKind::Usage
    );
    let mut step = model.accumulate(2).expect("healthy group");
    for start in [0, 4] {
        let loss = step.forward(|m| m.loss(rows(start, start + 4, device)));
        step.backward(loss).expect("healthy group");
    }
    let loss = rows(0, 1, device).require_grad().mean();
    let error = step.backward(loss).expect_err("a third one");
    assert!(error.to_string().contains("all 2 micro-batches"), "{error}");
    step.finish().expect("both are in");

    let mut step = model.accumulate(2).expect("healthy group");
    let loss = step.forward(|m| m.loss(rows(0, 4, device)));
    step.backward(loss).expect("healthy group");
    let error = step.finish().expect_err("one is missing");
    assert!(error.to_string().contains("1 of the step's 2"), "{error}");
}

/// A parameter that was frozen when the module was wrapped is named.
pub(super) fn changed_module(group: &ProcessGroup, device: &Device) {
    let model = wrap(Mlp::new(16, device).freeze(), group);
    let model = model.unfreeze();
    let loss = model.forward(|m| m.loss(rows(0, 4, device)));
    let error = model.backward(loss).expect_err("it was frozen");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("was frozen"), "{error}");
    let again = model
        .backward(rows(0, 1, device).require_grad().mean())
        .expect_err("the first error stays");
    assert_eq!(again.to_string(), error.to_string());
}

/// Rank 1 is killed between two steps.
pub(super) fn killed(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    for step in 0.. {
        if step == 3 && group.rank() == 1 {
            println!("killing {}", std::process::id());
            kill_self();
        }
        let loss = model.forward(|m| m.loss(rows(0, 4, device)));
        if let Err(error) = model.backward(loss) {
            assert_eq!(error.kind(), ErrorKind::Peer);
            fail(&error);
        }
    }
}

fn kill_self() -> ! {
    let killed = std::process::Command::new("kill")
        .args(["-9", &std::process::id().to_string()])
        .status();
    std::thread::sleep(Duration::from_secs(5));
    unreachable!("kill -9: {killed:?}");
}

/// Rank 1 panics while the others are in a backward pass.
pub(super) fn panic(group: &ProcessGroup, device: &Device) {
    let model = wrapped(group, device);
    let loss = model.forward(|m| m.loss(rows(0, 4, device)));
    if group.rank() == 1 {
        panic!("the disk of rank 1 is on fire");
    }
    match model.backward(loss) {
        Ok(_) => unreachable!("rank 1 is gone"),
        Err(error) => fail(&error),
    }
}

/// A run that is resumed ends where an uninterrupted one ends; the directory is
/// only rank 0's.
pub(super) fn checkpoint(group: &ProcessGroup, device: &Device) {
    let directory = PathBuf::from(std::env::args().nth(2).expect("a directory"));
    // A path that only rank 0 can reach stands for a disk that is not shared.
    let directory = match group.is_main() {
        true => directory,
        false => PathBuf::from("/proc/no-such-directory"),
    };
    let train = |mut model: Ddp<Mlp>, optim: &mut burn::optim::ModuleOptimizer, steps| {
        for step in steps {
            let start = 8 * step + 4 * group.rank();
            let loss = model.forward(|m| m.loss(rows(start, start + 4, device)));
            let grads = model.backward(loss).expect("healthy group");
            model = optim.step(1e-3, model, grads);
        }
        model
    };
    let mut optim = AdamConfig::new().init();
    let model = train(wrapped(group, device), &mut optim, 0..4);
    let mut checkpoints = Checkpointer::new(&directory, group).unwrap_or_else(|e| fail(&e));
    checkpoints
        .save(4, &model, &optim, &4usize)
        .expect("started");
    checkpoints.finish().expect("written");
    group.barrier().expect("healthy group");
    let expected = values(&train(model, &mut optim, 4..8));

    let restored = checkpoints.load::<usize>().unwrap_or_else(|e| fail(&e));
    assert_eq!(restored.world_size, group.world_size());
    let (model, mut optim) = restored
        .apply(wrapped(group, device), AdamConfig::new().init())
        .expect("the same module");
    let resumed = train(model, &mut optim, restored.state..8);
    assert_eq!(values(&resumed), expected, "bit for bit");
    resumed.verify_replicas().expect("equal replicas");
}
