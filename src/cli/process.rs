//! The process: arguments in, words and an exit code out.

use std::io::{self, Write};

use clap::Parser;
use signal_hook::low_level::exit;

use super::finetune::Ending;
use super::{Arguments, device, panics, run};
use crate::report::console;
use crate::units::Failure;

/// Variables of profilers that write what they have seen when the process ends in the ordinary way: CUPTI's, of Nsight, and LLVM's.
const PROFILERS: [&str; 3] = ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "LLVM_PROFILE_FILE"];

/// Runs the binary, and ends the process.
pub fn main() -> ! {
    let code = Arguments::try_parse().map_or_else(|error| refused(&error), |arguments| code_of(&arguments));
    let _ = io::stdout().flush();
    if PROFILERS.iter().any(|name| std::env::var_os(name).is_some()) {
        std::process::exit(code);
    }
    // At once: destructors of libtorch's thousands of operations would take as long as some verbs do, and everything of ours is gone.
    exit(code)
}

/// Says what is wrong with the arguments, or what was asked of the parser itself, as `--help`; returns the exit code.
fn refused(error: &clap::Error) -> i32 {
    // To a terminal that is gone nothing can be said.
    let _ = error.print();
    error.exit_code()
}

fn code_of(arguments: &Arguments) -> i32 {
    panics::silence();
    match device::telling_missing_kernels(|| panics::caught(|| run(arguments))) {
        Ok(Ending::Done) => 0,
        Ok(Ending::Interrupted(signal)) => 128 + signal,
        Err(error) => {
            console::error(&error, error.hint().as_deref());
            error.exit() as i32
        }
    }
}
