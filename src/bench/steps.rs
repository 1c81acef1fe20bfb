//! A model, an engine and an optimiser that make steps on random tokens.

use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Device;

use super::parts::{BenchWatch, SyncsByPart};
use super::{CopyCost, StepRecord, gemm, tokens};
use crate::data::Batch;
use crate::dist::ProcessGroup;
use crate::engine::ChunkKey;
use crate::model::{Model, ModelConfig, ModelError};
use crate::ops::attention::Backend;
use crate::optim::{self, Optimizer};
use crate::plan::stopwatch::Stopwatch;
use crate::plan::{Alternative, Flops, StepSpec, TrainedPart};
use crate::profile::Profiler;
use crate::recipe::{Dtype, HeadRecipe, Labels, Recipe};
use crate::report::memory;
use crate::store::copier_of;
use crate::train::{
    self, FallbackEngine, MicroBatchAssignment, RunRanks, ShardedOptimizerState, StepOutcome, TrainError, TrainStep,
};
use crate::units::{Fault, Seconds};

/// Spread of an adapter's B matrices: at zero, half of the gradients would be zero.
const B_SPREAD: f64 = 0.02;

#[derive(Clone, Debug)]
pub struct Size {
    /// Of each sequence, or of all.
    pub tokens: Vec<usize>,
    /// Steps at the beginning that are not counted.
    pub warm_up: usize,
    /// Whether each step's memory is told by part.
    pub profiles_memory: bool,
    /// Whether it is counted what makes the host wait for the device, which takes time.
    pub counts_waits: bool,
}

/// Steps on random tokens, which all ranks make together, each with a batch of its own.
pub struct Bench {
    world: Rc<ProcessGroup>,
    recipe: Recipe,
    model: Model,
    engine: FallbackEngine,
    optimizer: Box<dyn Optimizer>,
    parts: ShardedOptimizerState,
    size: Size,
    profiler: Option<Profiler>,
    planned: Alternative,
    trained: TrainedPart,
    done: usize,
}

impl Bench {
    /// What a recipe would train, without its data; with `draws_weights`, of its model's directory only the `config.json` is read.
    pub fn new(
        mut recipe: Recipe,
        device: Device,
        size: Size,
        draws_weights: bool,
        world: &Rc<ProcessGroup>,
    ) -> Result<Self, Fault> {
        // Which tokens stand for the classes changes no figure, so that no tokenizer is needed to find out.
        if let HeadRecipe::SeqClassificationOnLogits(labels) = &mut recipe.head {
            *labels = Labels::Tokens((0..labels.len() as u32).collect());
        }
        let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model).map_err(TrainError::from)?)?;
        let batch = tokens::batch(&recipe, &config, &size.tokens, recipe.train.seed)?;
        let machine = train::machine_of_trial(&recipe, device).of_ranks(world.ranks_here(), world.size());
        let machine = machine.timed(recipe.model.dtype);
        let asked = BTreeMap::from([
            ("`--tokens`".to_owned(), format!("{:?}", size.tokens)),
            ("all weights are trained".to_owned(), recipe.lora.is_none().to_string()),
        ]);
        let (recipe, planned) =
            train::settled_alike(world, recipe, asked, |recipe| train::settled(recipe, &config, &batch, machine))?;
        let engine = train::engine(&recipe, &config, None, None)?;
        let engine = FallbackEngine::of_recipe(engine, &recipe, None);
        let trained = TrainedPart::of(&config, recipe.lora.as_ref()).map_err(TrainError::from)?;
        // A device's allocator is asked for its peak in any case.
        let mut profiler = if size.profiles_memory || device != Device::Cpu { Profiler::start(device) } else { None };
        let model = model(&recipe, device, draws_weights)?;
        if let (None, Some(adapter)) = (&recipe.model.adapter, model.adapter()) {
            adapter.set_b_normal(B_SPREAD, recipe.train.seed);
        }
        let parts = ShardedOptimizerState::new(&model, world);
        let optimizer = optim::build(&recipe.optimizer, recipe.train.offload, &parts.own(model.parameters()), device);
        if let Some(profiler) = &mut profiler {
            profiler.built(&model, optimizer.bytes());
        }
        let world = world.clone();
        Ok(Self { world, recipe, model, engine, optimizer, parts, size, profiler, planned, trained, done: 0 })
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn dtype(&self) -> Dtype {
        self.recipe.model.dtype
    }

    /// Sequences of a step's batch.
    pub fn sequences(&self) -> usize {
        self.recipe.train.batch_size.sequences()
    }

    pub fn attention(&self) -> String {
        let layers = &self.model.config().layers;
        let head_dim = layers.first().map_or(0, |layer| layer.attention.head_dim as i64);
        Backend::preferred(self.model.device(), self.model.kind(), head_dim).to_string()
    }

    /// What a step after the first should take.
    pub fn planned(&self) -> &Alternative {
        &self.planned
    }

    fn spec(&self) -> StepSpec<'_> {
        let (config, settings) = (self.model.config(), self.engine.engine().settings());
        let (threads, ranks) = (tch::get_num_threads() as usize, self.world.size());
        StepSpec { threads, ranks, ..StepSpec::of(&self.recipe, config, settings, &self.trained, self.model.device()) }
    }

    pub fn step(&mut self) -> Result<StepRecord, Fault> {
        let (seed, step) = (self.recipe.train.seed, self.done as u64);
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let own_seed = seed.wrapping_add(step * ranks as u64 + rank as u64);
        let batch = tokens::batch(&self.recipe, self.model.config(), &self.size.tokens, own_seed)?;
        let settings = self.engine.engine().settings();
        let plan = settings.plan(&batch, Some(ChunkKey { seed, step })).map_err(TrainError::from)?;
        let flops = Flops::of(&self.spec(), &plan, (batch.num_tokens(), batch.num_targets()));
        let device = self.model.device();
        let gemm = gemm::measure((self.model.kind(), device));
        let was_reset = memory::reset_peak();
        let mut profiler = self.profiler.take();
        // All begin together: what is measured before a step takes them differently long.
        self.world.barrier().map_err(TrainError::from)?;
        let (copier, copied) = (copier_of(device), self.copied());
        copier.measure(true);
        let waits = if self.size.counts_waits { SyncsByPart::start() } else { None };
        let mut watch = BenchWatch { device, stopwatch: Stopwatch::start(device), profiler: profiler.as_mut(), waits };
        let made = self.train(&batch, &mut watch)?;
        let waits = watch.waits.take().map(SyncsByPart::stop);
        let (whole, parts) = watch.stopwatch.stop();
        let copies = copier.waited().map_or_else(|| CopyCost::Made(Seconds(self.copied() - copied)), CopyCost::WaitedFor);
        copier.measure(false);
        let peak = memory::peak(was_reset);
        let profile = profiler.as_mut().map(|profiler| profiler.end(peak)).unwrap_or_default();
        self.done += 1;
        self.profiler = profiler;
        Ok(StepRecord {
            step: self.done,
            is_warm_up: self.done <= self.size.warm_up,
            whole,
            parts,
            tokens: batch.num_tokens() * ranks,
            tokens_run: plan.num_tokens_run() * ranks,
            flops,
            gemm,
            peak,
            device_peak: self.profiler.as_ref().and_then(Profiler::device_peak),
            memory: if self.size.profiles_memory { profile } else { Vec::new() },
            copies,
            waits,
            loss: made.loss,
            idle: made.idle,
        })
    }

    /// Seconds that the host has copied into stores and out of them, in all steps.
    fn copied(&self) -> f64 {
        let stores = self.engine.engine().stores();
        (stores.layer_checkpoints.copied() + stores.undo_log.copied() + stores.attention_outputs.copied()).as_secs_f64()
    }

    /// The step itself, as a run makes it.
    fn train(&mut self, batch: &Batch, watch: &mut BenchWatch<'_>) -> Result<StepOutcome, Fault> {
        let (rank, ranks) = (self.world.rank(), self.world.size());
        let rate = self.recipe.optimizer.learning_rate;
        let mut learner = TrainStep {
            recipe: &self.recipe,
            model: &self.model,
            engine: &mut self.engine,
            optimizer: &mut *self.optimizer,
            ranks: &RunRanks::of(self.world.clone()),
        };
        // All have as many targets.
        let targets = batch.num_targets() * ranks;
        let share = MicroBatchAssignment { batches: vec![batch.clone()], indices: vec![rank], micro_batches: ranks, targets };
        let made = learner.step(&share, self.done as u64, rate, watch)?;
        self.parts.exchange_updates(&self.world, &self.model).map_err(TrainError::from)?;
        Ok(made)
    }
}

/// The recipe's model with what is trained.
fn model(recipe: &Recipe, device: Device, draws_weights: bool) -> Result<Model, Fault> {
    tch::manual_seed(recipe.train.seed as i64);
    let model = if draws_weights { train::drawn_model(recipe, device) } else { train::model(recipe, device) };
    model.map_err(|error| match error {
        TrainError::Model(ModelError::NoWeights { dir }) => Fault::data(
            format!("no weights in `{}`", dir.display()),
            "give `--random-weights` to draw them, or name a model in safetensors",
        ),
        other => other.into(),
    })
}
