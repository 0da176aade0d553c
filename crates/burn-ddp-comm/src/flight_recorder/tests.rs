use std::panic::Location;
use std::sync::Arc;
use std::time::Instant;

use super::{CAPACITY, FlightRecord, FlightRecorder, FlightState};
use crate::DType;
use crate::call::{Call, Collective};
use crate::operation::Operation;
use crate::scope::Scope;

fn barrier(sequence: u64) -> Operation {
    Operation::Collective(Call::without_elements(Collective::Barrier, None), sequence)
}

#[test]
fn the_last_operations_are_kept_in_order() {
    let recorder = FlightRecorder::new(1, 2);
    let scope = Arc::new(Scope::world(2));
    let total = CAPACITY as u64 * 2 + 7;
    for sequence in 1..=total {
        let number = recorder.enqueue(&scope, 1, Location::caller());
        recorder.begin(number, &barrier(sequence));
        recorder.end(number, sequence == total);
    }
    let record = recorder.record("test");
    let sequences: Vec<_> = record.entries.iter().filter_map(|e| e.sequence).collect();
    let expected: Vec<u64> = (total - CAPACITY as u64 + 1..=total).collect();
    assert_eq!(sequences, expected);
    assert_eq!(record.entries[0].state, FlightState::Completed);
    assert_eq!(record.entries[CAPACITY - 1].state, FlightState::Failed);
    assert_eq!(record.groups["world"], [0, 1]);
    // What is said of an operation that is no more in the ring is lost.
    recorder.begin(3, &barrier(4));
    assert_eq!(recorder.record("test").entries, record.entries);
}

#[test]
fn activity_says_what_goes_on() {
    let recorder = FlightRecorder::new(0, 2);
    let scope = Arc::new(Scope::world(2));
    let activity = recorder.activity();
    assert_eq!(activity.text, "busy elsewhere, before its first operation");
    assert_eq!(activity.wait, None);

    let number = recorder.enqueue(&scope, 0, Location::caller());
    assert_eq!(recorder.activity().wait, None, "it is only queued");
    let call = Call::with_elements(Collective::AllGather, DType::F32, 32);
    recorder.begin(number, &Operation::Collective(call, 1));
    let activity = recorder.activity();
    let started = "in all_gather #1 (f32, 8), called at ";
    assert!(activity.text.starts_with(started), "{}", activity.text);
    assert!(activity.text.contains("flight_recorder/tests.rs:"));
    assert_eq!(activity.wait.map(|wait| wait.still_ms), Some(0));

    recorder.waits(
        number,
        vec![1],
        Instant::now() - std::time::Duration::from_secs(5),
    );
    let activity = recorder.activity();
    assert!(activity.text.contains("without progress for 5.0 s"));
    assert_eq!(activity.wait.unwrap().ranks, [1]);
    recorder.moved(number);
    assert!(recorder.activity().wait.unwrap().ranks.is_empty());

    recorder.end(number, false);
    let activity = recorder.activity();
    let elsewhere = "busy elsewhere since it ended all_gather #1";
    assert!(activity.text.starts_with(elsewhere), "{}", activity.text);
}

#[test]
fn a_record_survives_its_file() {
    let recorder = FlightRecorder::new(3, 4);
    let scope = Arc::new(Scope::world(4));
    for sequence in 1..4 {
        let number = recorder.enqueue(&scope, 3, Location::caller());
        recorder.begin(number, &barrier(sequence));
    }
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("made/on/the/way");
    recorder.write(&inner, "a reason").unwrap();
    let files: Vec<_> = std::fs::read_dir(&inner).unwrap().collect();
    assert_eq!(files.len(), 1, "nothing is left aside");
    let read = FlightRecord::read(&inner.join(FlightRecord::file_name(3))).unwrap();
    assert_eq!(read.entries, recorder.record("a reason").entries);
    assert_eq!((read.reason.as_str(), read.rank), ("a reason", 3));
    std::fs::write(inner.join("damaged"), "{").unwrap();
    assert!(FlightRecord::read(&inner.join("damaged")).is_err());
}
