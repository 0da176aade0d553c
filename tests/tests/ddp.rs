//! The wrapper, in jobs of one to four processes.

use burn_ddp_tests::{RankOutput, TestJob};

fn case(name: &str, ranks: usize) -> TestJob {
    TestJob::new(env!("CARGO_BIN_EXE_ddp-case"), ranks).arg(name)
}

/// What a case is run on besides shared memory and Flex.
fn settings() -> Vec<(&'static str, &'static str)> {
    let mut settings = vec![
        ("BURN_DDP_TRANSPORT", "tcp"),
        // As on a device whose gradients are only read after the backward pass.
        ("DDP_CASE_OVERLAP", "0"),
    ];
    if cfg!(feature = "ndarray") {
        settings.push(("DDP_CASE_DEVICE", "ndarray"));
    }
    if cfg!(feature = "cpu") {
        settings.push(("DDP_CASE_DEVICE", "cpu"));
    }
    settings
}

/// Runs a case at several world sizes, and at one in every setting.
fn everywhere(name: &str) {
    for ranks in [1, 2, 3] {
        case(name, ranks).succeed();
    }
    for (variable, value) in settings() {
        // `burn-ndarray` has no half precision.
        if (name, value) != ("half", "ndarray") {
            case(name, 2).env(variable, value).succeed();
        }
    }
}

/// Runs a case that fails, on two ranks, in every setting.
fn fail_everywhere(name: &str) -> Vec<RankOutput> {
    let runs = settings().into_iter().map(|(variable, value)| {
        let job = case(name, 2).env(variable, value);
        job.run()
    });
    runs.flatten().chain(case(name, 2).run()).collect()
}

#[test]
fn gradients_are_those_of_one_process_on_all_the_data() {
    everywhere("parity");
    case("parity", 4).succeed();
}

#[test]
fn twenty_optimizer_steps_end_where_one_process_ends() {
    everywhere("trajectory");
}

#[test]
fn micro_batches_give_the_gradient_of_the_batch_they_make_up() {
    everywhere("accumulation");
}

#[test]
fn unused_parameters_contribute_zero_and_are_named() {
    everywhere("unused");
}

#[test]
fn a_forward_pass_on_the_inner_module_is_synchronised_too() {
    everywhere("inner-forward");
}

#[test]
fn two_forward_passes_share_one_backward_pass() {
    everywhere("two-forwards");
}

#[test]
fn replicas_start_equal_and_stay_equal() {
    everywhere("replicas");
}

#[test]
fn running_statistics_follow_rank_0() {
    everywhere("batch-norm");
}

#[test]
fn buckets_start_while_the_backward_pass_goes_on() {
    everywhere("overlap");
}

#[test]
fn gradients_can_be_summed() {
    everywhere("sum");
}

#[test]
fn half_precision_gradients_keep_their_dtype() {
    everywhere("half");
}

#[test]
fn adapters_stay_adapters() {
    everywhere("lora");
}

#[test]
fn a_module_in_validation_is_only_called() {
    everywhere("validation");
}

#[test]
fn a_resumed_run_ends_where_an_uninterrupted_one_ends() {
    for ranks in [1, 2] {
        let directory = tempfile::tempdir().expect("a temporary directory");
        case("checkpoint", ranks).arg(directory.path()).succeed();
    }
}

#[test]
fn micro_batches_are_counted() {
    everywhere("missing-micro-batch");
}

#[test]
fn a_parameter_that_was_frozen_when_wrapped_is_named() {
    everywhere("changed-module");
}

/// Every rank failed, and printed `text`.
fn assert_all_fail_with(outputs: &[RankOutput], text: &str) {
    for output in outputs {
        assert_eq!(output.status.code(), Some(1), "{output:#?}");
        assert!(output.stderr.contains(text), "{output:#?}");
    }
}

#[test]
fn a_backward_pass_around_the_wrapper_is_refused() {
    for output in fail_everywhere("bypass") {
        assert_eq!(output.status.code(), Some(101), "{output:#?}");
        let hint = "call `model.backward(loss)` instead";
        assert!(output.stderr.contains(hint), "{output:#?}");
    }
}

#[test]
fn a_forward_pass_serves_one_backward_pass() {
    for output in fail_everywhere("spent-pass") {
        assert_eq!(output.status.code(), Some(101), "{output:#?}");
        assert!(output.stderr.contains("already"), "{output:#?}");
    }
}

#[test]
fn different_modules_are_named_on_every_rank() {
    let outputs = case("different-models", 3).run();
    assert_all_fail_with(&outputs, "`first.weight` (Float F32 [8, 16])");
    assert_all_fail_with(&outputs, "(Float F32 [8, 17]) on rank 1");
}

#[test]
fn replicas_that_drifted_apart_are_found() {
    let outputs = case("drifted", 3).run();
    assert_all_fail_with(&outputs, "`first.weight` of rank 1 differs");
}

#[test]
fn a_killed_rank_ends_the_others_steps() {
    let outputs = case("killed", 3).run();
    for output in &outputs {
        if output.rank == 1 {
            assert_eq!(output.status.code(), None, "{output:#?}");
        } else {
            assert_eq!(output.status.code(), Some(1), "{output:#?}");
            assert!(output.stderr.contains("rank 1"), "{output:#?}");
            let late = output.after.saturating_sub(outputs[1].after);
            assert!(late.as_secs_f64() < 1.0, "{late:?}: {output:#?}");
        }
    }
}

#[test]
fn a_panic_reaches_the_other_ranks_with_its_message() {
    for output in case("panic", 3).run() {
        if output.rank == 1 {
            assert_eq!(output.status.code(), Some(101), "{output:#?}");
        } else {
            assert_eq!(output.status.code(), Some(1), "{output:#?}");
            let message = "the disk of rank 1 is on fire";
            assert!(output.stderr.contains(message), "{output:#?}");
        }
    }
}

#[test]
fn a_checkpoint_directory_that_cannot_be_made_is_named_on_every_rank() {
    let outputs = case("checkpoint", 2).arg("/proc/no-such-directory").run();
    assert_all_fail_with(&outputs, "/proc/no-such-directory");
}
