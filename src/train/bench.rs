//! A model, an engine and an optimiser that make steps on random tokens.

use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Device;

use super::meter::StepMeter;
use super::{MicroBatchAssignment, RunRanks, ShardedOptimizerState, TrainStep, as_headed, build, resolved_alike, tiling};
use crate::data::Batch;
use crate::dist::ProcessGroup;
use crate::engine::{Engine, Observer};
use crate::measure::{CopyCost, MemoryMeter, MemorySide, StepRecord, Stopwatch, gemm_rate, random_batch};
use crate::model::{Model, ModelConfig, kind_of};
use crate::native::{peak_memory, reset_peak_memory};
use crate::ops::attention::KernelsOfHeads;
use crate::optim::{self, Optimizer};
use crate::plan::{Alternative, Flops, StepSpec, TrainedPart};
use crate::recipe::{ClassList, HeadRecipe, Recipe};
use crate::report::console;
use crate::report::metrics::StepMetrics;
use crate::store::copier_of;
use crate::units::{Bytes, Fault, FaultKind, Seconds, StepKey};

#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Tokens of each sequence, or of all.
    pub tokens: Vec<usize>,
    /// Steps at the beginning that are not counted.
    pub warm_up: usize,
    /// Whether each step's memory is told by part.
    pub profiles_memory: bool,
    /// Whether only the `config.json` of the model is read, and its weights are drawn.
    pub draws_weights: bool,
}

/// Steps on random tokens, which all ranks make together, each with a batch of its own.
pub struct Bench {
    world: Rc<ProcessGroup>,
    pub recipe: Recipe,
    pub model: Model,
    engine: Engine,
    optimizer: Optimizer,
    parts: ShardedOptimizerState,
    options: BenchOptions,
    memory: Option<MemoryMeter>,
    /// What a step after the first should take.
    pub planned: Alternative,
    limit: Bytes,
    trained: TrainedPart,
    done: usize,
}

impl Bench {
    /// Builds what a recipe would train, without its data.
    pub fn new(mut recipe: Recipe, device: Device, options: BenchOptions, world: &Rc<ProcessGroup>) -> Result<Self, Fault> {
        // Which tokens stand for the classes changes no figure, so that no tokenizer is needed to find out.
        if let HeadRecipe::SeqClassificationOnLogits(labels) = &mut recipe.head {
            *labels = ClassList::Tokens((0..labels.count() as u32).collect());
        }
        let config = as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
        let batch = random_batch(&recipe, &config, &options.tokens, recipe.train.seed)?;
        let mut machine = tiling::machine_of_trial(&recipe, device).of_ranks(world.ranks_here(), world.size());
        machine.rate = Some(gemm_rate(kind_of(recipe.model.dtype), device).per_second);
        let asked = BTreeMap::from([
            ("`--tokens`".to_owned(), format!("{:?}", options.tokens)),
            ("all weights are trained".to_owned(), recipe.lora.is_none().to_string()),
        ]);
        let (recipe, planned) =
            resolved_alike(world, &recipe, asked, |recipe| tiling::resolved(recipe, &config, &batch, machine))?;
        let engine = build::engine(&recipe, &config, None, None)?;
        let trained = TrainedPart::of(&config, recipe.lora.as_ref())?;
        // A device's allocator is asked for its peak in any case.
        let mut memory = if options.profiles_memory || device != Device::Cpu { MemoryMeter::start(device) } else { None };
        let model = model(&recipe, device, options.draws_weights)?;
        build::draw_new_b(&recipe, &model);
        let parts = ShardedOptimizerState::new(&model, world);
        let optimizer = optim::build(&recipe.optimizer, recipe.train.offload, &parts.own(model.parameters()), device);
        if let Some(memory) = &mut memory {
            memory.built(&model, optimizer.bytes());
        }
        let (world, limit) = (world.clone(), planned.host);
        Ok(Self { world, recipe, model, engine, optimizer, parts, options, memory, planned, limit, trained, done: 0 })
    }

    /// What attends, and why other kernels are refused.
    pub fn attention(&self) -> String {
        let layers = &self.model.config().layers;
        let head_dim = layers.first().map_or(0, |layer| layer.attention.head_dim as i64);
        KernelsOfHeads::tried(self.model.device(), self.model.kind(), head_dim).text
    }

    fn spec(&self) -> StepSpec<'_> {
        let (config, settings) = (self.model.config(), self.engine.settings());
        let (threads, ranks) = (tch::get_num_threads() as usize, self.world.size());
        StepSpec { threads, ranks, ..StepSpec::of(&self.recipe, config, settings, &self.trained, self.model.device()) }
    }

    pub fn step(&mut self) -> Result<StepRecord, Fault> {
        let (seed, step) = (self.recipe.train.seed, self.done as u64);
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let own_seed = seed.wrapping_add(step * ranks as u64 + rank as u64);
        let batch = random_batch(&self.recipe, self.model.config(), &self.options.tokens, own_seed)?;
        let settings = self.engine.settings();
        let plan = settings.plan(&batch, Some(StepKey { seed, step }))?;
        let flops = Flops::of(&self.spec(), &plan, batch.num_tokens(), batch.num_targets());
        let device = self.model.device();
        let gemm = gemm_rate(self.model.kind(), device);
        let was_reset = reset_peak_memory();
        let mut meter = self.memory.take();
        // All begin together: what is measured before a step takes them differently long.
        self.world.barrier()?;
        let (copier, copied) = (copier_of(device), self.copied());
        copier.measure(true);
        let mut stopwatch = Stopwatch::start(device);
        let mut limit = self.limit;
        let step_meter =
            StepMeter { observer: &mut Notes, stopwatch: Some(&mut stopwatch), memory: meter.as_mut(), limit: Some(&mut limit) };
        let made = self.train(&batch, step_meter)?;
        self.limit = limit;
        let (whole, parts) = stopwatch.stop();
        let copies = copier.waited().map_or_else(|| CopyCost::Made(Seconds(self.copied() - copied)), CopyCost::WaitedFor);
        copier.measure(false);
        let peak = meter.as_ref().map_or_else(|| peak_memory().map(Bytes), |meter| meter.last_peak);
        let profiles = meter.as_mut().map(MemoryMeter::take).unwrap_or_default();
        let device_peak = profiles.iter().find(|profile| profile.side == MemorySide::Device);
        let device_peak = device_peak.map(|profile| Bytes(profile.most_tensors().max(0) as u64));
        self.done += 1;
        self.memory = meter;
        Ok(StepRecord {
            step: self.done,
            is_warm_up: self.done <= self.options.warm_up,
            whole,
            parts,
            tokens: batch.num_tokens() * ranks,
            tokens_run: plan.num_tokens_run() * ranks,
            flops,
            gemm,
            peak,
            peak_is_of_step: was_reset && peak.is_some(),
            device_peak,
            memory: if self.options.profiles_memory { profiles } else { Vec::new() },
            copies,
            loss: made.loss.unwrap_or(f64::NAN),
            idle: made.idle,
        })
    }

    /// Seconds that the host has copied into stores and out of them, in all steps.
    fn copied(&self) -> f64 {
        let stores = self.engine.stores();
        (stores.layer_checkpoints.copied() + stores.undo_log.copied() + stores.attention_outputs.copied()).as_secs_f64()
    }

    /// The step itself, as a run makes it.
    fn train(&mut self, batch: &Batch, mut meter: StepMeter<'_>) -> Result<StepMetrics, Fault> {
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let rate = self.recipe.optimizer.learning_rate;
        let mut learner = TrainStep {
            recipe: &self.recipe,
            model: &self.model,
            engine: &mut self.engine,
            optimizer: &mut self.optimizer,
            ranks: &RunRanks::of(self.world.clone()),
        };
        // All have as many targets.
        let targets = batch.num_targets() * ranks;
        let losses = batch.num_losses(self.recipe.train.loss_mean) * ranks;
        let share =
            MicroBatchAssignment { batches: vec![batch.clone()], indices: vec![rank], micro_batches: ranks, targets, losses };
        let made = learner.step(&share, self.done as u64, rate, &mut meter)?;
        self.parts.exchange_updates(&self.world, &self.model)?;
        Ok(made)
    }
}

struct Notes;

impl Observer for Notes {
    fn note(&mut self, text: &str) {
        console::note(text);
    }
}

fn model(recipe: &Recipe, device: Device, draws_weights: bool) -> Result<Model, Fault> {
    tch::manual_seed(recipe.train.seed as i64);
    build::model(recipe, device, draws_weights).map_err(|error| match error.kind() {
        FaultKind::NoWeights => {
            let message = format!("no weights in `{}`", recipe.model.path.display());
            Fault::data(message, "give `--random-weights` to draw them, or name a model in safetensors")
        }
        _ => error,
    })
}
