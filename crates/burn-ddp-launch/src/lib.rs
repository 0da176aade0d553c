//! Launches the ranks of a distributed job on this machine.
//!
//! [`Job`] starts a program as several processes, one per rank, tells each its
//! place through torchrun's environment variables, hosts the store in which
//! they meet, passes on what they print, and ends all of them when one fails.
//! The `burnrun` command is a thin front to it.

mod environment;
mod exit_watch;
mod guardian;
mod job;
mod line_splitter;
mod nodes;
mod nproc;
mod other_nodes;
mod outcome;
mod output;
mod panic_message;
mod rank_process;
mod report;
mod root_cause;
mod signals;
mod sink;
mod supervisor;

pub use job::{Job, JobBuilder};
pub use nodes::Nodes;
pub use nproc::{NprocPerNode, VisibleGpus, cores, visible_gpus};
pub use output::{Line, Stream};
pub use panic_message::PanicMessage;
pub use report::{ExitStatus, JobReport, Outcome, RankReport};
pub use root_cause::RootCause;
