//! What a rank of a test job does, by name.

mod compare;
mod failing;
mod models;
mod syncing;

use burn::tensor::Device;
use burn_ddp::ProcessGroup;

/// Runs the case `name`.
pub fn run(name: &str) {
    let group = match ProcessGroup::from_env() {
        Ok(group) => group,
        Err(error) => fail(&error),
    };
    let device = match burn_ddp::device(&group) {
        Ok(device) => device.autodiff(),
        Err(error) => fail(&error),
    };
    case(name)(&group, &device);
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
