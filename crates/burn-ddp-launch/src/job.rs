//! A job: one program, run as several ranks.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use burn_ddp_comm::{Error, Result, Secret, StoreServer};

use crate::environment::{JobEnvironment, master_of};
use crate::exit_watch::ExitWatch;
use crate::guardian::Guardian;
use crate::nodes::Nodes;
use crate::nproc::cores;
use crate::other_nodes::await_leave;
use crate::outcome::{Observed, report};
use crate::output::{Line, LogFile, OnLine, OutputOptions, OutputThread, Source, Stream};
use crate::rank_process::{Program, RankProcess};
use crate::report::JobReport;
use crate::signals;
use crate::supervisor::{Patience, supervise};

/// How long ranks get to notice a failure by themselves before they are told.
///
/// With the default grace, all is over in less than a second.
const NOTICE: Duration = Duration::from_millis(200);

/// See [`JobBuilder::grace`].
const GRACE: Duration = Duration::from_millis(600);

/// How long ranks get after a signal that was passed on, as under torchrun.
const SIGNAL_GRACE: Duration = Duration::from_secs(30);

/// More than anybody waits for: deadlines further away may not be
/// representable.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 3600);

/// A program that runs as several ranks, one process each.
///
/// ```no_run
/// # fn main() -> burn_ddp_comm::Result<()> {
/// use burn_ddp_launch::Job;
///
/// let report = Job::builder("target/release/train").ranks(2).run()?;
/// std::process::exit(report.exit_code);
/// # }
/// ```
#[derive(Debug)]
pub struct Job;

impl Job {
    /// Starts the description of a job that runs `program`: a path, or a name
    /// that is looked for on the `PATH`.
    pub fn builder(program: impl Into<OsString>) -> JobBuilder {
        JobBuilder {
            program: Program {
                program: program.into(),
                args: Vec::new(),
                env: Vec::new(),
                directory: None,
            },
            ranks: 1,
            port: 0,
            nodes: None,
            grace: None,
            prefix: true,
            print: true,
            share_terminal: false,
            log_dir: None,
            on_line: None,
        }
    }
}

/// A job that has not been started; see [`Job::builder`].
pub struct JobBuilder {
    program: Program,
    ranks: usize,
    port: u16,
    nodes: Option<Nodes>,
    grace: Option<Duration>,
    prefix: bool,
    print: bool,
    share_terminal: bool,
    log_dir: Option<PathBuf>,
    on_line: Option<OnLine>,
}

impl JobBuilder {
    /// Adds arguments for the program.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.program.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable in the environment of every rank, which is otherwise
    /// this process's. Variables of the job itself can't be set.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.program.env.push((name.into(), value.into()));
        self
    }

    /// Runs the ranks in this directory. A program given as a relative path is
    /// looked for there.
    pub fn current_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.program.directory = Some(directory.into());
        self
    }

    /// Number of ranks on this machine; 1 unless set.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = ranks;
        self
    }

    /// Port of the store of a job on this machine alone; a free one unless set.
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Makes this machine one of several.
    pub fn nodes(mut self, nodes: Nodes) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// How long a rank has to end from SIGTERM, or another signal that was
    /// passed on, until SIGKILL. Unless set, 0.6 s when a rank has failed, and
    /// 30 s after a signal.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = Some(grace.min(LONGEST_GRACE));
        self
    }

    /// Whether each line starts with the rank it is from, as `[rank 0] `; it
    /// does unless set.
    pub fn prefix(mut self, prefix: bool) -> Self {
        self.prefix = prefix;
        self
    }

    /// Whether what the ranks print is printed, stdout to stdout and stderr to
    /// stderr; it is unless set.
    pub fn print(mut self, print: bool) -> Self {
        self.print = print;
        self
    }

    /// Whether rank 0 draws on this process's stderr itself; it does not unless
    /// set.
    ///
    /// For the progress bar of rank 0, which draws none where its stderr is a
    /// pipe: set it where stderr is a terminal. Rank 0's stderr then has no
    /// prefix, is not given to [`on_line`](Self::on_line), is missing in the
    /// report's tail, and its panics are known from what it tells the store.
    /// Other ranks' lines are printed above the bar. Has no effect with
    /// [`log_dir`](Self::log_dir).
    pub fn share_terminal(mut self, share: bool) -> Self {
        self.share_terminal = share;
        self
    }

    /// Writes each rank's output also to a file of this directory, which is
    /// made if need be: `rank-0.log`, without prefixes. An existing file is
    /// replaced.
    pub fn log_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.log_dir = Some(directory.into());
        self
    }

    /// Calls `on_line` with each line that a rank prints, on a thread of the
    /// job's.
    pub fn on_line(mut self, on_line: impl FnMut(&Line<'_>) + Send + 'static) -> Self {
        self.on_line = Some(Box::new(on_line));
        self
    }

    /// Runs the job to its end, and tells what became of it. No process of it
    /// is left when this returns, nor when this process is killed.
    ///
    /// SIGINT, SIGTERM and SIGHUP to this process end the job instead while it
    /// runs: they are passed on to the ranks. A second SIGINT kills them.
    ///
    /// # Errors
    /// Only if the job could not be run, and then nothing of it is left:
    /// usage (no ranks, no such program, odd numbers of machines) or environment
    /// (port taken, log directory can't be written, process limit). A rank that
    /// fails is no error but a [`JobReport`] that says so.
    pub fn run(mut self) -> Result<JobReport> {
        let begun = Instant::now();
        self.check()?;
        let logs = self.open_logs()?;
        // Forked first, while this process has little to leave behind in it.
        let guardian = Guardian::start(self.ranks)?;
        let (sender, events) = mpsc::channel();
        let _subscription = signals::subscribe(sender.clone())?;
        let (environment, store) = self.rendezvous()?;
        let (mut ranks, watch) = self.start_ranks(&environment, &guardian)?;
        let start = begun.elapsed();

        watch.start(sender.clone())?;
        let options = OutputOptions {
            prefix: self.prefix,
            print: self.print,
            shared_terminal: self.shares_terminal(),
            on_line: self.on_line.take(),
        };
        let output = OutputThread::start(sources(&mut ranks), logs, options, sender.clone())?;
        let supervised = supervise(&mut ranks, &events, self.patience());
        for rank in &ranks {
            rank.kill_group();
        }
        output.stop();
        let (mut reason, captured) = supervised.await_output(&events);
        let is_one_of_several = self.nodes.is_some_and(|nodes| nodes.count > 1);
        let reported = match store {
            Some(store) if is_one_of_several && reason.is_none() => {
                let (signal, reported) = await_leave(store, sender, &events)?;
                reason = signal;
                reported
            }
            store => store.and_then(|store| store.first_failure()),
        };
        Ok(report(Observed {
            begun,
            start,
            world_size: environment.world_size,
            ranks: &ranks,
            captured,
            reason,
            reported,
        }))
    }

    /// Starts all ranks, or none.
    fn start_ranks<'g>(
        &self,
        environment: &JobEnvironment,
        guardian: &'g Guardian,
    ) -> Result<(Vec<RankProcess<'g>>, ExitWatch)> {
        let mut watch = ExitWatch::new()?;
        let mut ranks = Vec::with_capacity(self.ranks);
        for index in 0..self.ranks {
            let rank = environment.first_rank + index;
            let variables = environment.variables(index, |name| self.is_set(name));
            let terminal = self.shares_terminal() && rank == 0;
            let process = RankProcess::start(&self.program, rank, variables, terminal, guardian)?;
            watch.add(process.pid())?;
            ranks.push(process);
        }
        Ok((ranks, watch))
    }

    /// Whether rank 0's stderr is this process's.
    fn shares_terminal(&self) -> bool {
        self.share_terminal && self.log_dir.is_none()
    }

    fn patience(&self) -> Patience {
        Patience {
            notice: NOTICE,
            grace: self.grace.unwrap_or(GRACE),
            signal_grace: self.grace.unwrap_or(SIGNAL_GRACE),
        }
    }

    fn check(&self) -> Result<()> {
        if self.ranks == 0 {
            return Err(Error::usage("the number of ranks is 0: give 1 or more"));
        }
        if self.program.program.is_empty() {
            return Err(Error::usage("the program's name is empty"));
        }
        self.nodes.as_ref().map_or(Ok(()), Nodes::check)
    }

    /// Whether the ranks get this variable from the user.
    fn is_set(&self, name: &str) -> bool {
        let in_job = self.program.env.iter().any(|(set, _)| set == name);
        in_job || std::env::var_os(name).is_some_and(|value| !value.is_empty())
    }

    /// Opens the store, unless another machine has it, and fixes what all ranks
    /// are told.
    fn rendezvous(&self) -> Result<(JobEnvironment, Option<StoreServer>)> {
        let machines = self.nodes.as_ref().map_or(1, |nodes| nodes.count);
        let world_size = self.ranks.checked_mul(machines).ok_or_else(|| {
            Error::usage(format!(
                "{machines} machines with {} ranks each are too many",
                self.ranks
            ))
        })?;
        let (secret, address) = match &self.nodes {
            Some(nodes) => (nodes.secret.clone(), nodes.store_address()),
            None => {
                let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
                (Secret::generate(), address)
            }
        };
        let node_rank = self.nodes.as_ref().map_or(0, |nodes| nodes.rank);
        let store = match node_rank {
            0 => Some(StoreServer::bind(address, secret.clone(), world_size)?),
            _ => None,
        };
        let (master_addr, master_port) = match (&self.nodes, &store) {
            (Some(nodes), _) => (nodes.master_addr.clone(), nodes.master_port),
            (None, Some(store)) => master_of(store.local_addr()),
            (None, None) => master_of(address),
        };
        let environment = JobEnvironment {
            local_world_size: self.ranks,
            world_size,
            first_rank: node_rank * self.ranks,
            master_addr,
            master_port,
            secret,
            cores: cores(),
        };
        Ok((environment, store))
    }

    /// Makes the log files, one per rank, none if not wanted.
    fn open_logs(&self) -> Result<Vec<Option<LogFile>>> {
        let first_rank = self
            .nodes
            .as_ref()
            .map_or(0, |nodes| nodes.rank * self.ranks);
        let open = |index| match &self.log_dir {
            Some(directory) => open_log(directory, first_rank + index).map(Some),
            None => Ok(None),
        };
        (0..self.ranks).map(open).collect()
    }
}

fn open_log(directory: &Path, rank: usize) -> Result<LogFile> {
    let path = directory.join(format!("rank-{rank}.log"));
    let file = std::fs::create_dir_all(directory).and_then(|()| std::fs::File::create(&path));
    match file {
        Ok(file) => Ok(LogFile { path, file }),
        Err(error) => Err(Error::environment_from(
            format!("can't write the log file {} (--log-dir)", path.display()),
            error,
        )),
    }
}

/// The pipes that the ranks print into.
fn sources(ranks: &mut [RankProcess<'_>]) -> Vec<Source> {
    let mut sources = Vec::new();
    for (index, process) in ranks.iter_mut().enumerate() {
        let rank = process.rank;
        let (stdout, stderr) = process.take_output();
        let mut add = |stream, pipe| {
            sources.push(Source {
                index,
                rank,
                stream,
                pipe,
            });
        };
        if let Some(pipe) = stdout {
            add(Stream::Stdout, pipe.into());
        }
        if let Some(pipe) = stderr {
            add(Stream::Stderr, pipe.into());
        }
    }
    sources
}

impl std::fmt::Debug for JobBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobBuilder")
            .field("program", &self.program.program)
            .field("args", &self.program.args)
            .field("ranks", &self.ranks)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}
