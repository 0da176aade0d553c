//! What a rank of a test job does, by name.

mod compare;
mod failing;
mod models;
mod syncing;

use burn::module::Module;
use burn::tensor::Device;
use burn_ddp::{Ddp, DdpConfig, ProcessGroup};

/// Runs the case `name`.
pub fn run(name: &str) {
    let group = match ProcessGroup::from_env() {
        Ok(group) => group,
        Err(error) => fail(&error),
    };
    case(name)(&group, &device(&group).autodiff());
}

/// The device of `DDP_CASE_DEVICE`, or the one a program gets by default.
fn device(group: &ProcessGroup) -> Device {
    match std::env::var("DDP_CASE_DEVICE").as_deref() {
        Err(_) => burn_ddp::device(group).unwrap_or_else(|error| fail(&error)),
        Ok("flex") => Device::flex(),
        #[cfg(feature = "ndarray")]
        #[allow(deprecated)] // for Flex; supported for as long as Burn has it
        Ok("ndarray") => Device::ndarray(),
        #[cfg(feature = "cpu")]
        Ok("cpu") => Device::cpu(),
        Ok(other) => panic!("built without the device {other}"),
    }
}

/// Whether gradients are to be synchronised during the backward pass:
/// everywhere but where the device or `DDP_CASE_OVERLAP=0` rules it out.
fn overlaps() -> bool {
    // Where operations run lazily, no gradient is there before the pass ends.
    let lazy = std::env::var("DDP_CASE_DEVICE").as_deref() == Ok("cpu");
    config() == DdpConfig::new() && !lazy
}

/// The configuration of a case that asks for nothing else.
fn config() -> DdpConfig {
    let overlap = std::env::var("DDP_CASE_OVERLAP").as_deref() != Ok("0");
    DdpConfig::new().with_overlap(overlap)
}

/// Wraps a module, as every rank does alike.
fn wrap<M: Module>(module: M, group: &ProcessGroup) -> Ddp<M> {
    config().init(module, group).unwrap_or_else(|e| fail(&e))
}

type Case = fn(&ProcessGroup, &Device);

fn case(name: &str) -> Case {
    match name {
        "parity" => syncing::parity,
        "trajectory" => syncing::trajectory,
        "accumulation" => syncing::accumulation,
        "unused" => syncing::unused,
        "inner-forward" => syncing::inner_forward,
        "two-forwards" => syncing::two_forwards,
        "replicas" => syncing::replicas,
        "batch-norm" => syncing::batch_norm,
        "overlap" => syncing::overlap,
        "sum" => syncing::sum,
        "half" => syncing::half,
        "lora" => syncing::lora,
        "validation" => syncing::validation,
        "bypass" => failing::bypass,
        "spent-pass" => failing::spent_pass,
        "different-models" => failing::different_models,
        "drifted" => failing::drifted,
        "missing-micro-batch" => failing::missing_micro_batch,
        "changed-module" => failing::changed_module,
        "killed" => failing::killed,
        "panic" => failing::panic,
        "checkpoint" => failing::checkpoint,
        _ => panic!("there is no case {name}"),
    }
}

/// Prints an error as a program would, and ends the process.
fn fail(error: &burn_ddp::Error) -> ! {
    eprintln!("{:?}: {error}", error.kind());
    std::process::exit(1)
}
