//! The rehearsal: short steps of the run's own shape, whose time by part says what its whole steps take.

use std::time::Instant;

use tch::Device;

use super::FallbackEngine;
use super::MicroBatchAssignment;
use super::step::{StepCallback, TrainStep};
use super::{RunRanks, TrainError};
use crate::data::{Batch, Sequence, Targets};
use crate::dist::ProcessGroup;
use crate::engine::{Engine, Event, MemoryByPart, Observer, Settings};
use crate::head::NextToken;
use crate::model::{Adapter, Model, ModelConfig, kind_of, on_every_layer};
use crate::optim;
use crate::measure::Stopwatch;
use crate::plan::{StepPart, StepSpec, StepTimes, StepWork, TrainedPart};
use crate::recipe::{CacheLength, CacheRecipe, GradRecipe, KeepGraph, LoraRecipe, Recipe, Storage, StoreRecipe};

/// Layers of the rehearsed model, as one layer band: what is replayed is a forward again.
const LAYERS: usize = 2;
/// Its vocabulary at most: the head takes time in proportion.
const VOCABULARY: usize = 8192;
/// Chunks of a sequence that does not fill the cache, and of wide columns where the run has narrow ones.
const CHUNKS: usize = 4;
/// Tokens of a chunk, all sequences together, below which it is not made shorter.
const SHORTEST_CHUNK: usize = 32;
/// Operations of a rehearsed step at most, as long as its chunks can be made shorter.
const OPERATIONS_CPU: f64 = 2e10;
const OPERATIONS_CUDA: f64 = 4e12;
/// Rounds at least and at most. The first one warms up. Of the others the fastest counts, as other programs may slow one down.
const ROUNDS: (usize, usize) = (2, 20);
/// Seconds after which no further round begins.
const ENOUGH: f64 = 0.5;

/// The time of a recipe's steps on `batch`: what steps of a few layers take on a few random tokens, with random weights.
pub(super) fn times(recipe: &Recipe, config: &ModelConfig, batch: &Batch, device: Device) -> Result<StepTimes, TrainError> {
    let lengths = recipe.kv_cache.cache_length.by_layer(config.num_layers());
    let longest = lengths.into_iter().max().unwrap_or(recipe.kv_cache.wanted_chunk_size());
    // From all heights, as layers need not be alike.
    let some = config.layers.iter().step_by(config.num_layers().div_ceil(LAYERS)).cloned().collect();
    // Its tokens have targets, not classes: what is trained of the ends of a model counts little beside its layers.
    let vocab_size = config.vocab_size.min(VOCABULARY);
    let short = ModelConfig { layers: some, vocab_size, num_classes: None, has_score: false, ..config.clone() };
    let kv = CacheRecipe { cache_length: CacheLength::Uniform(longest), randomize_chunk_sizes: false, ..recipe.kv_cache.clone() };
    // The run's own width, where its columns have several chunks: libraries keep kernels of each shape.
    let plan = Settings::new(config, &recipe.kv_cache, &recipe.grad.closed())?.plan(batch, None)?;
    let own = plan.columns.iter().map(ExactSizeIterator::len).max().filter(|&chunks| chunks > 1);
    let widths = [1, own.unwrap_or(CHUNKS)];
    // The few layers stand for all of them, whichever have an adapter.
    let lora = recipe.lora.as_ref().map(|lora| on_every_layer(config, lora)).transpose()?.map(LoraRecipe::for_drawn_weights);
    let recipe = Recipe { kv_cache: kv, lora, ..recipe.clone() };
    let mut rehearsal = Rehearsal { recipe, config: short, device, widths };
    let batch = rehearsal.choose_size((batch.sequences.len(), batch.max_len()), longest)?;
    rehearsal.times(&batch)
}

struct Rehearsal {
    recipe: Recipe,
    config: ModelConfig,
    device: Device,
    /// Chunks of a cell in the two steps that are compared.
    widths: [usize; 2],
}

impl Rehearsal {
    /// The longest of some batches that is rehearsed quickly. Sets the chunk size to that of its chunks.
    fn choose_size(&mut self, (sequences, tokens): (usize, usize), slots: usize) -> Result<Batch, TrainError> {
        let budget = if self.device.is_cuda() { OPERATIONS_CUDA } else { OPERATIONS_CPU };
        let longest = self.recipe.kv_cache.wanted_chunk_size().min(tokens);
        let shortest = SHORTEST_CHUNK.div_ceil(sequences);
        let halves = std::iter::successors(Some(longest), |&chunk| (chunk > shortest).then(|| chunk.div_ceil(2).max(shortest)));
        // A full cache and two chunks that evict.
        let full = (self.recipe.kv_cache.storage == Storage::Preallocated).then(|| (longest, slots.saturating_add(2 * longest)));
        let mut batch = Batch { sequences: Vec::new() };
        for (chunk, length) in full.into_iter().chain(halves.map(|chunk| (chunk, CHUNKS * chunk))) {
            self.recipe.kv_cache.chunk_size = Some(chunk);
            batch = random_batch(sequences, length.min(tokens), self.config.vocab_size);
            if self.work(&batch, self.widths[0])?.total_operations() <= budget {
                break;
            }
        }
        Ok(batch)
    }

    /// The tiling of a width: one layer band, what waits is plain and in memory, and no graph is kept, so that every part is timed.
    fn grad(&self, chunks: usize) -> GradRecipe {
        GradRecipe {
            layers_per_cell: LAYERS,
            chunks_per_cell: Some(chunks),
            layer_checkpoints: StoreRecipe::PLAIN,
            undo_log: StoreRecipe::PLAIN,
            single_tokens_for_targets: false,
            keep_graph: KeepGraph::None,
            open: Vec::new(),
            ..self.recipe.grad.clone()
        }
    }

    fn settings(&self, chunks: usize) -> Result<Settings, TrainError> {
        Ok(Settings::new(&self.config, &self.recipe.kv_cache, &self.grad(chunks))?)
    }

    /// What is counted in a step over columns of so many chunks.
    fn work(&self, batch: &Batch, chunks: usize) -> Result<StepWork, TrainError> {
        let (settings, trained) = (self.settings(chunks)?, TrainedPart::of(&self.config, self.recipe.lora.as_ref())?);
        let spec = StepSpec::of(&self.recipe, &self.config, &settings, &trained, self.device);
        Ok(StepWork::of(&spec, &settings.plan(batch, None)?, (batch.num_tokens(), batch.num_targets())))
    }

    fn model(&self) -> Result<Model, TrainError> {
        let (Recipe { model, lora, train, .. }, config) = (&self.recipe, self.config.clone());
        let Some(lora) = lora else {
            return Ok(Model::drawn_to_train_as(model, config, model.dtype, self.device)?);
        };
        let adapter = Adapter::new(&config, lora, train.seed, kind_of(model.dtype), self.device)?;
        Ok(Model::drawn_as(config, model.dtype, self.device)?.with_adapter(adapter))
    }

    fn times(&self, batch: &Batch) -> Result<StepTimes, TrainError> {
        let model = self.model()?;
        let mut optimizer = optim::build(&self.recipe.optimizer, self.recipe.train.offload, &model.parameters(), self.device);
        let engine = |chunks| {
            let engine = Engine::new(self.settings(chunks)?, Box::new(NextToken));
            Ok(FallbackEngine::new(engine, self.recipe.kv_cache.clone(), self.grad(chunks)))
        };
        let mut engines = self.widths.into_iter().map(engine).collect::<Result<Vec<_>, TrainError>>()?;
        let mut fastest = self.widths.map(|_| [f64::INFINITY; 6]);
        let began = Instant::now();
        for round in 0..ROUNDS.1 {
            if round >= ROUNDS.0 && began.elapsed().as_secs_f64() > ENOUGH {
                break;
            }
            for (engine, fastest) in engines.iter_mut().zip(&mut fastest) {
                let ranks = &RunRanks::of(ProcessGroup::alone().into());
                let mut learner = TrainStep { recipe: &self.recipe, model: &model, engine, optimizer: &mut *optimizer, ranks };
                let share = MicroBatchAssignment::whole(vec![batch.clone()]);
                let mut watch = RehearsalWatch(Stopwatch::start(self.device));
                learner.step(&share, round as u64, self.recipe.optimizer.learning_rate, &mut watch)?;
                let (_, parts) = watch.0.stop();
                for (fastest, part) in fastest.iter_mut().zip(parts).filter(|_| round > 0) {
                    *fastest = fastest.min(part.seconds);
                }
            }
        }
        let [narrow, wide] = self.widths.map(|chunks| self.work(batch, chunks));
        Ok(StepTimes::from_steps([(narrow?, fastest[0]), (wide?, fastest[1])]))
    }
}

/// Tells the time of a step by part.
struct RehearsalWatch(Stopwatch);

impl Observer for RehearsalWatch {
    fn observe(&mut self, event: Event) {
        self.0.turn(event.into());
    }
}

impl StepCallback for RehearsalWatch {
    fn optimizer(&mut self, _memory: &dyn Fn() -> MemoryByPart) {
        self.0.turn(StepPart::Optimizer);
    }
}

/// Sequences of tokens that are spread over the vocabulary, with a target at each.
fn random_batch(sequences: usize, tokens: usize, vocabulary: usize) -> Batch {
    let inputs: Vec<u32> = (0..tokens).map(|at| (at * 7919 % vocabulary) as u32).collect();
    let targets = inputs.iter().map(|&id| i64::from(id)).collect();
    let sequence = Sequence { sample: 0, inputs, targets: Targets::NextToken(targets), initial: None };
    Batch { sequences: vec![sequence; sequences] }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::FeedForwardSpec;

    fn recipe(kv: &str, more: &str) -> Recipe {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let text = format!(
            "model.path = {model:?}\ndata = {{ format = 'tokens', train = 'none' }}\nkv_cache = {kv}\ngrad.layers_per_cell = 'auto'\n{more}"
        );
        Recipe::parse(text, Path::new("recipe.toml"), &[]).unwrap().recipe
    }

    #[test]
    fn every_kind_of_recipe_is_timed() {
        for (kv, more) in [
            ("{ policy = 'h2o', cache_length = 64, chunk_size = 16 }", ""),
            ("{ policy = 'lastrec', cache_length = [48, 64, 80], chunk_size = 16, randomize_chunk_sizes = true }", ""),
            ("{ policy = 'dense', storage = 'growing', chunk_size = 32 }", "train.weights = 'all'"),
            ("{ policy = 'keydiff', cache_length = 64, chunk_size = 16, buffer = 'int8' }", "model.dtype = 'bf16'"),
        ] {
            let recipe = recipe(kv, more);
            let config = ModelConfig::load(&recipe.model.path).unwrap();
            let times = times(&recipe, &config, &random_batch(2, 200, 512), Device::Cpu);
            let per_part = format!("{:?}", times.unwrap_or_else(|error| panic!("{kv}: {error}")));
            assert!(!per_part.contains("inf") && !per_part.contains("NaN"), "{kv}: {per_part}");
        }
    }

    #[test]
    fn a_rehearsal_is_as_long_as_it_may_be() {
        let sizes = |hidden_size: usize, chunk: usize, tokens: usize| {
            let recipe = recipe(&format!("{{ policy = 'h2o', cache_length = 1024, chunk_size = {chunk} }}"), "");
            let config = ModelConfig::load(&recipe.model.path).unwrap();
            let mut config = ModelConfig { hidden_size, ..config };
            for layer in &mut config.layers {
                let FeedForwardSpec::Dense { intermediate_size, .. } = &mut layer.feed_forward else { panic!("experts") };
                *intermediate_size = 4 * hidden_size;
            }
            let mut rehearsal = Rehearsal { recipe, config, device: Device::Cpu, widths: [1, CHUNKS] };
            let batch = rehearsal.choose_size((1, tokens), 1024).unwrap();
            (rehearsal.recipe.kv_cache.chunk_size.unwrap(), batch.max_len())
        };
        // A full cache and two chunks, or all that there is; then four chunks, which become shorter.
        assert_eq!(sizes(64, 256, 9000), (256, 1024 + 512));
        assert_eq!(sizes(64, 256, 700), (256, 700));
        assert_eq!(sizes(256, 256, 9000), (128, 4 * 128));
        assert_eq!(sizes(4096, 256, 9000), (32, 4 * 32));
    }
}
