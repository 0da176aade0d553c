//! The checks of the repository: formatting, lints, documentation, tests.

use anyhow::Result;

use crate::cargo::{cargo, run};

/// `cargo xtask lint`: formatting, clippy and rustdoc, warnings denied.
pub(crate) fn lint() -> Result<()> {
    run(cargo(["fmt", "--all", "--check"]))?;
    run(cargo([
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "--deny",
        "warnings",
    ]))?;
    let mut doc = cargo(["doc", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "--deny warnings");
    run(doc)
}

/// `cargo xtask test`: every test of the workspace, with the lock-free code under
/// loom besides.
pub(crate) fn test() -> Result<()> {
    run(cargo(["test", "--workspace"]))?;
    // Loom replaces the atomics, so that it needs a build of its own.
    let mut loom = cargo(["test", "--package", "burn-ddp-comm", "--lib", "loom"]);
    loom.args(["--target-dir"])
        .arg(crate::cargo::target_directory().join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    run(loom)
}
