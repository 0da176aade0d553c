//! What is wrong is said on every rank, and nobody is left hanging.

mod support;

use std::fs;
use std::process::Command;

use burn_ddp_tests::TestJob;
use support::{Place, assert_all_fail_with, binary, mnist};

#[test]
fn data_that_is_not_there_is_named() {
    let place = Place::new();
    let outputs = place.job(2).arg("--data-dir=/no/such/place").run();
    assert_all_fail_with(&outputs, "there is no directory /no/such/place");

    fs::remove_file(place.data().join("t10k-labels-idx1-ubyte")).expect("removable");
    let outputs = place.job(2).run();
    assert_all_fail_with(&outputs, "has no t10k-labels-idx1-ubyte");
}

#[test]
fn damaged_data_is_named() {
    let place = Place::new();
    let images = place.data().join("train-images-idx3-ubyte");
    let labels = place.data().join("train-labels-idx1-ubyte");
    let whole = fs::read(&images).expect("it was written");
    let cases: [(&[u8], &str); 3] = [
        (&whole[..whole.len() - 1], "is truncated"),
        (b"GIF89a", "is not an IDX file"),
        (&[&whole[..], b"x"].concat(), "goes on after"),
    ];
    for (bytes, message) in cases {
        fs::write(&images, bytes).expect("writable");
        let outputs = place.job(2).run();
        assert_all_fail_with(&outputs, message);
        assert_all_fail_with(&outputs, "train-images-idx3-ubyte");
    }
    fs::write(&images, &whole).expect("writable");
    fs::copy(place.data().join("t10k-labels-idx1-ubyte"), &labels).expect("writable");
    assert_all_fail_with(&place.job(2).run(), "has 60 labels");
}

#[test]
fn a_checkpoint_directory_that_can_not_be_written_is_named() {
    let place = Place::new();
    let outputs = place.job(2).arg("--checkpoint-dir=/proc/checkpoints").run();
    assert_all_fail_with(&outputs, "/proc/checkpoints");
    fs::write(place.checkpoints(), "a file").expect("writable");
    assert_all_fail_with(
        &place.job(2).run(),
        &place.checkpoints().display().to_string(),
    );
}

#[test]
fn a_full_disk_ends_the_run_with_the_checkpoint_named() {
    let place = Place::new();
    fs::create_dir(place.checkpoints()).expect("a new directory");
    // Each rank in a mount namespace of its own, in which the directory is small.
    let small_disk = r#"mount -t tmpfs -o size=128k tmpfs "$0" && exec "$@""#;
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["-rm", "sh", "-c", script])
            .arg(place.checkpoints());
        command
    };
    let permitted = unshare(small_disk).arg("true").output();
    if !permitted.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system does not let a test mount a small disk");
        return;
    }
    let outputs = TestJob::new("unshare", 2)
        .arg("-rm")
        .arg("sh")
        .arg("-c")
        .arg(small_disk)
        .arg(place.checkpoints())
        .arg(binary())
        .arg("--data-dir")
        .arg(place.data())
        .arg("--checkpoint-dir")
        .arg(place.checkpoints())
        .run();
    assert_all_fail_with(&outputs, "can't write the checkpoint");
    assert_all_fail_with(&outputs, "No space left on device");
}

#[test]
fn a_summary_that_can_not_be_written_fails_every_rank() {
    let place = Place::new();
    let outputs = place.job(2).arg("--json=/no/such/place/summary.json").run();
    assert_all_fail_with(&outputs, "can't write /no/such/place/summary.json");
}

#[test]
fn wrong_arguments_are_refused_before_the_ranks_meet() {
    // There is no one to meet.
    let alone = |arguments: &[&str]| {
        let output = Command::new(binary())
            .args(arguments)
            .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")])
            .envs([("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
            .envs([("MASTER_PORT", "1"), ("BURN_DDP_STORE", "launcher")])
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = alone(&["--epochs=0"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("--epochs") && said.contains("at least 1"),
        "{said}"
    );
    let (code, said) = alone(&["--no-such-flag"]);
    assert_eq!(code, Some(2), "{said}");
    let (code, said) = alone(&["--device=gpu"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("built without CUDA") && said.contains("--device cpu"),
        "{said}"
    );
}

#[test]
fn a_partial_environment_is_an_error() {
    let output = Command::new(binary())
        .env("RANK", "0")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("error: ") && said.contains("WORLD_SIZE"),
        "{said}"
    );
}

#[test]
fn more_ranks_than_images_still_train() {
    let place = Place::new();
    let outputs = mnist(3)
        .arg("--limit=2")
        .arg("--epochs=1")
        .arg("--data-dir")
        .arg(place.data())
        .arg("--checkpoint-dir")
        .arg(place.checkpoints())
        .succeed();
    assert!(outputs[0].stdout.contains("PASS"), "{outputs:#?}");
}
