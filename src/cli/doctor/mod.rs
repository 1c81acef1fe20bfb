//! `kvtune doctor`: what this machine has for kvtune, whether it works, and why not.

mod check;
mod gpu;
mod graphs;
mod host;
mod product;
mod round;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::device::Wanted;
use super::evaluate::Format;
use crate::error::Error;
use crate::report::console;
use crate::report::table::Table;
use check::{DoctorCheck, Promise, State};
use round::Round;

#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// Where scratch files would be; the room there is told.
    #[arg(long, value_name = "DIR", default_value = ".")]
    scratch_dir: PathBuf,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as `--format json`.
    #[arg(long)]
    json: bool,
}

impl Doctor {
    /// Takes what is wanted and not a device: what is wrong with it is what this verb is asked.
    pub(super) fn run(&self, wanted: Wanted, threads: Option<u16>) -> Result<(), Error> {
        let is_json = self.json || self.format == Format::Json;
        let round = Round { wanted, threads, scratch: self.scratch_dir.clone() };
        let promise = round.promise();
        let mut checks: Vec<DoctorCheck> = Vec::new();
        round.make(|check| {
            if is_json {
                console::result(&check.to_json().to_string())?;
            }
            checks.push(check);
            Ok::<(), Error>(())
        })?;
        let of = |state| checks.iter().filter(move |check| check.state == state);
        if is_json {
            let counts = [State::Ok, State::Missing, State::Failed].map(|state| of(state).count());
            console::result(&summary(promise, counts))?;
        } else {
            console::result(&table(&checks).to_string())?;
            for (name, hint) in of(State::Failed).filter_map(|check| Some((&check.name, check.hint?))) {
                console::result(&format!("{name}: {hint}"))?;
            }
        }
        let failed: Vec<String> = of(State::Failed).map(|check| check.name.clone()).collect();
        if failed.is_empty() { Ok(()) } else { Err(Error::DoctorFailed { checks: failed }) }
    }
}

fn summary(promise: Promise, [ok, missing, failed]: [usize; 3]) -> String {
    json!({ "kind": "summary", "promised": promise.name(), "ok": ok, "missing": missing, "failed": failed }).to_string()
}

fn table(checks: &[DoctorCheck]) -> Table {
    let mut table = Table::of_words(&["what", "state", "found"]);
    for check in checks {
        table.row(&[&check.name, check.state.name(), &check.found]);
    }
    table
}
