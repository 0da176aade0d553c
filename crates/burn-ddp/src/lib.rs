//! Distributed data-parallel training for [Burn](https://burn.dev): one process
//! per device, gradients averaged while the backward pass runs.

mod accumulation;
mod bucket_buffer;
mod bucket_plan;
mod buffers;
mod checkpoint;
mod ddp;
mod device;
mod fingerprint;
mod gradients;
mod hook;
mod parameters;
mod pass;
mod reducer;
mod replicate;

pub use accumulation::Accumulation;
pub use burn_ddp_comm::{Error, ErrorKind, GroupConfig, ProcessGroup, ReduceOp, Result, Work};
pub use checkpoint::{Checkpointer, Restored};
pub use ddp::{Ddp, DdpConfig};
pub use device::{cpu, cuda_device, device};
pub use fingerprint::Fingerprint;
pub use reducer::{Reduction, SyncStats, UnusedParameters};
