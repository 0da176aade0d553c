//! `burnrun`: runs a program as the ranks of a distributed job.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use burn_ddp_comm::{Error, ErrorKind, Result, Secret};
use burn_ddp_launch::{Job, JobBuilder, JobReport, Nodes, NprocPerNode};
use clap::Parser;

/// The port of torchrun's rendezvous, for jobs on several machines.
const DEFAULT_PORT: u16 = 29500;

/// Runs a program as several ranks, one process each, that train together.
///
/// Each rank gets torchrun's environment variables (RANK, LOCAL_RANK,
/// WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). When one fails, the
/// others are ended within a second, and burnrun ends with that rank's exit
/// code (128 plus the number of the signal that killed it).
#[derive(Parser)]
#[command(name = "burnrun", version)]
struct Cli {
    /// Ranks on this machine: a number, `cpu` (one per core), `gpu` (one per
    /// visible GPU) or `auto` (`gpu` where there is one, else `cpu`).
    #[arg(
        long,
        visible_alias = "nproc_per_node",
        default_value = "1",
        value_name = "N"
    )]
    nproc_per_node: NprocPerNode,

    /// Machines in the job; start burnrun on each of them with the same
    /// BURN_DDP_SECRET.
    #[arg(long, default_value_t = 1, value_name = "N")]
    nnodes: usize,

    /// This machine's number, from 0; number 0 hosts the rendezvous.
    #[arg(
        long,
        visible_alias = "node_rank",
        default_value_t = 0,
        value_name = "N"
    )]
    node_rank: usize,

    /// Name or address of the machine with node rank 0. Needed with several
    /// machines.
    #[arg(long, visible_alias = "master_addr", value_name = "ADDRESS")]
    master_addr: Option<String>,

    /// Port of the rendezvous on that machine [default: 29500 with several
    /// machines, else a free one].
    #[arg(long, visible_alias = "master_port", value_name = "PORT")]
    master_port: Option<u16>,

    /// Seconds from SIGTERM to SIGKILL for ranks that do not end [default: 0.6
    /// after a rank's failure, 30 after a signal to burnrun].
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    grace: Option<Duration>,

    /// Pass on the ranks' lines without `[rank 0]` before them.
    #[arg(long)]
    no_prefix: bool,

    /// Write each rank's output also to a file in this directory: rank-0.log.
    #[arg(long, visible_alias = "log_dir", value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Capture rank 0's stderr as well where stderr is a terminal. Else rank 0
    /// draws its progress bar on the terminal itself, and the report on its
    /// failure can't repeat its last lines.
    #[arg(long)]
    capture_rank0: bool,

    /// Print nothing but what the ranks print, and why the job failed.
    #[arg(long, short)]
    quiet: bool,

    /// Write a report on the job to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print a fresh secret for a job on several machines, and do nothing else.
    #[arg(long, exclusive = true)]
    new_secret: bool,

    /// The program and its arguments.
    #[arg(
        trailing_var_arg = true,
        required_unless_present = "new_secret",
        value_name = "PROGRAM",
        value_hint = clap::ValueHint::CommandWithArguments
    )]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            say(&error.to_string());
            // clap's code for wrong use, and that of everything else.
            match error.kind() {
                ErrorKind::Usage => ExitCode::from(2),
                ErrorKind::Peer | ErrorKind::Environment => ExitCode::FAILURE,
            }
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    if cli.new_secret {
        // A reader that is gone does not want it.
        let _ = writeln!(std::io::stdout(), "{}", Secret::generate().to_hex());
        return Ok(ExitCode::SUCCESS);
    }
    let ranks = cli.nproc_per_node.resolve()?;
    let job = job(&cli, ranks)?;
    if !cli.quiet {
        say(&introduction(&cli, ranks));
    }
    let report = job.run()?;
    if !report.success() || !cli.quiet {
        say(&report.to_string());
    }
    if let Some(path) = &cli.json {
        write_json(path, &report)?;
    }
    // A process's exit code has 8 bits, and what is not 0 must not become it.
    let code = u8::try_from(report.exit_code).unwrap_or(1);
    Ok(ExitCode::from(code))
}

fn job(cli: &Cli, ranks: usize) -> Result<JobBuilder> {
    let Some((program, args)) = cli.command.split_first() else {
        return Err(Error::usage("no program is given"));
    };
    let mut job = Job::builder(program)
        .args(args)
        .ranks(ranks)
        .prefix(!cli.no_prefix)
        .share_terminal(std::io::stderr().is_terminal() && !cli.capture_rank0);
    if let Some(grace) = cli.grace {
        job = job.grace(grace);
    }
    if let Some(directory) = &cli.log_dir {
        job = job.log_dir(directory);
    }
    Ok(match nodes(cli)? {
        Some(nodes) => job.nodes(nodes),
        None => job.port(cli.master_port.unwrap_or(0)),
    })
}

/// This machine's place among several, none if it is the only one.
fn nodes(cli: &Cli) -> Result<Option<Nodes>> {
    if cli.nnodes == 1 {
        return match cli.node_rank {
            0 => Ok(None),
            rank => Err(Error::usage(format!(
                "--node-rank {rank} needs --nnodes: the number of machines in the job"
            ))),
        };
    }
    let Some(master_addr) = cli.master_addr.clone() else {
        return Err(Error::usage(
            "--nnodes needs --master-addr: the name or address of the machine with node rank 0",
        ));
    };
    let secret = std::env::var("BURN_DDP_SECRET").map_err(|_| {
        Error::usage(
            "a job on several machines needs a secret that keeps strangers out: make one with `burnrun --new-secret`, and set BURN_DDP_SECRET to it on every machine",
        )
    })?;
    Ok(Some(Nodes {
        count: cli.nnodes,
        rank: cli.node_rank,
        master_addr,
        master_port: cli.master_port.unwrap_or(DEFAULT_PORT),
        secret: Secret::from_hex(&secret)?,
    }))
}

/// What is about to run.
fn introduction(cli: &Cli, ranks: usize) -> String {
    let program = cli
        .command
        .first()
        .map_or("".into(), |program| program.to_string_lossy());
    let plural = if ranks == 1 { "" } else { "s" };
    let machine = match cli.nnodes {
        1 => "on this machine".to_owned(),
        count => format!("on machine {} of 0 to {}", cli.node_rank, count - 1),
    };
    format!("{ranks} rank{plural} of {program} {machine}")
}

fn write_json(path: &Path, report: &JobReport) -> Result<()> {
    let cannot = |error: std::io::Error| {
        Error::environment_from(format!("can't write {} (--json)", path.display()), error)
    };
    let mut text = serde_json::to_vec_pretty(report).map_err(|error| cannot(error.into()))?;
    text.push(b'\n');
    std::fs::write(path, text).map_err(cannot)
}

fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "give a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Prints a message of the launcher's own.
fn say(message: &str) {
    // Nobody is left to be told that stderr is closed.
    let _ = writeln!(std::io::stderr(), "burnrun: {message}");
}
