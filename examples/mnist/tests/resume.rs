//! Goes on from checkpoints.

mod support;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Place, assert_all_fail_with};

/// Steps 4, 8, 10 (the epoch's end), 12, 16 and 20 are saved, and 3 are kept.
const EVERY: &str = "--checkpoint-every=4";

#[test]
fn a_run_resumed_within_an_epoch_ends_where_it_would_have() {
    for ranks in [1, 2] {
        let place = Place::new();
        let (_, whole) = place.summary(place.job(ranks).arg(EVERY));
        assert_eq!(
            place.list(),
            [
                "checkpoint-000000000012",
                "checkpoint-000000000016",
                "checkpoint-000000000020"
            ]
        );
        for name in &place.list()[1..] {
            fs::remove_dir_all(place.checkpoints().join(name)).expect("removable");
        }
        let (outputs, resumed) = place.summary(place.job(ranks).arg(EVERY).arg("--resume"));
        let said = &outputs[0].stderr;
        assert!(
            said.contains("checkpoint-000000000012: epoch 2, step 12"),
            "{said}"
        );
        assert!(!said.contains("won't end"), "{said}");
        assert_eq!(resumed["steps"], 8);
        for same in ["replica_fingerprints", "accuracy", "checkpoint"] {
            assert_eq!(resumed[same], whole[same], "{same}");
        }
        assert_ne!(whole["replica_fingerprints"][0], "");
    }
}

#[test]
fn a_finished_run_is_evaluated_and_can_be_prolonged() {
    let place = Place::new();
    let (_, whole) = place.summary(place.job(2));
    let (_, again) = place.summary(place.job(2).arg("--resume"));
    assert_eq!(again["steps"], 0);
    assert_eq!(again["replica_fingerprints"], whole["replica_fingerprints"]);
    assert_eq!(again["accuracy"], whole["accuracy"]);
    assert_eq!(again["checkpoint"], whole["checkpoint"]);

    let (outputs, longer) = place.summary(place.job(2).arg("--resume").arg("--epochs=3"));
    assert_eq!(
        (&longer["steps"], &longer["epochs"]),
        (&10.into(), &3.into())
    );
    let said = &outputs[0].stderr;
    assert!(said.contains("`--epochs` was 2 and is 3"), "{said}");
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    let place = Place::new();
    let (_, whole) = place.summary(place.job(2).arg(EVERY));
    place.damage("checkpoint-000000000020", "model.bpk");
    place.damage("checkpoint-000000000016", "state.json");
    let (outputs, resumed) = place.summary(place.job(2).arg("--resume"));
    let said = &outputs[0].stderr;
    for name in ["checkpoint-000000000020", "checkpoint-000000000016"] {
        let line = said
            .lines()
            .find(|line| line.contains(name) && line.contains("damaged"));
        assert!(line.is_some(), "{said}");
    }
    assert!(said.contains("resuming"), "{said}");
    assert_eq!(
        resumed["replica_fingerprints"],
        whole["replica_fingerprints"]
    );
}

#[test]
fn damaged_and_missing_checkpoints_are_errors_on_every_rank() {
    let place = Place::new();
    let outputs = place.job(2).arg("--resume").run();
    assert_all_fail_with(&outputs, "there is no checkpoint in");

    place.job(2).succeed();
    for name in place.list() {
        place.damage(&name, "optimizer.bpk");
    }
    let outputs = place.job(2).arg("--resume").run();
    assert_all_fail_with(&outputs, "is whole");
    assert_all_fail_with(&outputs, "checkpoint-000000000020");
}

#[test]
fn another_seed_or_other_images_are_refused() {
    let place = Place::new();
    place.job(2).succeed();
    let outputs = place.job(2).arg("--resume").arg("--seed=9").run();
    assert_all_fail_with(&outputs, "give `--seed 1`");
    let outputs = place.job(2).arg("--resume").arg("--limit=100").run();
    assert_all_fail_with(&outputs, "on other training images");
}

#[test]
fn a_new_run_does_not_touch_checkpoints_that_it_did_not_make() {
    let place = Place::new();
    place.job(1).succeed();
    let before = place.list();
    let outputs = place.job(2).run();
    assert_all_fail_with(&outputs, "already has checkpoints");
    assert_eq!(place.list(), before);
}

#[test]
fn a_run_goes_on_at_another_world_size() {
    let place = Place::new();
    place.job(2).arg(EVERY).succeed();
    for name in &place.list()[1..] {
        fs::remove_dir_all(place.checkpoints().join(name)).expect("removable");
    }
    let (outputs, summary) = place.summary(place.job(1).arg("--resume"));
    let said = &outputs[0].stderr;
    assert!(said.contains("the world size was 2 and is 1"), "{said}");
    assert_eq!(summary["test_images"], 60);
    assert!(summary["accuracy"].as_f64() > Some(0.9), "{summary:#}");
}

#[test]
fn a_killed_rank_ends_the_run_which_then_goes_on() {
    let place = Place::new();
    let job = || {
        place
            .job(2)
            .arg("--epochs=5000")
            .arg("--checkpoint-every=2")
    };
    let outputs = thread::scope(|scope| {
        let running = scope.spawn(|| job().run());
        let deadline = Instant::now() + Duration::from_secs(120);
        while place.list().is_empty() {
            assert!(
                Instant::now() < deadline && !running.is_finished(),
                "no checkpoint"
            );
            thread::sleep(Duration::from_millis(10));
        }
        let rank_1 = find(1, &place.data()).expect("it is running");
        kill_process(rank_1, Signal::KILL).expect("it is this test's");
        running.join().expect("it ends")
    });
    assert_eq!(outputs[1].status.code(), None, "{outputs:#?}");
    assert_all_fail_with(&outputs[..1], "rank 1");
    let (_, summary) = place.summary(place.job(2).arg("--resume"));
    assert_eq!(summary["replicas_equal"], true);
}

/// The process of `rank` among those that have `argument` on their command line.
fn find(rank: usize, argument: &Path) -> Option<Pid> {
    let wanted = format!("RANK={rank}");
    let entries = fs::read_dir("/proc").expect("Linux").flatten();
    entries
        .filter(|entry| {
            let has = |file: &str, word: &str| {
                let bytes = fs::read(entry.path().join(file)).unwrap_or_default();
                bytes
                    .split(|&byte| byte == 0)
                    .any(|part| part == word.as_bytes())
            };
            has("cmdline", &argument.to_string_lossy()) && has("environ", &wanted)
        })
        .find_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}
