//! `kvtune doctor`: what this machine has for kvtune, whether it works, and why not.

mod check;
mod gpu;
mod host;
mod product;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::device::Wanted;
use super::evaluate::Format;
use crate::error::Error;
use crate::native::cuda::{CudaSupport, Numerics, device_nodes, load_cuda};
use crate::report::console;
use crate::report::table::Table;
use check::{Check, Promise, State};

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

/// A check that takes longer will not answer any more: a driver that hangs.
const PATIENCE: Duration = Duration::from_secs(20);

impl Doctor {
    pub(super) fn run(&self, wanted: Wanted, threads: Option<u16>) -> Result<(), Error> {
        let is_json = self.json || self.format == Format::Json;
        let promise = promise(wanted, !device_nodes().is_empty());
        let (sender, receiver) = channel();
        let scratch = self.scratch_dir.clone();
        let at_work = thread::spawn(move || examine(wanted, threads, promise, (&scratch, &sender)));
        let mut checks: Vec<Check> = Vec::new();
        loop {
            match receiver.recv_timeout(PATIENCE) {
                Ok(check) => {
                    if is_json {
                        console::result(&check.to_json().to_string())?;
                    }
                    checks.push(check);
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let check = silent(checks.last());
                    if is_json {
                        console::result(&check.to_json().to_string())?;
                    }
                    checks.push(check);
                    return Self::conclude(&checks, promise, is_json);
                }
            }
        }
        if let Err(panic) = at_work.join() {
            std::panic::resume_unwind(panic);
        }
        Self::conclude(&checks, promise, is_json)
    }

    fn conclude(checks: &[Check], promise: Promise, is_json: bool) -> Result<(), Error> {
        let of = |state| checks.iter().filter(|check| check.state == state).collect::<Vec<_>>();
        let failed = of(State::Failed);
        if is_json {
            let line = json!({
                "kind": "summary", "promised": promise.name(), "ok": of(State::Ok).len(), "missing": of(State::Missing).len(),
                "failed": failed.len(),
            });
            console::result(&line.to_string())?;
        } else {
            console::result(&table(checks).to_string())?;
            for (name, hint) in failed.iter().filter_map(|check| Some((&check.name, check.hint?))) {
                console::result(&format!("{name}: {hint}"))?;
            }
        }
        if failed.is_empty() {
            return Ok(());
        }
        Err(Error::Unwell { checks: failed.iter().map(|check| check.name.clone()).collect() })
    }
}

/// What must work: who asks for CUDA, or has a device, is promised that it computes.
fn promise(wanted: Wanted, has_device: bool) -> Promise {
    match wanted {
        Wanted::Cuda(_) => Promise::Cuda,
        Wanted::Auto if has_device => Promise::Cuda,
        Wanted::Auto | Wanted::Cpu => Promise::Cpu,
    }
}

/// Looks at everything, one after the other, and sends each check as soon as it is made.
fn examine(wanted: Wanted, threads: Option<u16>, promise: Promise, (scratch, sender): (&Path, &Sender<Check>)) {
    // Before any other call into libtorch, which would remember that there is no CUDA.
    let half = if wanted == Wanted::Cpu { CudaSupport::NoDevice } else { load_cuda() };
    if let Some(threads) = threads {
        tch::set_num_threads(i32::from(threads));
    }
    Numerics::default().set();
    // Who no longer listens has told already why.
    let say = |check| drop(sender.send(check));
    host::examine(scratch, say);
    match wanted {
        Wanted::Cpu => say(Check::lacking("CUDA", "not asked for: `--device cpu`", "", Promise::Cpu)),
        Wanted::Auto => gpu::examine(promise, 0, &half, say),
        Wanted::Cuda(index) => gpu::examine(promise, index, &half, say),
    }
}

fn silent(last: Option<&Check>) -> Check {
    let after = last.map_or("the start", |check| &check.name);
    let found = format!("no answer within {} s after `{after}`; what would have come is not looked at", PATIENCE.as_secs());
    Check::failed("patience", found, "look at `nvidia-smi` and `dmesg`; ask again with `--device cpu` to leave CUDA out")
}

fn table(checks: &[Check]) -> Table {
    let mut table = Table::of_words(&["what", "state", "found"]);
    for check in checks {
        table.row(&[&check.name, check.state.name(), &check.found]);
    }
    table
}
