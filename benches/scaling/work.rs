//! What the planner counts for a part of a model's layers: operations of a column, and memory of a step.

use std::collections::HashMap;
use std::iter::Sum;
use std::ops::Range;
use std::path::Path;

use kvtune::data::{Batch, IGNORE, Sequence, Targets};
use kvtune::engine::{ChunkPlan, Schedule, Settings};
use kvtune::measure::random_batch;
use kvtune::model::{ModelConfig, kind_of};
use kvtune::ops::attention::Queries;
use kvtune::plan::{Flops, Forecast, PlannedPeak, StepSpec, TrainedPart};
use kvtune::recipe::{GradRecipe, KeepGraph, Recipe};
use tch::Device;

use super::machine::Gpu;

/// One sequence through a model by a recipe. All layers are alike.
pub(crate) struct Subject {
    pub(crate) recipe: Recipe,
    pub(crate) config: ModelConfig,
    batch: Batch,
    pub(crate) plan: ChunkPlan,
}

/// Operations of a layer, or of several, for a column.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Operations {
    /// Of one pass without gradients.
    pub(crate) linear: f64,
    pub(crate) attention: f64,
    /// Of its queries, keys and values, which are all that a replay makes of its uppermost layer.
    pub(crate) written: f64,
    /// Of the gradients alone.
    pub(crate) linear_backward: f64,
    pub(crate) attention_backward: f64,
    /// What a policy's scores take in addition where it chooses.
    pub(crate) scores: f64,
}

impl Operations {
    fn zip(self, other: Self, each: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            linear: each(self.linear, other.linear),
            attention: each(self.attention, other.attention),
            written: each(self.written, other.written),
            linear_backward: each(self.linear_backward, other.linear_backward),
            attention_backward: each(self.attention_backward, other.attention_backward),
            scores: each(self.scores, other.scores),
        }
    }

    /// Seconds of a pass without gradients, that choices are replayed in.
    pub(crate) fn again(&self, gpu: &Gpu) -> f64 {
        self.linear / gpu.linear + self.attention / gpu.attention
    }

    /// Seconds of the forward phase, in which policies choose.
    pub(crate) fn forward(&self, gpu: &Gpu) -> f64 {
        self.again(gpu) + self.scores / gpu.attention
    }

    pub(crate) fn backward(&self, gpu: &Gpu) -> f64 {
        self.linear_backward / gpu.linear + self.attention_backward / gpu.attention_backward
    }
}

/// Operations of a column.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ColumnWork {
    /// Of the lowest layer, below which no gradient goes.
    pub(crate) lowest: Operations,
    /// Of any other layer.
    pub(crate) other: Operations,
    /// Of the head, its gradient with it.
    pub(crate) head: f64,
}

impl ColumnWork {
    /// Of some of the model's layers.
    pub(crate) fn of(&self, layers: &Range<usize>) -> Operations {
        let others = (layers.len() - usize::from(layers.contains(&0))) as f64;
        let scaled = self.other.zip(Operations::default(), |one, _| one * others);
        if layers.contains(&0) { scaled.zip(self.lowest, |all, lowest| all + lowest) } else { scaled }
    }
}

impl Sum for ColumnWork {
    fn sum<I: Iterator<Item = Self>>(columns: I) -> Self {
        let add = |a: f64, b: f64| a + b;
        columns.fold(Self::default(), |all, column| Self {
            lowest: all.lowest.zip(column.lowest, add),
            other: all.other.zip(column.other, add),
            head: all.head + column.head,
        })
    }
}

/// The most bytes at a time on a GPU, and what waits on the host for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Memory {
    pub(crate) device: f64,
    pub(crate) host: f64,
}

impl Subject {
    /// A recipe with some settings changed, on one sequence of so many tokens with a target at each.
    pub(crate) fn load(recipe: &Path, words: &[String], tokens: usize) -> Self {
        let recipe = Recipe::load(recipe, words).unwrap().recipe;
        let mut config = ModelConfig::load(&recipe.model).unwrap();
        // Positions cost nothing.
        config.max_position_embeddings = config.max_position_embeddings.max(tokens);
        Self::new(recipe, config, tokens)
    }

    pub(crate) fn new(recipe: Recipe, config: ModelConfig, tokens: usize) -> Self {
        assert!(config.layers.iter().all(|layer| *layer == config.layers[0]), "layers that differ are not simulated");
        let batch = random_batch(&recipe, &config, &[tokens], 1).unwrap();
        let settings = Settings::new(&config, &recipe.kv_cache, &recipe.grad).unwrap();
        let plan = settings.plan(&batch, None).unwrap();
        Self { recipe, config, batch, plan }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.plan.len()
    }

    /// Bytes of the hidden states of a column, as they go up, and of their gradient, as it goes down.
    pub(crate) fn hidden_bytes(&self, column: usize) -> f64 {
        (self.plan.tokens(&self.plan.columns[column]).1 * self.config.hidden_size * self.element()) as f64
    }

    /// Bytes of a number.
    pub(crate) fn element(&self) -> usize {
        kind_of(self.recipe.model.dtype).elt_size_in_bytes()
    }

    /// The order in which one device would run so many of the layers.
    pub(crate) fn schedule(&self, layers: usize) -> Schedule {
        self.step(layers, &self.recipe.grad, |spec| {
            Schedule::new(spec.settings, &self.plan, spec.trained.first_layer, spec.layers_wait())
        })
    }

    /// Calls `look` with a step through so many layers.
    pub(crate) fn step<T>(&self, layers: usize, grad: &GradRecipe, look: impl FnOnce(&StepSpec<'_>) -> T) -> T {
        let Recipe { kv_cache, lora, .. } = &self.recipe;
        let mut config = self.config.clone();
        config.layers.truncate(layers);
        let settings = Settings::new(&config, kv_cache, grad).unwrap();
        let trained = TrainedPart::of(&config, lora.as_ref()).unwrap();
        look(&StepSpec::of(&self.recipe, &config, &settings, &trained, Device::Cuda(0)))
    }

    /// The planner's count for so many layers in bands and a column alone: with a recomputation, or without.
    fn flops(&self, layers: usize, layers_per_cell: usize, column: &Range<usize>, recomputes: bool) -> Flops {
        let keep_graph = if recomputes { KeepGraph::None } else { KeepGraph::of(1) };
        let grad = GradRecipe { keep_graph, layers_per_cell, ..self.recipe.grad.clone() };
        let mut plan = self.plan.clone();
        plan.spans = self.plan.spans[column.clone()].to_vec();
        plan.columns = std::iter::once(0..plan.spans.len()).collect();
        let tokens = plan.spans.iter().map(|span| span.len).sum();
        self.step(layers, &grad, |spec| Flops::of(spec, &plan, tokens, tokens))
    }

    /// Of so many layers, by pass: what one more forward adds is the forward.
    fn operations(&self, layers: usize, column: &Range<usize>) -> Operations {
        let [twice, once] = [true, false].map(|recomputes| self.flops(layers, layers, column, recomputes));
        // Of two layers in two bands the lower one is replayed.
        let [bands, band] = [1, 2].map(|layers_per_cell| self.flops(2, layers_per_cell, column, true).linear);
        let (linear, attention) = (twice.linear - once.linear, twice.attention - once.attention);
        let traits = self.step(layers, &self.recipe.grad, |spec| {
            let traits = spec.settings.policy(0).traits();
            [traits.prefill_queries, traits.chunk_queries].map(|queries| matches!(queries, Some(Queries::All)))
        });
        let is_scored = traits[usize::from(self.plan.spans[column.start].start >= self.plan.prefill)];
        Operations {
            linear,
            attention,
            written: layers as f64 * (bands - band),
            linear_backward: once.linear - linear,
            attention_backward: once.attention - attention,
            // One product more beside the two of a forward.
            scores: if is_scored { attention / 2.0 } else { 0.0 },
        }
    }

    /// By column.
    pub(crate) fn columns(&self) -> Vec<ColumnWork> {
        let slots = self.step(1, &self.recipe.grad, |spec| spec.settings.slots(&self.plan)[0]);
        // Behind the tokens that fill the cache all columns of a length are alike.
        let mut known: HashMap<(usize, usize), ColumnWork> = HashMap::new();
        let columns = self.plan.columns.iter().map(|column| {
            let (start, tokens) = self.plan.tokens(column);
            *known.entry((start.min(slots), tokens)).or_insert_with(|| {
                let (lowest, two) = (self.operations(1, column), self.operations(2, column));
                let head = self.flops(1, 1, column, false).head;
                ColumnWork { lowest, other: two.zip(lowest, |two, one| two - one), head }
            })
        });
        columns.collect()
    }

    /// What a device takes that has these layers; with the head alone, at most what it takes with a layer.
    pub(crate) fn memory(&self, layers: &Range<usize>) -> Memory {
        let config = &self.config;
        if layers.is_empty() {
            return self.memory(&(layers.end - 1..layers.end));
        }
        let (is_first, is_last) = (layers.start == 0, layers.end == config.num_layers());
        let blank = || Batch { sequences: self.batch.sequences.iter().map(without_targets).collect() };
        let forecast = self.step(layers.len(), &self.recipe.grad, |spec| {
            if is_last { Forecast::of(spec, &self.plan, &self.batch) } else { Forecast::of(spec, &self.plan, &blank()) }
        });
        // The planner counts both ends of the model.
        let ends = [is_first, is_last && (!config.tie_word_embeddings || !is_first)];
        let counted = if config.tie_word_embeddings { 1 } else { 2 };
        let there = ends.iter().filter(|is_there| **is_there).count();
        let of_end = (config.vocab_size * config.hidden_size * self.element()) as f64;
        // A column comes, one goes, either way.
        let widest = (0..self.plan.columns.len()).map(|column| self.hidden_bytes(column)).fold(0.0, f64::max);
        let ways = usize::from(!is_first) + usize::from(!is_last);
        // What came is the input of the cells.
        let received = if is_first { 0 } else { self.tokens() * config.hidden_size * self.element() };
        let bytes = |peak: &PlannedPeak| peak.bytes().0 as f64;
        Memory {
            device: bytes(&forecast.device) + (there as f64 - f64::from(counted)) * of_end + (2 * ways) as f64 * widest,
            host: forecast.host.as_ref().map_or(0.0, bytes) + received as f64,
        }
    }
}

fn without_targets(sequence: &Sequence) -> Sequence {
    Sequence { targets: Targets::NextToken(vec![IGNORE; sequence.inputs.len()]), ..sequence.clone() }
}
