//! A group of one: everything works, and wrong arguments are still errors.

use burn_ddp_comm::{ErrorKind, ProcessGroup, ReduceOp};

#[test]
fn every_operation_works_alone() {
    let group = ProcessGroup::single();
    assert_eq!((group.rank(), group.world_size()), (0, 1));
    assert_eq!((group.local_rank(), group.local_world_size()), (0, 1));
    assert!(group.is_main());

    let mut data = [1.5_f32, -2.0];
    for op in [
        ReduceOp::Sum,
        ReduceOp::Mean,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
    ] {
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, [1.5, -2.0]);
    }
    let mut long = vec![7_i64; 100_000];
    group.all_reduce(&mut long, ReduceOp::Mean).unwrap();
    assert_eq!(long, vec![7; 100_000]);
    group.broadcast(&mut data, 0).unwrap();
    let mut out = [0.0; 2];
    group.all_gather(&data, &mut out).unwrap();
    assert_eq!(out, data);
    group.barrier().unwrap();
    let text = group.broadcast_object(Some("text".to_owned()), 0).unwrap();
    assert_eq!(text, "text");
    assert_eq!(group.all_gather_object(&vec![1, 2]).unwrap(), [[1, 2]]);

    let work = group.all_reduce_async::<f32, _>(vec![3.0], ReduceOp::Sum);
    assert!(work.is_done());
    assert_eq!(work.wait().unwrap(), [3.0]);
    assert_eq!(group.broadcast_async::<u8, _>([9], 0).wait().unwrap(), [9]);
    let (data, out) = group.all_gather_async([1_i32], [0]).wait().unwrap();
    assert_eq!(data, out);
    group.barrier_async().wait().unwrap();
}

#[test]
fn wrong_arguments_are_usage_errors() {
    let error = ProcessGroup::single()
        .all_gather(&[1_u8, 2], &mut [0])
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "all_gather #1 on rank 0: `out` holds 1 elements and has to hold 1 x 2, every rank's `data`"
    );

    let error = ProcessGroup::single()
        .broadcast(&mut [1_u8], 1)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("there is no rank 1"));

    let error = ProcessGroup::single()
        .broadcast_object::<u8>(None, 0)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("gave `None`"));
}

#[test]
fn an_aborted_group_stays_failed() {
    let group = ProcessGroup::single();
    group.abort("no more");
    for error in [
        group.error().unwrap(),
        group.barrier().unwrap_err(),
        group.barrier_async().wait().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Peer);
        assert_eq!(error.to_string(), "rank 0 aborted the group: no more");
    }
}
