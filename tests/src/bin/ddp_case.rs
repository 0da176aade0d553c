//! One rank of a test job: runs the case named by its first argument, and fails
//! by panicking.

use burn_ddp_tests::cases;

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    cases::run(&name);
}
