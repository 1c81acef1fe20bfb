//! `kvtune completions` and `kvtune man`: what a shell and `man` know of the commands.

use std::fs;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use serde_json::json;

use crate::files::io_fault;
use crate::report::console;
use crate::units::Fault;

/// Prints the script by which a shell completes all commands of `whole`.
pub(super) fn completions(shell: Shell, mut whole: Command) -> Result<(), Fault> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut whole, "kvtune", &mut script);
    console::part(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for `whole`, and one for each of its commands.
pub(super) fn manual(dir: &Path, whole: Command) -> Result<(), Fault> {
    let written = fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(whole, dir));
    written.map_err(io_fault("write to", dir))?;
    console::outcome(&format!("wrote the manual pages to {}", dir.display()), &json!({ "wrote": dir }))
}
