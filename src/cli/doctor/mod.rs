//! `kvtune doctor`: what this machine has for kvtune, whether it works, and why not.

mod check;
mod gpu;
mod host;
mod ranks;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::device::{Wanted, set_threads};
use super::world::Joining;
use crate::native::cuda::{CudaSupport, Numerics, device_nodes, load_cuda};
use crate::report::console;
use crate::report::table::Table;
use crate::units::{Exit, Fault};
use check::{DoctorCheck, State};

/// Check this machine: libtorch, CPU, driver, GPUs and CUDA libraries, and what does not work and why.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// Directory for scratch files, whose free space is reported.
    #[arg(long, value_name = "DIR", default_value = ".")]
    scratch_dir: PathBuf,
    /// Print JSON, as `--format json` does.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    joining: Joining,
}

impl Doctor {
    /// Takes what is wanted and not a device: what is wrong with it is what this verb is asked.
    pub(super) fn run(&self, wanted: Wanted, threads: Option<u16>) -> Result<(), Fault> {
        // Who asks for CUDA, or has a device, is promised that it computes.
        let promises_cuda = match wanted {
            Wanted::Cuda(_) => true,
            Wanted::Auto => !device_nodes().is_empty(),
            Wanted::Cpu => false,
        };
        let checks = self.examine(wanted, threads, promises_cuda)?;
        let of = |state| checks.iter().filter(move |check| check.state == state);
        if self.json || console::speech().is_json {
            checks.iter().try_for_each(|check| console::result(&check.to_json().to_string()))?;
            let [ok, missing, failed] = [State::Ok, State::Missing, State::Failed].map(|state| of(state).count());
            let promised = if promises_cuda { "cuda" } else { "cpu" };
            let summary = json!({ "kind": "summary", "promised": promised, "ok": ok, "missing": missing, "failed": failed });
            console::result(&summary.to_string())?;
        } else {
            let mut table = Table::of_words(&["what", "state", "found"]);
            for check in &checks {
                table.row(&[&check.name, check.state.name(), &check.found]);
            }
            console::table(&table)?;
            for (name, hint) in of(State::Failed).filter_map(|check| Some((&check.name, check.hint?))) {
                console::result(&format!("{name}: {hint}"))?;
            }
        }
        let failed: Vec<String> = of(State::Failed).map(|check| format!("`{}`", check.name)).collect();
        if failed.is_empty() {
            return Ok(());
        }
        Err(Fault::new(Exit::Failed, format!("promised here, and not working: {}", failed.join(", "))).with_hint(
            "the lines above say what to do; `--device cpu` works without CUDA, and `kvtune doctor --device cpu` looks without it",
        ))
    }

    fn examine(&self, wanted: Wanted, threads: Option<u16>, promises_cuda: bool) -> Result<Vec<DoctorCheck>, Fault> {
        // Before any other call into libtorch, which would remember that there is no CUDA.
        let half = if wanted == Wanted::Cpu { CudaSupport::NoDevice } else { load_cuda() };
        set_threads(threads)?;
        Numerics::default().set();
        let mut checks = host::examine(&self.scratch_dir);
        checks.extend(match wanted {
            Wanted::Cpu => vec![DoctorCheck::missing("CUDA", "not asked for: `--device cpu`")],
            Wanted::Auto => gpu::examine(promises_cuda, 0, &half),
            Wanted::Cuda(index) => gpu::examine(promises_cuda, index.unwrap_or(0), &half),
        });
        checks.extend(ranks::examine(self.joining, wanted));
        Ok(checks)
    }
}
