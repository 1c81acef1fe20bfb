//! What a recipe leaves open of the tiling, decided for the heaviest batch that will come.

use std::path::Path;

use tch::Device;

use super::build;
use crate::data::{Batch, Dataset, Splits, Tokenizer, largest_batches};
use crate::engine::{Engine, Settings};
use crate::files;
use crate::model::ModelConfig;
use crate::plan::{Alternative, Machine, Planner, TrainedPart};
use crate::recipe::{GradRecipe, KeepGraph, OpenKey, Recipe};
use crate::report::console;
use crate::units::{Bytes, Fault};

/// Batches that are weighed to find the heaviest. Where there are more, so many of them are, at even distances from the longest to the widest.
const MAX_BATCHES: usize = 24;

/// The batch of a training set, be it long or wide, whose step takes the most memory in the recipe's tiling.
pub fn heaviest(recipe: &Recipe, config: &ModelConfig, data: &Dataset, machine: Machine) -> Result<Batch, Fault> {
    let mut largest = largest_batches(data.lengths(), recipe.train.batch_size, recipe.data.order);
    if largest.len() > MAX_BATCHES {
        let last = largest.len() - 1;
        largest = (0..MAX_BATCHES).map(|index| largest[index * last / (MAX_BATCHES - 1)].clone()).collect();
    }
    let mut heaviest = None;
    for samples in &largest {
        let batch = data.batch(samples)?;
        if largest.len() == 1 {
            return Ok(batch);
        }
        let planned = plan(recipe, config, &batch, machine, |planner| planner.consider(recipe.grad.closed()))?;
        let weight = planned.device.unwrap_or(planned.host);
        if heaviest.as_ref().is_none_or(|(most, _)| weight > *most) {
            heaviest = Some((weight, batch));
        }
    }
    heaviest.map_or_else(|| data.batch(&[]), |(_, batch)| Ok(batch))
}

/// What is free for the scratch files of a run; `None` where its directory is not known yet, or the system does not tell.
pub fn disk_of_run(recipe: &Recipe, run: Option<&Path>) -> Option<Bytes> {
    free_in(&build::scratch_dir(recipe, run)?)
}

/// This machine, for steps that are no run's; to be called before a model is loaded, as [`Machine::here`] is.
pub fn machine_of_trial(recipe: &Recipe, device: Device) -> Machine {
    Machine::here(recipe.model.dtype, device).with_disk(free_in(&build::scratch_dir_or_temporary(recipe, None)))
}

/// Free bytes of the file system that holds `dir`, or would. Where that fails the step itself will say why.
fn free_in(dir: &Path) -> Option<Bytes> {
    files::free_space(&files::nearest_existing(dir)).ok()
}

/// Plans a recipe's step on `batch`: what `ask` wants to know of the planner.
pub fn plan<T>(
    recipe: &Recipe,
    config: &ModelConfig,
    batch: &Batch,
    machine: Machine,
    ask: impl FnOnce(&Planner<'_>) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let trained = TrainedPart::of(config, recipe.lora.as_ref())?;
    let kv = Settings::resolved(config, &recipe.kv_cache, &recipe.grad)?;
    ask(&Planner { recipe, config, kv: &kv, trained: &trained, batch, machine })
}

/// The recipe with nothing left open, and what its step on `batch` would take; says what was decided.
pub fn resolved(
    mut recipe: Recipe,
    config: &ModelConfig,
    batch: &Batch,
    machine: Machine,
) -> Result<(Recipe, Alternative), Fault> {
    recipe.kv_cache = Settings::resolved(config, &recipe.kv_cache, &recipe.grad)?;
    let is_open = !recipe.grad.open.is_empty();
    let planned = plan(&recipe, config, batch, machine, |planner| {
        if is_open { planner.decide(&recipe.grad).map(|decision| decision.chosen) } else { planner.keeping(&recipe.grad) }
    })?;
    if is_open {
        console::note(&format!("planned: {}; {} at the peak", planned.grad.tiling(), planned.words()));
    } else if !planned.fits {
        let found = "more than there is: `kvtune plan` says what would fit";
        console::note(&format!("a step would take {} at its peak, {found}", planned.words()));
    }
    recipe.grad = planned.grad.clone();
    Ok((recipe, planned))
}

/// A recipe with its data, in which nothing is open.
pub struct ResolvedRun {
    pub recipe: Recipe,
    /// What its heaviest step would take.
    pub planned: Alternative,
    pub engine: Engine,
    pub data: Splits,
    /// What it was planned for.
    pub machine: Machine,
}

/// What must be left free by a tiling that is to fit where one did not, though it was planned to.
const SMALLER_BY: u64 = 15;

/// The tiling that is chosen of those that take clearly less than the one that did not fit, in words.
pub(super) fn smaller(
    recipe: &Recipe,
    config: &ModelConfig,
    data: &Dataset,
    mut machine: Machine,
    planned: &Alternative,
) -> Option<String> {
    let less = |limit: Option<Bytes>, planned: Bytes| {
        let less = Bytes(planned.0 / 100 * (100 - SMALLER_BY));
        Some(limit.map_or(less, |limit| limit.min(less)))
    };
    match planned.device {
        Some(device) => machine.limits.device = less(machine.limits.device, device),
        None => machine.limits.host = less(machine.limits.host, planned.host),
    }
    let open = GradRecipe { open: OpenKey::ALL.to_vec(), keep_graph: KeepGraph::Auto, ..recipe.grad.clone() };
    let batch = heaviest(recipe, config, data, machine).ok()?;
    let chosen = plan(recipe, config, &batch, machine, |planner| planner.decide(&open)).ok()?.chosen;
    Some(format!("the planner would write `{}`: {} at the peak", chosen.grad.tiling(), chosen.words()))
}

/// With graphs that are kept another batch may be the heaviest than without. Keeps as many as fit in all, and says what is planned then.
fn with_fewer_graphs(
    recipe: &mut Recipe,
    config: &ModelConfig,
    data: &Dataset,
    machine: Machine,
    mut planned: Alternative,
) -> Result<Alternative, Fault> {
    while recipe.grad.keep_graph != KeepGraph::None {
        let batch = heaviest(recipe, config, data, machine)?;
        let heavier = plan(recipe, config, &batch, machine, |planner| planner.consider(recipe.grad.clone()))?;
        if heavier.fits {
            return Ok(heavier);
        }
        let (open, most) =
            (GradRecipe { keep_graph: KeepGraph::Auto, ..recipe.grad.clone() }, recipe.grad.keep_graph.cells() - 1);
        planned = plan(recipe, config, &batch, machine, |planner| planner.keeping(&open))?;
        recipe.grad.keep_graph = KeepGraph::of(planned.grad.keep_graph.cells().min(most));
    }
    Ok(planned)
}

/// Opens a recipe's data, shows them to `opened`, and decides what it leaves open for the heaviest batch; scratch files go to `run`.
pub fn resolved_with_data(
    recipe: Recipe,
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
    run: Option<&Path>,
    machine: Machine,
    opened: impl FnOnce(&Splits),
) -> Result<ResolvedRun, Fault> {
    let engine_of = |recipe: &Recipe| build::engine(recipe, config, tokenizer, run);
    let mut machine = machine.with_disk(disk_of_run(&recipe, run));
    // What is wrong with the recipe is said before the data are read.
    let engine = engine_of(&Recipe { grad: recipe.grad.closed(), ..recipe.clone() })?;
    let data = machine.including(|| build::open_data(&recipe, config, tokenizer))?;
    opened(&data);
    let held_out = data.validation.iter().flat_map(Dataset::lengths);
    engine.settings().check_fits(data.train.lengths().iter().chain(held_out).copied().max().unwrap_or(0))?;
    let batch = heaviest(&recipe, config, &data.train, machine)?;
    let (is_open, leaves_graphs) = (!recipe.grad.is_closed(), recipe.grad.keep_graph == KeepGraph::Auto);
    let (mut recipe, mut planned) = resolved(recipe, config, &batch, machine)?;
    if leaves_graphs && planned.fits {
        let kept = recipe.grad.keep_graph;
        planned = with_fewer_graphs(&mut recipe, config, &data.train, machine, planned)?;
        if recipe.grad.keep_graph != kept {
            console::note(&format!("planned: {}; {} at the peak", recipe.grad.tiling(), planned.words()));
        }
    }
    let engine = if is_open { engine_of(&recipe)? } else { engine };
    Ok(ResolvedRun { recipe, planned, engine, data, machine })
}
