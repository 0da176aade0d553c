use std::path::Path;

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use tempfile::TempDir;

use super::*;
use crate::Ddp;

fn device() -> Device {
    Device::flex().autodiff()
}

fn model(group: &ProcessGroup) -> Ddp<Linear> {
    Ddp::new(LinearConfig::new(3, 2).init(&device()), group).expect("one rank")
}

fn train(model: Ddp<Linear>, optim: &mut ModuleOptimizer, steps: usize) -> Ddp<Linear> {
    (0..steps).fold(model, |model, step| {
        let x = Tensor::<2>::full([4, 3], step as f32 + 1.0, &device());
        let loss = model.forward(|m| m.forward(x).powi_scalar(2).mean());
        let grads = model.backward(loss).expect("one rank");
        optim.step(1e-2, model, grads)
    })
}

fn weights(model: &Ddp<Linear>) -> Vec<f32> {
    let data = crate::replicate::read(model).expect("flex");
    data.into_iter()
        .flat_map(|d| d.try_into_vec::<f32>().expect("f32"))
        .collect()
}

/// A directory with checkpoints of steps 1 and 2, and the model after step 2.
fn two_checkpoints() -> (TempDir, ProcessGroup, Ddp<Linear>) {
    let dir = TempDir::new().expect("a temporary directory");
    let group = ProcessGroup::single();
    let mut optim = AdamConfig::new().init();
    let mut model = model(&group);
    let mut checkpoints = Checkpointer::new(dir.path(), &group).expect("writable");
    for step in 1..=2u64 {
        model = train(model, &mut optim, 3);
        checkpoints
            .save(step, &model, &optim, &step)
            .expect("writable");
    }
    let last = checkpoints.finish().expect("written").expect("rank 0");
    assert!(last.ends_with("checkpoint-000000000002"), "{last:?}");
    (dir, group, model)
}

fn load(dir: &Path, group: &ProcessGroup) -> Result<Restored<u64>> {
    Checkpointer::new(dir, group)?.load()
}

#[test]
fn training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() {
    let dir = TempDir::new().expect("a temporary directory");
    let group = ProcessGroup::single();
    let mut optim = AdamConfig::new().init();
    let trained = train(model(&group), &mut optim, 3);
    let mut checkpoints = Checkpointer::new(dir.path(), &group).expect("writable");
    checkpoints
        .save(3, &trained, &optim, &"state")
        .expect("writable");
    checkpoints.finish().expect("written");
    let expected = weights(&train(trained, &mut optim, 3));

    let restored = checkpoints.load::<String>().expect("whole");
    assert_eq!((restored.step, restored.state.as_str()), (3, "state"));
    let (resumed, mut optim) = restored
        .apply(model(&group), AdamConfig::new().init())
        .expect("the same module");
    assert_eq!(weights(&train(resumed, &mut optim, 3)), expected);
}

/// The last update of a running statistic is saved with it.
#[test]
fn running_statistics_are_saved_as_they_are() {
    use burn::nn::BatchNormConfig;

    let dir = TempDir::new().expect("a temporary directory");
    let group = ProcessGroup::single();
    let new = || Ddp::new(BatchNormConfig::new(2).init(&device()), &group).expect("one rank");
    let (model, optim) = (new(), AdamConfig::new().init());
    let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 8.0]], &device());
    let loss = model.forward(|m| m.forward(x).mean());
    // Saved without a backward pass too, which would bring it up to date.
    let mut checkpoints = Checkpointer::new(dir.path(), &group).expect("writable");
    checkpoints.save(1, &model, &optim, &()).expect("writable");
    let restored = checkpoints.load::<()>().expect("whole");
    let (loaded, _) = restored.apply(new(), optim).expect("the same module");
    let mean = |model: &Ddp<burn::nn::BatchNorm>| {
        let mean = model.clone().into_inner().running_mean.value_sync();
        mean.into_data().try_into_vec::<f32>().expect("f32")
    };
    assert_ne!(mean(&model), [0.0, 0.0]);
    assert_eq!(mean(&loaded), mean(&model));
    drop(loss);
}

#[test]
fn any_damage_is_named_and_the_checkpoint_before_is_taken() {
    let files = [MODEL, OPTIMIZER, STATE, manifest::MANIFEST];
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 4] = [
        ("truncated", |file| {
            let contents = fs::read(file).expect("readable");
            fs::write(file, &contents[..contents.len() / 2]).expect("writable");
        }),
        ("bit flipped", |file| {
            let mut contents = fs::read(file).expect("readable");
            // In the manifest the same byte is inside of a string or number.
            let middle = contents.len() / 2;
            contents[middle] ^= 0x80;
            fs::write(file, contents).expect("writable");
        }),
        ("emptied", |file| fs::write(file, []).expect("writable")),
        ("removed", |file| fs::remove_file(file).expect("writable")),
    ];
    let (dir, group, _) = two_checkpoints();
    let newest = dir.path().join(directory::name(2));
    for file in files {
        for (what, damage) in damages {
            let path = newest.join(file);
            let good = fs::read(&path).expect("readable");
            damage(&path);
            let restored = load(dir.path(), &group).expect("the one before is whole");
            assert_eq!(restored.step, 1, "{file} {what}");
            let [skipped] = restored.skipped.as_slice() else {
                panic!("{file} {what}: {:?}", restored.skipped);
            };
            assert!(skipped.contains("checkpoint-000000000002"), "{skipped}");
            assert!(skipped.contains(file), "{skipped}");
            fs::write(path, good).expect("writable");
        }
    }
    assert_eq!(load(dir.path(), &group).expect("repaired").step, 2);
}

#[test]
fn nothing_whole_is_an_error_that_names_everything() {
    let (dir, group, _) = two_checkpoints();
    for step in [1, 2] {
        fs::remove_file(dir.path().join(directory::name(step)).join(MODEL)).expect("writable");
    }
    let error = load(dir.path(), &group)
        .expect_err("both are damaged")
        .to_string();
    assert!(error.contains("checkpoint-000000000001"), "{error}");
    assert!(error.contains("checkpoint-000000000002"), "{error}");

    let empty = TempDir::new().expect("a temporary directory");
    let error = load(empty.path(), &group).expect_err("nothing there");
    assert!(error.to_string().contains("no checkpoint in"), "{error}");
}

#[test]
fn a_checkpoint_of_another_module_is_refused() {
    let (dir, group, _) = two_checkpoints();
    let other = Ddp::new(LinearConfig::new(5, 2).init(&device()), &group).expect("one rank");
    let error = load(dir.path(), &group)
        .expect("whole")
        .apply(other, AdamConfig::new().init())
        .map(drop)
        .expect_err("another shape");
    assert!(error.to_string().contains("shape mismatch"), "{error}");
}

#[test]
fn old_checkpoints_and_leftovers_go() {
    let (dir, group, model) = two_checkpoints();
    fs::create_dir(dir.path().join(".checkpoint-aside-1-9")).expect("writable");
    let mut checkpoints = Checkpointer::new(dir.path(), &group)
        .expect("writable")
        .keep(1);
    let optim = AdamConfig::new().init();
    checkpoints
        .save(2, &model, &optim, &9u64)
        .expect("writable");
    checkpoints.finish().expect("written");
    let names: Vec<_> = fs::read_dir(dir.path())
        .expect("readable")
        .map(|entry| entry.expect("readable").file_name())
        .collect();
    assert_eq!(names, [directory::name(2).as_str()]);
    let restored = load(dir.path(), &group).expect("whole");
    assert_eq!(restored.state, 9, "the same step was saved again");
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let dir = TempDir::new().expect("a temporary directory");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("writable");
    let error = Checkpointer::new(file.join("below"), &ProcessGroup::single())
        .expect_err("a file is no directory");
    assert_eq!(error.kind(), crate::ErrorKind::Environment);
    assert!(error.to_string().contains("file/below"), "{error}");
}

#[test]
fn a_failed_write_names_the_checkpoint() {
    let (_dir, group, model) = two_checkpoints();
    let gone = TempDir::new().expect("a temporary directory");
    let mut checkpoints = Checkpointer::new(gone.path(), &group).expect("writable");
    fs::remove_dir_all(gone.path()).expect("removable");
    let optim = AdamConfig::new().init();
    checkpoints.save(1, &model, &optim, &1u64).expect("started");
    let error = checkpoints.finish().expect_err("no directory");
    assert!(
        error.to_string().contains("checkpoint-000000000001"),
        "{error}"
    );
}
