//! The `burnrun` command.
fn main() {}
