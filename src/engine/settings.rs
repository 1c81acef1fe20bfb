//! What an engine is built from, checked once: policies and lengths by layer, chunk size, cells.

use std::ops::Range;

use tch::{Device, Kind};

use super::chunks;
use super::slots::{Extent, FixedCaches, Slots, too_long};
use super::{ChunkPlan, ColumnWidth, Cuts, RandomSizes};
use crate::cache::{self, CacheShape, ChunkSpan, Policy, PolicyTraits, Scope, log_bytes_per_token};
use crate::data::{Batch, IGNORE};
use crate::model::{CapturedLayers, LayerSpec, ModelConfig};
use crate::recipe::{AttentionOutputs, BufferKind, CacheRecipe, Chunking, GradRecipe, Storage, StoreForm};
use crate::units::{Bytes, Fault, StepKey};

#[derive(Debug)]
pub struct Settings {
    pub(super) policies: Vec<Box<dyn Policy>>,
    slots: Vec<Slots>,
    /// With the size of chunks that was found.
    kv_cache: CacheRecipe,
    grad: GradRecipe,
    /// Tokens of a column per slot of the longest cache, where its chunks are not given: `multiplier · 2GD/E`.
    tokens_per_slot: f64,
}

impl Settings {
    /// Checks a recipe's cache and gradient sections against the model. Refuses a gradient section with open keys.
    pub fn new(config: &ModelConfig, kv: &CacheRecipe, grad: &GradRecipe) -> Result<Self, Fault> {
        if !grad.open.is_empty() {
            let written: Vec<String> = grad.open.iter().map(|key| format!("`grad.{key} = \"auto\"`")).collect();
            let were = if written.len() == 1 { "was" } else { "were" };
            let hint = "`kvtune plan --recipe FILE` says what it would choose; write that";
            return Err(Fault::usage(format!("{} {were} not decided", written.join(", ")), hint));
        }
        let recipe_lengths = kv.cache_length.by_layer(config.num_layers());
        if recipe_lengths.len() != config.num_layers() {
            let (found, layers) = (recipe_lengths.len(), config.num_layers());
            let message = format!("`kv_cache.cache_length` lists {found} lengths, the model has {layers} layers");
            return Err(Fault::usage(message, "give one number for all layers, or one per layer"));
        }
        let grows = kv.storage != Storage::Preallocated;
        let slots_of = |(layer, length): (&LayerSpec, &usize)| match layer.attention.rule.window {
            Some(window) => Slots::Window(window),
            None if grows => Slots::Growing,
            None => Slots::Fixed(*length),
        };
        let slots: Vec<Slots> = config.layers.iter().zip(&recipe_lengths).map(slots_of).collect();
        let policies = policies(&slots, &recipe_lengths, |length| cache::build(&kv.policy, length))?;
        let widest = config.layers.iter().map(|layer| layer.attention.num_kv_heads * layer.attention.head_dim).max().unwrap_or(0);
        let tokens_per_slot = grad.chunks_per_cell_multiplier * (2.0 * widest as f64 / config.hidden_size as f64);
        let mut settings = Self { policies, slots, kv_cache: kv.clone(), grad: grad.clone(), tokens_per_slot };
        // A chunk of decoding is no longer than one of a prompt.
        let fitting = || settings.fixed_caches().fitting_chunk_size(kv.wanted_chunk_size()).max(kv.decode_block);
        settings.kv_cache.chunk_size = Some(kv.chunk_size.unwrap_or_else(fitting));
        settings.check_policies(&kv.policy.name)?;
        Ok(settings)
    }

    /// A recipe's cache section with the chunk size that these settings have.
    pub fn resolved(config: &ModelConfig, kv: &CacheRecipe, grad: &GradRecipe) -> Result<CacheRecipe, Fault> {
        Ok(Self::new(config, kv, &grad.closed())?.kv_cache)
    }

    /// Whether the policies, which errors call `name`, get along with chunks and buffer.
    fn check_policies(&self, name: &str) -> Result<(), Fault> {
        self.fixed_caches().check(self.chunk_size())?;
        if self.kv_cache.buffer == BufferKind::Plain && self.policies.iter().any(|policy| policy.traits().needs_quantised) {
            let plain = name.strip_prefix('q').map(|plain| format!(", or write `policy = \"{plain}\"`"));
            let hint = format!("set `kv_cache.buffer = \"int8\"` or `\"int4\"`{}", plain.unwrap_or_default());
            let message =
                format!("the policy `{name}` weighs the errors of quantisation, and `kv_cache.buffer = \"plain\"` makes none");
            return Err(Fault::usage(message, hint));
        }
        Ok(())
    }

    /// The recipe's section, with the size of chunks that was found.
    pub fn kv_cache(&self) -> &CacheRecipe {
        &self.kv_cache
    }

    pub fn grad(&self) -> &GradRecipe {
        &self.grad
    }

    /// Whether a cell that is computed again uses the attention outputs of the forward phase.
    pub fn keeps_attention_outputs(&self) -> bool {
        self.grad.attention_outputs == AttentionOutputs::Keep
    }

    /// What is not exact in the gradient of a model that is trained from a layer on: the stores that round, by their keys in the recipe. A
    /// single band of all layers has no layer checkpoint, a cache that nothing leaves no undo log.
    pub fn inexact_stores(&self, first_trained: usize) -> Vec<(&'static str, StoreForm)> {
        let has_borders = self.trained_bands(first_trained).iter().any(|band| band.start > 0);
        let overwrites = self.policies.iter().any(|policy| !policy.traits().keeps_all);
        let stores = [
            ("grad.layer_checkpoints", self.grad.layer_checkpoints.form, has_borders),
            ("grad.undo_log", self.grad.undo_log.form, overwrites),
        ];
        let rounds = |(key, form, is_used)| (is_used && form != StoreForm::Plain).then_some((key, form));
        stores.into_iter().filter_map(rounds).collect()
    }

    /// Whether the choices of one sequence of a batch depend on the others.
    pub fn couples_sequences(&self) -> bool {
        self.policies.iter().any(|policy| policy.traits().couples_sequences)
    }

    /// The settings with a policy of the caller's own; `build` makes it for a layer of so many slots, errors call it `name`.
    pub fn with_policy(mut self, name: &str, build: impl Fn(usize) -> Result<Box<dyn Policy>, Fault>) -> Result<Self, Fault> {
        let lengths: Vec<usize> = self.slots.iter().map(|slots| slots.fixed().unwrap_or(usize::MAX)).collect();
        self.policies = policies(&self.slots, &lengths, build)?;
        self.check_policies(name)?;
        Ok(self)
    }

    /// The caches of all layers for a batch planned as `plan`, of a model that computes in a kind on a device.
    pub fn cache_shapes(&self, config: &ModelConfig, plan: &ChunkPlan, kind: Kind, device: Device) -> Vec<CacheShape> {
        let extent = Extent { sequences: plan.num_sequences(), tokens: plan.len(), longest_chunk: plan.longest_chunk() };
        self.shapes_of(config, extent, kind, device)
    }

    pub(super) fn shapes_of(
        &self,
        config: &ModelConfig,
        Extent { sequences, tokens, longest_chunk }: Extent,
        kind: Kind,
        device: Device,
    ) -> Vec<CacheShape> {
        let shape = |(i, (slots, layer)): (usize, (&Slots, &LayerSpec))| {
            let is_paged = *slots == Slots::Growing && self.kv_cache.storage == Storage::Paged;
            CacheShape {
                batch: sequences as i64,
                groups: layer.attention.num_kv_heads as i64,
                head_dim: layer.attention.head_dim as i64,
                model_feature: self.policies[i].traits().model_feature,
                further: &[],
                cache_length: slots.count(tokens, longest_chunk),
                allocated: slots.allocated_at_once(tokens, longest_chunk, is_paged),
                is_paged,
                buffer: self.kv_cache.buffer,
                is_offloaded: self.kv_cache.cpu_offload,
                kind,
                device,
            }
        };
        self.slots.iter().zip(&config.layers).enumerate().map(shape).collect()
    }

    /// What runs the layers of so many sessions that write texts at a time: captured where a device has graphs, and all widths are fixed.
    pub fn session_layers(&self, sessions: usize, device: Device) -> Result<CapturedLayers, Fault> {
        let Some(width) = self.static_width().filter(|_| self.grad.cuda_graphs) else { return Ok(CapturedLayers::default()) };
        Ok(CapturedLayers::new(device)?.over(1, width).over(sessions, 1))
    }

    pub fn policy(&self, layer: usize) -> &dyn Policy {
        &*self.policies[layer]
    }

    /// Layer bands, as ranges of layers, bottom first: of the layers below `first_trained`, and of the others.
    pub fn layer_bands(&self, first_trained: usize) -> Vec<Range<usize>> {
        [chunks::layer_bands(0..first_trained, self.grad.layers_per_cell), self.trained_bands(first_trained)].concat()
    }

    /// The layer bands that the backward phase differentiates, without the layers below `first_trained`; bottom first.
    pub fn trained_bands(&self, first_trained: usize) -> Vec<Range<usize>> {
        chunks::layer_bands(first_trained..self.policies.len(), self.grad.layers_per_cell)
    }

    fn fixed_caches(&self) -> FixedCaches<'_> {
        FixedCaches::of(&self.slots, &self.policies, self.kv_cache.chunking, self.kv_cache.randomize_chunk_sizes)
    }

    /// Slots of each layer for a batch planned as `plan`.
    pub fn slots(&self, plan: &ChunkPlan) -> Vec<usize> {
        self.slots.iter().map(|slots| slots.count(plan.len(), plan.longest_chunk())).collect()
    }

    /// Slots of each layer in caches that keep everything, but for sliding windows, of a sequence of `tokens` in chunks of at most `chunk`.
    pub fn slots_of_full_cache(&self, tokens: usize, chunk: usize) -> Vec<usize> {
        let kept = |slots: &Slots| if slots.fixed().is_some() { Slots::Growing } else { *slots };
        self.slots.iter().map(|slots| kept(slots).count(tokens, chunk)).collect()
    }

    /// Slots of each layer whose entries leave by the recipe's policy; `None` of sliding windows and of caches that grow.
    pub fn policy_slots(&self) -> Vec<Option<usize>> {
        self.slots.iter().map(|slots| slots.fixed()).collect()
    }

    /// Fails if a sequence of so many tokens is too long for a cache that evicts nothing.
    pub fn check_fits(&self, tokens: usize) -> Result<(), Fault> {
        for (layer, (policy, slots)) in self.policies.iter().zip(&self.slots).enumerate() {
            if let Some(cache_length) = slots.fixed().filter(|&slots| policy.traits().keeps_all && tokens > slots) {
                return Err(too_long(tokens, layer, cache_length));
            }
        }
        Ok(())
    }

    /// The most tokens of a sequence: what a cache holds that evicts nothing and does not grow.
    pub fn longest_sequence(&self) -> usize {
        let keeps = |layer: &usize| self.policy(*layer).traits().keeps_all;
        (0..self.policies.len()).filter(keeps).filter_map(|layer| self.slots[layer].fixed()).min().unwrap_or(usize::MAX)
    }

    /// Tokens of a chunk whose size is not drawn.
    pub fn chunk_size(&self) -> usize {
        self.kv_cache.wanted_chunk_size()
    }

    /// Tokens that are decided upon together in decoding; one where nothing ever leaves.
    pub fn decode_block(&self) -> usize {
        if self.keeps_all() { 1 } else { self.kv_cache.decode_block }
    }

    /// Whether nothing that the model can still see ever leaves a cache.
    pub fn keeps_all(&self) -> bool {
        self.scope().is_none()
    }

    /// Whether [`Self::keeps_all`] holds, and every entry is seen exactly as it was computed.
    pub fn keeps_all_exactly(&self) -> bool {
        self.keeps_all() && self.kv_cache.buffer == BufferKind::Plain
    }

    /// Whether sequences that have the same first `tokens` tokens, and more, see the same there, if a chunk ends there in one. Where no cache
    /// has a fixed size, chunks end where the prompt does, which matters only if entries are rounded behind their own chunk.
    pub fn cuts_the_same_behind(&self, tokens: usize) -> bool {
        let is_same = self.fixed_caches().smallest().map_or(self.kv_cache.buffer == BufferKind::Plain, |span| tokens >= span);
        self.kv_cache.chunking == Chunking::Plain && is_same
    }

    /// How many heads or sequences one choice serves at least; `None` where nothing ever leaves.
    pub fn scope(&self) -> Option<Scope> {
        let is_window = |slots: &Slots| matches!(slots, Slots::Window(_));
        let of_recipe = self.slots.iter().position(|slots| !is_window(slots)).unwrap_or(0);
        self.policies.get(of_recipe).map(|policy| policy.traits()).filter(|traits| !traits.keeps_all).map(|traits| traits.scope)
    }

    /// Bytes of a layer's replay log at most, without the routing of experts: of one evicted entry of all heads, and of a batch planned as `plan`.
    pub fn log_bytes(&self, layer: usize, plan: &ChunkPlan, num_kv_heads: usize) -> (Bytes, Bytes) {
        let PolicyTraits { keeps_all: false, scope, budgets, .. } = self.policies[layer].traits() else {
            return Default::default();
        };
        let length = self.slots[layer].count(plan.len(), plan.longest_chunk());
        // A share may be twice the cache length.
        let slots = if budgets.is_some() { 2 * length } else { length };
        let bytes = |sequences| log_bytes_per_token(scope, slots, sequences, num_kv_heads);
        let chosen = |span: &ChunkSpan| span.evictions(span.start.min(length), length) as u64 * bytes(span.num_sequences()).0;
        let (per_token, mut whole) = (bytes(plan.num_sequences()), plan.spans.iter().map(chosen).sum());
        // And says once of each entry whether it leaves when the shares are made.
        if budgets.is_some() {
            whole += per_token.0 * self.chunk_size() as u64 + (plan.num_sequences() * num_kv_heads * length) as u64;
        }
        (per_token, Bytes(whole))
    }

    /// The chunks and columns of a batch. Without a key no size is drawn: all are `chunk_size`.
    pub fn plan(&self, batch: &Batch, key: Option<StepKey>) -> Result<ChunkPlan, Fault> {
        let lengths: Vec<usize> = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
        let (cuts, key) = (self.cuts_as_they_come(), key.filter(|_| self.kv_cache.randomize_chunk_sizes));
        let sizes = key.map(|key| RandomSizes::new(key, self.chunk_size(), cuts.span));
        let singles_from = if self.grad.single_tokens_for_targets { first_target(batch) } else { None };
        self.plan_by(&lengths, &Cuts { sizes, singles_from, ..cuts })
    }

    /// The plan of sequences of `lengths` tokens that nobody has read yet: no size is drawn, and no tokens are run one by one.
    pub fn plan_unread(&self, lengths: &[usize]) -> Result<ChunkPlan, Fault> {
        self.plan_by(lengths, &self.cuts_as_they_come())
    }

    fn plan_by(&self, lengths: &[usize], cuts: &Cuts) -> Result<ChunkPlan, Fault> {
        if lengths.is_empty() || lengths.contains(&0) {
            return Err(Fault::data(
                "the batch has a sequence without tokens",
                "look at the data: every sample needs tokens, every batch a target",
            ));
        }
        let tokens = lengths.iter().copied().max().unwrap_or(0);
        self.check_fits(tokens)?;
        Ok(ChunkPlan::cut(lengths, cuts, self.column_width(tokens)))
    }

    /// How wide the columns of sequences of at most `tokens` tokens are.
    pub(super) fn column_width(&self, tokens: usize) -> ColumnWidth {
        let longest = self.slots.iter().map(|slots| slots.count(tokens, self.chunk_size())).max().unwrap_or(1);
        // The rule of the reference: one layer checkpoint of a cell weighs as much as one cache.
        let by_slots = || ColumnWidth::Tokens((self.tokens_per_slot * longest as f64) as usize);
        self.grad.chunks_per_cell.map_or_else(by_slots, ColumnWidth::Chunks)
    }

    /// The cuts of sequences of which nothing is known beforehand.
    pub(super) fn cuts_as_they_come(&self) -> Cuts {
        let caches = self.fixed_caches();
        Cuts {
            span: caches.smallest().unwrap_or(usize::MAX),
            chunk_size: self.chunk_size(),
            full_at: caches.full_at(),
            block: self.decode_block(),
            shared_budget: caches.smallest().filter(|_| self.policies.iter().any(|policy| policy.traits().shares_over_layers())),
            ..Cuts::default()
        }
    }

    /// The columns' width in tokens where texts are generated at fixed widths.
    pub(super) fn static_width(&self) -> Option<usize> {
        self.kv_cache.r#static.then(|| self.longest_chunk())
    }

    pub(super) fn longest_chunk(&self) -> usize {
        let bent = if self.kv_cache.chunking == Chunking::Reference { chunks::BENT_BY } else { 0 };
        self.chunk_size() + bent
    }
}

/// The policy of each layer: a rolling buffer in one with a sliding window, in the others what `build` makes for a cache of so many slots.
fn policies(
    slots: &[Slots],
    lengths: &[usize],
    build: impl Fn(usize) -> Result<Box<dyn Policy>, Fault>,
) -> Result<Vec<Box<dyn Policy>>, Fault> {
    let of_layer = |(slots, &length): (&Slots, &usize)| match slots {
        Slots::Window(_) => Ok(cache::rolling()),
        Slots::Fixed(_) | Slots::Growing => build(length),
    };
    slots.iter().zip(lengths).map(of_layer).collect()
}

fn first_target(batch: &Batch) -> Option<usize> {
    let of_sequence = |sequence: &crate::data::Sequence| match sequence.targets.labels() {
        Some(labels) => labels.iter().position(|&label| label != IGNORE),
        None => sequence.inputs.len().checked_sub(1),
    };
    batch.sequences.iter().filter_map(of_sequence).min()
}
