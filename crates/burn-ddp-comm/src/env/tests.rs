use super::*;
use crate::ErrorKind;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn parse(variables: &[(&str, &str)]) -> Result<Option<LaunchEnv>> {
    let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
    LaunchEnv::parse(|name| variables.get(name).map(Into::into))
}

/// Parses and expects a Usage error, whose text it returns.
fn refused(variables: &[(&str, &str)]) -> String {
    let error = parse(variables).expect_err("these variables make no sense");
    assert_eq!(error.kind(), ErrorKind::Usage);
    error.to_string()
}

const RANK_1_OF_4: [(&str, &str); 4] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "4"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];

fn with<'a>(changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    RANK_1_OF_4.iter().chain(changes).copied().collect()
}

#[test]
fn without_variables_a_process_is_alone() {
    assert!(parse(&[]).unwrap().is_none());
    assert!(
        parse(&[("PATH", "/bin"), ("BURN_DDP_SECRET", "x")])
            .unwrap()
            .is_none()
    );
    assert!(
        parse(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")])
            .unwrap()
            .is_none()
    );
    assert!(
        parse(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")])
            .unwrap()
            .is_none()
    );
}

#[test]
fn torchruns_variables_are_understood() {
    let secret = Secret::generate().to_hex();
    let env = parse(&with(&[
        ("MASTER_ADDR", "10.0.0.1"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("BURN_DDP_SECRET", &secret),
        ("BURN_DDP_STORE", "launcher"),
        ("BURN_DDP_TIMEOUT_SECONDS", "0.5"),
        ("BURN_DDP_STORE_TIMEOUT_SECONDS", "20"),
        ("BURN_DDP_PATIENCE_SECONDS", "30"),
        ("BURN_DDP_TRANSPORT", "tcp"),
    ]))
    .unwrap()
    .unwrap();
    assert_eq!((env.rank, env.world_size), (1, 4));
    assert_eq!((env.local_rank, env.local_world_size), (1, 2));
    assert_eq!(env.store_addr.as_deref(), Some("10.0.0.1:29500"));
    assert!(env.launcher_hosts_store && env.force_tcp);
    assert_eq!(env.secret.as_ref().unwrap().to_hex(), secret);
    assert_eq!(env.timeout, Duration::from_millis(500));
    assert_eq!(env.store_timeout, Duration::from_secs(20));
    assert_eq!(env.patience, Some(Duration::from_secs(30)));
    let limits = env.group_config().limits();
    assert_eq!(limits.patience, Duration::from_secs(30));
}

#[test]
fn what_is_not_set_has_defaults() {
    let env = parse(&RANK_1_OF_4).unwrap().unwrap();
    assert!(!env.launcher_hosts_store && !env.force_tcp && env.secret.is_none());
    assert_eq!(env.timeout, GroupConfig::DEFAULT_TIMEOUT);
    assert_eq!(env.store_timeout, GroupConfig::DEFAULT_STORE_TIMEOUT);
    let config = env.group_config();
    assert_eq!(config.limits().patience, 12 * GroupConfig::DEFAULT_TIMEOUT);
    assert!(!config.host_store);
    assert_eq!(config.store_addr, "127.0.0.1:29500");
    let zero = parse(&with(&[("RANK", "0")])).unwrap().unwrap();
    assert!(zero.group_config().host_store);
    let launched = with(&[("RANK", "0"), ("BURN_DDP_STORE", "launcher")]);
    let launched = parse(&launched).unwrap().unwrap();
    assert!(!launched.group_config().host_store);

    let alone = parse(&[("RANK", "0"), ("WORLD_SIZE", "1")])
        .unwrap()
        .unwrap();
    assert_eq!(alone.store_addr, None);
    assert_eq!((alone.local_rank, alone.local_world_size), (0, 1));
}

#[test]
fn local_ranks_are_told_or_follow() {
    let local = |changes: &[(&str, &str)]| {
        let env = parse(&with(changes)).unwrap().unwrap();
        (env.local_rank, env.local_world_size)
    };
    assert_eq!(local(&[]), (1, 4));
    assert_eq!(local(&[("MASTER_ADDR", "::1")]), (1, 4));
    assert_eq!(local(&[("MASTER_ADDR", "localhost")]), (1, 4));
    assert_eq!(local(&[("MASTER_ADDR", "node1")]), (0, 1));
    assert_eq!(local(&[("LOCAL_RANK", "3")]), (3, 4));
    assert_eq!(local(&[("RANK", "3"), ("LOCAL_WORLD_SIZE", "2")]), (1, 2));
    let text = refused(&with(&[("MASTER_ADDR", "node1"), ("LOCAL_RANK", "0")]));
    assert!(text.contains("LOCAL_WORLD_SIZE is missing"), "{text}");
}

#[test]
fn every_missing_and_odd_variable_is_named() {
    let text = refused(&[("RANK", "1")]);
    for name in ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        assert!(text.contains(&format!("{name} is missing")), "{text}");
    }
    assert!(refused(&[("LOCAL_RANK", "1")]).contains("RANK is missing; WORLD_SIZE is missing"));
    assert!(refused(&[("MASTER_PORT", "1")]).contains("RANK is missing"));

    for (name, value, says) in [
        (
            "RANK",
            "one",
            "RANK is \"one\", which is not a whole number",
        ),
        ("RANK", "-1", "RANK is \"-1\""),
        ("RANK", "", "RANK is empty"),
        (
            "RANK",
            "4",
            "RANK is 4, which is not less than WORLD_SIZE, 4",
        ),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0"),
        ("WORLD_SIZE", "4.0", "WORLD_SIZE is \"4.0\""),
        ("LOCAL_RANK", "x", "LOCAL_RANK is \"x\""),
        ("LOCAL_RANK", "4", "LOCAL_RANK is 4, which is not less than"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE is 0"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE is 5"),
        ("MASTER_ADDR", " ", "MASTER_ADDR is empty"),
        ("MASTER_PORT", "0", "MASTER_PORT is 0"),
        ("MASTER_PORT", "65536", "MASTER_PORT is \"65536\""),
        ("MASTER_PORT", "http", "MASTER_PORT is \"http\""),
        (
            "BURN_DDP_SECRET",
            "abc",
            "BURN_DDP_SECRET is wrong: the secret must be 64",
        ),
        ("BURN_DDP_STORE", "redis", "BURN_DDP_STORE is \"redis\""),
        ("BURN_DDP_TRANSPORT", "ipc", "BURN_DDP_TRANSPORT is \"ipc\""),
        (
            "BURN_DDP_TIMEOUT_SECONDS",
            "0",
            "BURN_DDP_TIMEOUT_SECONDS is 0",
        ),
        (
            "BURN_DDP_TIMEOUT_SECONDS",
            "inf",
            "BURN_DDP_TIMEOUT_SECONDS is inf",
        ),
        (
            "BURN_DDP_STORE_TIMEOUT_SECONDS",
            "NaN",
            "BURN_DDP_STORE_TIMEOUT_SECONDS is NaN",
        ),
        (
            "BURN_DDP_STORE_TIMEOUT_SECONDS",
            "5 min",
            "is \"5 min\", which is not a number of",
        ),
    ] {
        let text = refused(&with(&[(name, value)]));
        assert!(text.contains(says), "{name}={value}: {text}");
    }
    let text = refused(&with(&[
        ("RANK", "x"),
        ("MASTER_PORT", "y"),
        ("BURN_DDP_STORE", "z"),
    ]));
    for name in [
        "RANK is \"x\"",
        "MASTER_PORT is \"y\"",
        "BURN_DDP_STORE is \"z\"",
    ] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn an_ipv6_address_gets_its_brackets() {
    for (host, addr) in [
        ("fd00::1", "[fd00::1]:29500"),
        ("[fd00::1]", "[fd00::1]:29500"),
        ("a.b", "a.b:29500"),
    ] {
        let env = parse(&with(&[("MASTER_ADDR", host)])).unwrap().unwrap();
        assert_eq!(env.store_addr.as_deref(), Some(addr));
    }
}

#[test]
fn slurm_and_open_mpi_tell_ranks_but_not_where_to_meet() {
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "7"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
    ];
    let text = refused(&slurm);
    assert!(
        text.contains("MASTER_ADDR is missing; MASTER_PORT is missing"),
        "{text}"
    );

    let master = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
    let env = parse(&[&slurm[..], &master].concat()).unwrap().unwrap();
    assert_eq!((env.rank, env.world_size), (5, 7));
    assert_eq!((env.local_rank, env.local_world_size), (1, 2));

    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let env = parse(&[&open_mpi[..], &master, &slurm].concat())
        .unwrap()
        .unwrap();
    assert_eq!((env.rank, env.world_size), (3, 4));
    assert_eq!((env.local_rank, env.local_world_size), (1, 2));

    let text = refused(&[&[("SLURM_PROCID", "9"), ("SLURM_NTASKS", "7")][..], &master].concat());
    assert!(
        text.contains("SLURM_PROCID is 9, which is not less than SLURM_NTASKS, 7"),
        "{text}"
    );

    // torchrun's win, also within a Slurm job.
    let env = parse(&[&RANK_1_OF_4[..], &slurm].concat())
        .unwrap()
        .unwrap();
    assert_eq!((env.rank, env.world_size), (1, 4));
}

#[test]
fn slurms_task_lists_are_read() {
    use super::manager::tasks_of_node;
    let of = |node| tasks_of_node("2(x3),1, 4(x2)", node);
    assert_eq!(
        [of(0), of(2), of(3), of(5), of(6)],
        [Some(2), Some(2), Some(1), Some(4), None]
    );
    for odd in ["", "x", "2(x", "2(xy)", "(x2)"] {
        assert_eq!(tasks_of_node(odd, 0), None, "{odd}");
    }
    let huge = format!("1(x{}),1(x{})", usize::MAX, usize::MAX);
    assert_eq!(tasks_of_node(&huge, usize::MAX), None);
}

#[cfg(unix)]
#[test]
fn bytes_that_are_no_text_are_named() {
    use std::os::unix::ffi::OsStringExt;
    let error =
        LaunchEnv::parse(|name| (name == "RANK").then(|| OsString::from_vec(vec![0xff, b'1'])))
            .unwrap_err();
    assert!(error.to_string().contains("RANK is not Unicode"));
}

proptest! {
    /// Whatever is set, the result makes sense or is a Usage error.
    #[test]
    fn ranks_are_valid_or_refused(
        values in proptest::collection::btree_map(
            proptest::sample::select(vec![
                "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                "MASTER_PORT", "BURN_DDP_SECRET", "BURN_DDP_STORE", "BURN_DDP_TIMEOUT_SECONDS",
                "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID",
                "SLURM_TASKS_PER_NODE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            ]),
            prop_oneof!["[0-4]", "[0-9]{1,25}", "127.0.0.1", "launcher", ".{0,8}"],
            0..12,
        ),
    ) {
        match LaunchEnv::parse(|name| values.get(name).map(Into::into)) {
            Ok(None) => {}
            Ok(Some(env)) => {
                prop_assert!(env.rank < env.world_size);
                prop_assert!(env.local_rank < env.local_world_size);
                prop_assert!(env.local_world_size <= env.world_size);
                prop_assert!(env.world_size == 1 || env.store_addr.is_some());
            }
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Usage),
        }
    }

    #[test]
    fn any_task_list_is_read_or_not(list in "[0-9x(),]{0,30}", node: usize) {
        let _ = super::manager::tasks_of_node(&list, node);
    }
}
