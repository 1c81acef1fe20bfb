//! The binary `kvtune`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvtune::cli::main()
}
