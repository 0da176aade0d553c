//! What a group takes of the system, and that it gives it back.

mod ranks;

use std::time::Duration;

use burn_ddp_comm::{ProcessGroup, ReduceOp};
use ranks::{Rank, Spec, job};

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Names of our own in the system's shared memory directory.
fn shared_memory_names() -> Vec<String> {
    std::fs::read_dir("/dev/shm")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("burn"))
        .collect()
}

/// Mappings of this process's and its peers' segments.
fn mapped_segments() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.matches("memfd:burn-ddp").count()
}

#[test]
fn a_dropped_group_leaves_nothing_behind() {
    for tcp in [false, true] {
        let main = |rank: &Rank| {
            let before = (open_files(), threads());
            let group = rank.group();
            let work = group.all_reduce_async::<f32, _>(vec![1.0; 100_000], ReduceOp::Sum);
            assert_eq!(work.wait().unwrap()[99_999], 3.0);
            assert_eq!(shared_memory_names(), [""; 0]);
            assert_eq!(mapped_segments() > 0, !tcp);
            // Segments are mapped; their files are closed.
            if !tcp {
                let files = std::fs::read_dir("/proc/self/fd").unwrap();
                for file in files.flatten() {
                    let target = std::fs::read_link(file.path()).unwrap_or_default();
                    assert!(!target.to_string_lossy().contains("memfd"), "{target:?}");
                }
            }
            group.barrier().unwrap();
            drop(group);
            assert_eq!((open_files(), threads()), before);
            assert_eq!(mapped_segments(), 0);
        };
        let name = "a_dropped_group_leaves_nothing_behind";
        job(name, Spec::new(3, tcp), main, |job| {
            job.results::<()>();
            assert_eq!(shared_memory_names(), [""; 0]);
        });
    }
}

#[test]
fn a_killed_job_leaves_nothing_behind() {
    let main = |rank: &Rank| {
        let group = rank.group();
        rank.reach("ready");
        let mut data = vec![1.0_f32; 1_000_000];
        loop {
            group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
        }
    };
    let name = "a_killed_job_leaves_nothing_behind";
    job::<()>(name, Spec::new(2, false), main, |job| {
        for rank in 0..2 {
            job.await_point(rank, "ready");
        }
        for rank in 0..2 {
            job.kill(rank);
        }
        assert_eq!(shared_memory_names(), [""; 0]);
    });
}

/// One group after another in one process, as a program's tests do.
#[test]
fn groups_can_be_set_up_one_after_another() {
    let main = |rank: &Rank| {
        let mut times = Vec::new();
        for i in 0..5 {
            let group = rank.group();
            let mut data = [rank.rank + i; 2].map(|n| n as i32);
            group.all_reduce(&mut data, ReduceOp::Max).unwrap();
            assert_eq!(data, [1 + i as i32; 2]);
            times.push(group.setup_time());
            group.barrier().unwrap();
            drop(group);
            // The store takes the next group's ranks when all of this one's
            // have left.
            let point = format!("left-{i}");
            rank.reach(&point);
            while !rank.has_reached(1 - rank.rank, &point) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        times
    };
    let name = "groups_can_be_set_up_one_after_another";
    job(name, Spec::new(2, false), main, |job| {
        job.results::<Vec<Duration>>();
    });
}

/// Far more ranks than cores.
#[test]
fn a_world_of_24_on_one_host() {
    let main = |rank: &Rank| {
        let group = rank.group();
        let mut data = vec![rank.rank as i64; 20_000];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, vec![23 * 24 / 2; 20_000]);
        let all = group.all_gather_object(&rank.rank).unwrap();
        assert_eq!(all, (0..24).collect::<Vec<_>>());
        group.barrier().unwrap();
    };
    job(
        "a_world_of_24_on_one_host",
        Spec::new(24, false),
        main,
        |job| {
            job.results::<()>();
        },
    );
}

#[test]
fn a_handle_in_a_static_ends_with_the_process() {
    static GROUP: std::sync::OnceLock<ProcessGroup> = std::sync::OnceLock::new();
    let main = |rank: &Rank| {
        let group = GROUP.get_or_init(|| rank.group());
        group.barrier().unwrap();
    };
    let name = "a_handle_in_a_static_ends_with_the_process";
    job(name, Spec::new(2, false), main, |job| {
        job.results::<()>();
    });
}
