//! The commands of this repository: `cargo xtask --help`.

mod cargo;
mod check;
mod job;
mod train_mnist;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The commands of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a network on MNIST digits, data-parallel
    TrainMnist(train_mnist::Options),
    /// Check on this machine that several processes train as one does
    Verify(verify::Options),
    /// Run every test
    Test,
    /// Check formatting, clippy and rustdoc, warnings denied
    Lint,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::TrainMnist(options) => train_mnist::run(&options),
        Command::Verify(options) => verify::run(&options),
        Command::Test => check::test().map(|()| ExitCode::SUCCESS),
        Command::Lint => check::lint().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
