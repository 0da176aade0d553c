//! Starts test jobs of several processes, and the cases they run.

pub mod cases;
mod job;

pub use job::{RankOutput, TestJob};
