//! `kvtune finetune-lora`, `kvtune finetune-full` and `kvtune resume`.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use chrono::Local;
use clap::Args;
use serde_json::json;
use tch::Device;

use super::recipe_file::{RecipePath, noted};
use super::world::Joining;
use crate::dist::ProcessGroup;
use crate::recipe::{Recipe, TrainedWeights};
use crate::report::console;
use crate::report::summary::RunSummary;
use crate::train::{self, Interrupt, RunOutcome, Start};
use crate::units::{Fault, shell_word};

/// The exit code of a verb that a signal has interrupted, as a shell has it.
pub(super) fn code_of_signal(signal: i32) -> i32 {
    128 + signal
}

#[derive(Debug, Args)]
pub(super) struct Finetune {
    #[command(flatten)]
    recipe: RecipePath,
    /// Directory of the run; must be empty or not exist. Default: the recipe's `output_dir`, else `runs/NAME-DATE` by the recipe's name.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Resume the run in the output directory if this command has begun one there, else begin it: for schedulers that restart jobs.
    #[arg(long)]
    resume_if_possible: bool,
    /// Print the memory of the heaviest step by part at the end, and write it to `summary.md`.
    #[arg(long)]
    profile_memory: bool,
    #[command(flatten)]
    pub(super) joining: Joining,
}

/// Resume a run from a checkpoint.
#[derive(Debug, Args)]
pub(super) struct Resume {
    /// The directory of the run.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Checkpoint to go on from; the newest valid one, if left out.
    #[arg(long, value_name = "step-000100")]
    from: Option<String>,
    /// Override a key of the recipe: length of the run, logging, saving, tiling (`grad.*`), `kv_cache.cpu_offload`, paths of model and data.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Print the memory of the heaviest step by part at the end, and write it to `summary.md`.
    #[arg(long)]
    profile_memory: bool,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl Finetune {
    pub(super) fn run(&self, weights: TrainedWeights, device: Device, world: &Rc<ProcessGroup>) -> Result<i32, Fault> {
        let recipe = noted(Recipe::load_to_train(self.recipe.path(), &self.set, weights)?);
        let out = self.out(&recipe, world)?;
        let interrupt = Interrupt::install_for_saves()?;
        let start = Start { device, interrupt: &interrupt, world, profiles_memory: self.profile_memory };
        let go = if self.resume_if_possible { train::resume_or_run } else { train::run };
        end(go(&recipe, &out, start)?, &out)
    }

    /// The directory of the run. One that nobody names has the first rank's time in it, for all ranks.
    fn out(&self, recipe: &Recipe, world: &ProcessGroup) -> Result<PathBuf, Fault> {
        let date = world.of_first("naming the run", || Ok(Local::now().format("%Y%m%d-%H%M%S").to_string()))?;
        if let Some(out) = self.out.as_ref().or(recipe.output_dir.as_ref()) {
            return Ok(out.clone());
        }
        if self.resume_if_possible {
            return Err(Fault::usage(
                "`--resume-if-possible` needs the directory of the run, and the default is another at each start",
                "give `--out DIR`, or `output_dir` at the top of the recipe",
            ));
        }
        let name = self.recipe.path().file_stem().unwrap_or_default().to_string_lossy();
        let out = Path::new("runs").join(format!("{name}-{date}"));
        console::note(&format!("the run is written to `{}`: neither `--out` nor `output_dir` names a directory", out.display()));
        Ok(out)
    }
}

impl Resume {
    pub(super) fn run(&self, device: Device, world: &Rc<ProcessGroup>) -> Result<i32, Fault> {
        let interrupt = Interrupt::install_for_saves()?;
        let start = Start { device, interrupt: &interrupt, world, profiles_memory: self.profile_memory };
        end(train::resume(&self.run, self.from.as_deref(), &self.set, start)?, &self.run)
    }
}

fn end(ended: RunOutcome, run: &Path) -> Result<i32, Fault> {
    let (last, run_name) = (run.join("final"), shell_word(run.display()));
    if let Some(memory) = ended.memory.filter(|_| !console::speech().is_json) {
        console::result(&format!("{memory}\n"))?;
    }
    let mut json = ended.summary.as_ref().map_or_else(|| json!({}), RunSummary::to_json);
    json["run"] = json!(run);
    ended.summary.iter().for_each(|summary| console::note(&summary.words()));
    if let Some(signal) = ended.signal {
        if console::speech().is_json {
            console::result(&json.to_string())?;
        }
        console::note(&format!("interrupted; go on with `kvtune resume {run_name}`"));
        return Ok(code_of_signal(signal));
    }
    json["final"] = json!(last);
    console::outcome(&format!("finished: {}", last.display()), &json)?;
    // A run without validation samples has others to look at.
    let has_validation = ended.summary.is_none_or(|summary| summary.eval_loss.is_some());
    let split = if has_validation { "" } else { " --split train" };
    console::note(&format!("next: kvtune evaluate {run_name}{split}\n      kvtune generate {run_name} --prompt \"…\""));
    Ok(0)
}
