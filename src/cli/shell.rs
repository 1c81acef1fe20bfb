//! `kvtune completions` and `kvtune man`: what a shell and `man` know of the commands.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use serde_json::json;

use crate::files::io_fault;
use crate::report::console;
use crate::units::Fault;

/// Print the script by which a shell completes the commands.
#[derive(Debug, Args)]
pub(super) struct Completions {
    /// The shell that reads the script.
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// Write the manual pages, which `man` shows.
#[derive(Debug, Args)]
pub(super) struct ManPages {
    /// Directory to write them to; it is made if it is not there.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

impl Completions {
    pub(super) fn run(&self, mut parser: Command) -> Result<(), Fault> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut parser, "kvtune", &mut script);
        console::part(&String::from_utf8_lossy(&script))
    }
}

impl ManPages {
    pub(super) fn run(&self, parser: Command) -> Result<(), Fault> {
        let written = fs::create_dir_all(&self.dir).and_then(|()| clap_mangen::generate_to(parser, &self.dir));
        written.map_err(io_fault("write to", &self.dir))?;
        console::outcome(&format!("wrote the manual pages to {}", self.dir.display()), &json!({ "wrote": self.dir }))
    }
}
