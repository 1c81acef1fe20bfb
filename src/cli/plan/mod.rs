//! `kvtune plan`: the memory of a step before it is made, an estimate of its time, and the tiling that suits the machine.

pub(super) mod output;

use clap::Args;
use tch::Device;

use super::recipe_file::RecipeFile;
use super::values::{at_least_one, bytes};
use super::world::Joining;
use crate::data::{Batch, Tokenizer};
use crate::dist::ProcessGroup;
use crate::measure::random_batch;
use crate::model::ModelConfig;
use crate::plan::{Decision, Machine};
use crate::recipe::Recipe;
use crate::report::console;
use crate::train;
use crate::units::{Bytes, Fault};

/// Predict memory and time of a step, and choose the best tiling.
#[derive(Debug, Args)]
pub(super) struct Plan {
    #[command(flatten)]
    recipe: RecipeFile,
    /// Plan for sequences of N tokens, all of them targets, instead of the heaviest batch of the recipe's data.
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    tokens: Option<usize>,
    /// Plan for a GPU with this much memory, for example `40GB` or `80GiB`. If this machine has no GPU, no time is estimated.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    device_memory: Option<Bytes>,
    /// Host memory limit. Default: the available memory.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    host_memory: Option<Bytes>,
    /// Disk space for scratch files. Default: the free space of `grad.scratch_dir`, else of `output_dir`.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    scratch_space: Option<Bytes>,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl Plan {
    pub(super) fn run(&self, device: Device, world: &ProcessGroup) -> Result<(), Fault> {
        let recipe = self.recipe.load(device)?;
        train::check_even(world, &recipe)?;
        let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
        train::check_trained(&recipe, &config)?;
        train::check_data(&recipe, &config)?;
        let mut machine = Machine::here(recipe.model.dtype, device).of_ranks(world.ranks_here(), world.size());
        let here = machine;
        let batch = machine.including(|| self.batch(&recipe, &config, here))?;
        let machine = self.machine(&recipe, machine);
        if world.size() > 1 {
            let (ranks, here) = (world.size(), world.ranks_here());
            console::note(&format!("for one of {ranks} ranks, {here} of which share this machine's memory and disk"));
        }
        let decision = train::plan(&recipe, &config, &batch, machine, |planner| planner.decide(&recipe.grad))?;
        let Decision { chosen, alternatives: mut others } = decision;
        if recipe.grad.open.is_empty() {
            others = train::plan(&recipe, &config, &batch, machine, |planner| planner.alternatives(&recipe.grad))?;
        }
        others.retain(|other| other.grad != chosen.grad);
        if console::speech().is_json {
            output::print_json(&chosen, &others, machine)
        } else {
            output::print_tables(&chosen, &others, machine, &batch)
        }
    }

    /// The heaviest that will come.
    fn batch(&self, recipe: &Recipe, config: &ModelConfig, machine: Machine) -> Result<Batch, Fault> {
        let Some(tokens) = self.tokens else {
            let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
            let data = train::open_data(recipe, config, tokenizer.as_ref())?;
            console::note(&data.to_string());
            train::check_answers(recipe, &data)?;
            return train::heaviest(recipe, config, &data.train, machine);
        };
        random_batch(recipe, config, &[tokens], recipe.train.seed)
    }

    /// What is planned for: this machine, but for what the arguments say of it.
    fn machine(&self, recipe: &Recipe, mut machine: Machine) -> Machine {
        if self.device_memory.is_none() || machine.device.is_cuda() {
            machine = machine.timed(recipe.model.dtype);
        } else {
            machine.device = Device::Cuda(0);
        }
        machine.limits.device = self.device_memory.or(machine.limits.device);
        machine.limits.host = self.host_memory.or(machine.limits.host);
        machine = machine.with_disk(train::disk_of_run(recipe, None));
        machine.limits.files = self.scratch_space.or(machine.limits.files);
        machine
    }
}
