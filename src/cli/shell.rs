//! `kvtune completions` and `kvtune man`: what a shell and `man` know of the commands.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use serde_json::json;

use crate::files::io_fault;
use crate::report::console;
use crate::units::Fault;

#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell that reads the script.
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

#[derive(Debug, Args)]
pub(super) struct ManPages {
    /// Directory to write them to; it is made if it is not there.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

impl Completions {
    /// Prints the script for all commands of `whole`.
    pub(super) fn run(&self, mut whole: Command) -> Result<(), Fault> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut whole, "kvtune", &mut script);
        console::part(&String::from_utf8_lossy(&script))
    }
}

impl ManPages {
    /// Writes a page for `whole`, and one for each of its commands.
    pub(super) fn run(&self, whole: Command) -> Result<(), Fault> {
        let written = fs::create_dir_all(&self.dir).and_then(|()| clap_mangen::generate_to(whole, &self.dir));
        written.map_err(io_fault("write to", &self.dir))?;
        console::outcome(&format!("wrote the manual pages to {}", self.dir.display()), &json!({ "wrote": self.dir }))
    }
}
