//! A group of one: everything works, and wrong arguments are still errors.

use burn_ddp_comm::{ErrorKind, ProcessGroup, ReduceOp, Transfer};

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
    group.reduce(&mut data, ReduceOp::Sum, 0).unwrap();
    group
        .reduce_scatter(&data, &mut out, ReduceOp::Mean)
        .unwrap();
    group.gather(&data, &mut out, 0).unwrap();
    group.scatter(&data, &mut out, 0).unwrap();
    group.all_to_all(&data, &mut out).unwrap();
    assert_eq!(out, data);
    assert_eq!(group.all_gather_v(&data).unwrap(), [data]);
    assert_eq!(group.all_to_all_v(&[&data[..1]]).unwrap(), [&data[..1]]);
    let mut received = [0.0; 2];
    group.send_recv(&data, 0, &mut received, 0).unwrap();
    assert_eq!(received, data);
    let mut other = [5.0_f32];
    let mut buffers = [&mut data[..], &mut other[..]];
    group
        .all_reduce_coalesced(&mut buffers, ReduceOp::Product)
        .unwrap();
    group.broadcast_coalesced(&mut buffers, 0).unwrap();
    assert_eq!((data, other), (received, [5.0]));
    group.barrier().unwrap();
    assert_eq!(group.gather_object(&7, 0).unwrap(), Some(vec![7]));
    let text = group.broadcast_object(Some("text".to_owned()), 0).unwrap();
    assert_eq!(text, "text");
    assert_eq!(group.all_gather_object(&vec![1, 2]).unwrap(), [[1, 2]]);

    let work = group.all_reduce_async::<f32, _>(vec![3.0], ReduceOp::Sum);
    assert!(work.is_done());
    assert_eq!(work.wait().unwrap(), [3.0]);
    assert_eq!(group.broadcast_async::<u8, _>([9], 0).wait().unwrap(), [9]);
    let (data, out) = group.all_gather_async([1_i32], [0]).wait().unwrap();
    assert_eq!(data, out);
    let two = || ([1_u8, 2], [0_u8; 2]);
    let pairs = [
        group.reduce_scatter_async(two().0, two().1, ReduceOp::Max),
        group.gather_async(two().0, two().1, 0),
        group.scatter_async(two().0, two().1, 0),
        group.all_to_all_async(two().0, two().1),
        group.send_recv_async(two().0, 0, two().1, 0),
    ];
    for work in pairs {
        assert_eq!(work.wait().unwrap(), ([1, 2], [1, 2]));
    }
    let work = group.reduce_async::<i32, _>([4], ReduceOp::Min, 0);
    assert_eq!(work.wait().unwrap(), [4]);
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
fn wrong_roots_and_lengths_are_usage_errors() {
    type Attempt = fn(&ProcessGroup) -> burn_ddp_comm::Result<()>;
    let attempts: [(Attempt, &str); 12] = [
        (
            |g| g.reduce(&mut [1_u8], ReduceOp::Sum, 3),
            "reduce #1 on rank 0: there is no rank 3",
        ),
        (
            |g| g.gather(&[1_u8], &mut [0], 1),
            "gather #1 on rank 0: there is no rank 1",
        ),
        (
            |g| g.scatter(&[1_u8], &mut [0], 1),
            "scatter #1 on rank 0: there is no rank 1",
        ),
        (
            |g| g.gather_object(&1, 1).map(drop),
            "gather_object #1 on rank 0: there is no rank 1",
        ),
        (
            |g| g.gather(&[1_u8], &mut [0; 2], 0),
            "`out` holds 2 elements and has to hold 1 x 1",
        ),
        (
            |g| g.scatter(&[1_u8], &mut [0; 2], 0),
            "`data` holds 1 elements and has to hold 1 x 2",
        ),
        (
            |g| g.reduce_scatter(&[1_i64], &mut [0; 2], ReduceOp::Sum),
            "`data` holds 1 elements and has to hold 1 x 2",
        ),
        (
            |g| g.all_to_all(&[1_i32], &mut [0; 2]),
            "`data` holds 1 elements and `out` 2",
        ),
        (
            |g| g.all_to_all_v::<u8>(&[]).map(drop),
            "there are 0 parts, and have to be 1",
        ),
        (
            |g| g.send(&[1_u8], 0),
            "send to rank 0 on rank 0: it sends to itself",
        ),
        (
            |g| g.recv(&mut [1_u8], 0),
            "recv from rank 0 on rank 0: it receives from itself",
        ),
        (
            |g| g.send(&[1_u8], 4),
            "send to rank 4 on rank 0: there is no rank 4",
        ),
    ];
    for (attempt, expected) in attempts {
        let group = ProcessGroup::single();
        let error = attempt(&group).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(group.barrier().unwrap_err().to_string(), error.to_string());
    }
    let [mut one, mut two] = [[0_u8], [0]];
    let error = ProcessGroup::single()
        .batch_send_recv(&mut [
            Transfer::Recv {
                data: &mut one,
                from: 0,
            },
            Transfer::Recv {
                data: &mut two,
                from: 0,
            },
        ])
        .unwrap_err();
    assert!(
        error.to_string().contains("several messages from rank 0"),
        "{error}"
    );
    let error = ProcessGroup::single()
        .send_recv(&[1_u8; 2], 0, &mut one, 0)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("itself 2 elements and receives 1"),
        "{error}"
    );
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
