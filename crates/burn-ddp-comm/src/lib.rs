//! Process groups and collectives for distributed training.

mod dtype;
mod error;
mod reduce_op;

pub use dtype::{DType, Element};
pub use error::{Error, ErrorKind, Result};
pub use reduce_op::ReduceOp;
