//! The binary under test, in surroundings that are the same on every machine.

use std::process::Command;

/// What a process needs of the machine that it runs on. Other variables (of colours, of the terminal's width, of libraries' threads, of
/// somebody's cache) would change what it says or does.
const NEEDED: [&str; 5] = ["PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL"];

/// `kvtune`, on one thread unless it is asked for more.
pub(crate) fn kvtune() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtune"));
    command.env_clear().envs(NEEDED.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.env("OMP_NUM_THREADS", "1");
    command
}
