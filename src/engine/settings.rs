//! What an engine is built from, checked once: policies and lengths by layer, chunk size, cells.

use std::ops::Range;
use std::path::PathBuf;

use tch::{Device, Kind};

use super::chunks::{self, BENT_BY};
use super::{ChunkKey, ChunkPlan, ColumnWidth, Cuts, Engine, EngineError, RandomSizes};
use crate::cache::{self, CacheError, CacheShape, Policy, Scope, log_bytes_per_token};
use crate::data::{Batch, IGNORE, Targets};
use crate::model::{CapturedLayers, ModelConfig};
use crate::recipe::{BufferKind, CacheRecipe, Chunking, GradRecipe, Storage, StoreForm, StoreRecipe};
use crate::units::{Bytes, LayerIdx};

/// Checked settings of an engine.
#[derive(Debug)]
pub struct Settings {
    pub(super) policies: Vec<Box<dyn Policy>>,
    /// Slots of each layer; `usize::MAX` for a cache that grows.
    pub(super) cache_lengths: Vec<usize>,
    sizes: Sizes,
    single_tokens_for_targets: bool,
    pub(super) storage: Storage,
    pub(super) buffer: BufferKind,
    pub(super) is_offloaded: bool,
    pub(super) layers_per_cell: usize,
    pub(super) layer_checkpoints: StoreRecipe,
    pub(super) undo_log: StoreRecipe,
    pub(super) scratch_dir: Option<PathBuf>,
    /// Whether a device with graphs may capture.
    has_cuda_graphs: bool,
    width: Width,
}

impl Engine {
    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// What decides how long chunks are.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    chunk_size: usize,
    chunking: Chunking,
    randomizes: bool,
}

#[derive(Debug)]
enum Width {
    Chunks(usize),
    /// Tokens per slot of the longest cache: `multiplier · 2GD/E`.
    TokensPerSlot(f64),
}

/// Attention runs once for each page, so that pages should not be small.
const CHUNKS_OF_A_PAGE: usize = 4;

impl Settings {
    /// Checks a recipe's cache and gradient sections against the model. Refuses a gradient section with open keys.
    pub fn new(config: &ModelConfig, kv: &CacheRecipe, grad: &GradRecipe) -> Result<Self, EngineError> {
        if !grad.open.is_empty() {
            return Err(EngineError::Open { keys: grad.open.clone() });
        }
        let recipe_lengths = kv.cache_length.by_layer(config.num_layers);
        if recipe_lengths.len() != config.num_layers {
            return Err(CacheError::WrongNumberOfLengths { found: recipe_lengths.len(), expected: config.num_layers }.into());
        }
        let policies = recipe_lengths.iter().map(|&c| cache::build(&kv.policy, c)).collect::<Result<Vec<_>, _>>()?;
        let grows = kv.storage != Storage::Preallocated;
        let cache_lengths = if grows { vec![usize::MAX; config.num_layers] } else { recipe_lengths };
        let per_slot = 2.0 * (config.num_kv_heads * config.head_dim) as f64 / config.hidden_size as f64;
        let width = match grad.chunks_per_cell {
            Some(chunks) => Width::Chunks(chunks),
            None => Width::TokensPerSlot(grad.chunks_per_cell_multiplier * per_slot),
        };
        let settings = Self {
            policies,
            cache_lengths,
            sizes: Sizes { chunk_size: kv.chunk_size, chunking: kv.chunking, randomizes: kv.randomize_chunk_sizes },
            storage: kv.storage,
            buffer: kv.buffer,
            is_offloaded: kv.cpu_offload,
            single_tokens_for_targets: grad.single_tokens_for_targets,
            layers_per_cell: grad.layers_per_cell.min(config.num_layers),
            layer_checkpoints: grad.layer_checkpoints,
            undo_log: grad.undo_log,
            scratch_dir: grad.scratch_dir.clone(),
            has_cuda_graphs: grad.cuda_graphs,
            width,
        };
        settings.check_policies(&kv.policy.name)?;
        Ok(settings)
    }

    /// Whether the policies, which errors call `name`, get along with chunks and buffer.
    fn check_policies(&self, name: &str) -> Result<(), EngineError> {
        check_chunk_size(self.sizes.chunk_size, &self.cache_lengths, &self.policies)?;
        check_longest_chunk(self.sizes, &self.cache_lengths, &self.policies)?;
        if self.buffer == BufferKind::Plain && self.policies.iter().any(|policy| policy.needs_quantised()) {
            return Err(CacheError::NothingQuantised { policy: name.to_owned() }.into());
        }
        Ok(())
    }

    /// Layers of a cell: at most those of the model.
    pub fn layers_per_cell(&self) -> usize {
        self.layers_per_cell
    }

    /// How entries are stored.
    pub fn buffer(&self) -> BufferKind {
        self.buffer
    }

    /// What is not exact in the gradient of a model: the stores that round, by their keys in the recipe. A single layer band has no
    /// layer checkpoint, a cache that nothing leaves no undo log.
    pub fn inexact_stores(&self) -> Vec<(&'static str, StoreForm)> {
        let has_borders = self.layers_per_cell < self.policies.len();
        let overwrites = self.policies.iter().any(|policy| policy.evicts());
        let stores = [
            ("grad.layer_checkpoints", self.layer_checkpoints.form, has_borders),
            ("grad.undo_log", self.undo_log.form, overwrites),
        ];
        let rounds = |(key, form, is_used)| (is_used && form != StoreForm::Plain).then_some((key, form));
        stores.into_iter().filter_map(rounds).collect()
    }

    /// Whether the choices of one sequence of a batch depend on the others.
    pub fn couples_sequences(&self) -> bool {
        self.policies.iter().any(|policy| policy.couples_sequences())
    }

    /// Whether the first layer band of the backward phase ends in the very hidden states that the forward phase has ended in: it is the
    /// only one, so that no layer checkpoint comes in between, and its caches are unwound exactly.
    pub fn makes_last_hidden_states_again(&self) -> bool {
        self.layer_bands().len() == 1 && self.undo_log.form == StoreForm::Plain
    }

    /// The settings with a policy of the caller's own; `build` makes it for a layer of so many slots, errors call it `name`.
    pub fn with_policy(
        mut self,
        name: &str,
        build: impl Fn(usize) -> Result<Box<dyn Policy>, CacheError>,
    ) -> Result<Self, EngineError> {
        self.policies = self.cache_lengths.iter().map(|&c| build(c)).collect::<Result<Vec<_>, _>>()?;
        self.check_policies(name)?;
        Ok(self)
    }

    /// The caches of all layers for a batch planned as `plan`, of a model that computes in a kind on a device.
    pub fn cache_shapes(&self, config: &ModelConfig, plan: &ChunkPlan, (kind, device): (Kind, Device)) -> Vec<CacheShape> {
        let longest_chunk = plan.spans.iter().map(|span| span.len).max().unwrap_or(1);
        let shape = |cache_length: &usize| {
            let cache_length = (*cache_length).min(plan.len());
            CacheShape {
                batch: plan.num_sequences() as i64,
                groups: config.num_kv_heads as i64,
                head_dim: config.head_dim as i64,
                cache_length,
                allocated: self.allocated(cache_length, longest_chunk),
                is_paged: self.storage == Storage::Paged,
                buffer: self.buffer,
                is_offloaded: self.is_offloaded,
                kind,
                device,
            }
        };
        self.cache_lengths.iter().map(shape).collect()
    }

    /// Sequences and tokens of the columns that are captured in passes without autograd on a device.
    pub fn captured_shapes(&self, plan: &ChunkPlan, device: Device) -> Vec<(usize, usize)> {
        if self.has_cuda_graphs { CapturedLayers::shapes(device, plan.shapes()) } else { Vec::new() }
    }

    /// The policy of a layer.
    pub fn policy(&self, layer: usize) -> &dyn Policy {
        &*self.policies[layer]
    }

    /// Layer bands, as ranges of layers, bottom first.
    pub fn layer_bands(&self) -> Vec<Range<usize>> {
        chunks::layer_bands(self.policies.len(), self.layers_per_cell)
    }

    /// How layer checkpoints and undo log wait.
    pub fn stores(&self) -> (StoreRecipe, StoreRecipe) {
        (self.layer_checkpoints, self.undo_log)
    }

    /// Slots to allocate at once of a cache of `cache_length`, for chunks of at most `chunk` tokens.
    fn allocated(&self, cache_length: usize, chunk: usize) -> usize {
        match self.storage {
            Storage::Preallocated => cache_length,
            Storage::Growing => chunk,
            Storage::Paged => chunk * CHUNKS_OF_A_PAGE,
        }
    }

    /// How many layers, from the bottom, are run forward a second time: all but those of the top layer band.
    pub fn replayed_layers(&self) -> usize {
        self.layer_bands().last().map_or(0, |top| top.start)
    }

    /// Slots of a layer; `None` for a cache that grows.
    pub fn cache_length(&self, layer: usize) -> Option<usize> {
        self.cache_lengths.get(layer).copied().filter(|&c| c != usize::MAX)
    }

    /// Fails if a sequence of so many tokens is too long for a cache that evicts nothing.
    pub fn check_fits(&self, tokens: usize) -> Result<(), EngineError> {
        for (layer, (policy, &cache_length)) in self.policies.iter().zip(&self.cache_lengths).enumerate() {
            if !policy.evicts() && tokens > cache_length {
                return Err(CacheError::Full { tokens, layer: LayerIdx(layer), cache_length }.into());
            }
        }
        Ok(())
    }

    /// How many a choice serves at least; `None` where nothing ever leaves.
    pub fn scope(&self) -> Option<Scope> {
        self.policies.first().filter(|policy| policy.evicts()).map(|policy| policy.scope())
    }

    /// Bytes of the replay log at most: for one evicted column of the batch in every layer, and for a whole batch planned as `plan`.
    pub fn log_bytes(&self, plan: &ChunkPlan, num_kv_heads: usize) -> (Bytes, Bytes) {
        let sequences = plan.num_sequences();
        let (mut per_token, mut whole) = (0, 0);
        for (policy, &length) in self.policies.iter().zip(&self.cache_lengths).filter(|(policy, _)| policy.evicts()) {
            let length = length.min(plan.len());
            // A share may be twice the cache length.
            let slots = if policy.shares_out().is_some() { 2 * length } else { length };
            let bytes = log_bytes_per_token(policy.scope(), slots, (sequences, num_kv_heads)).0;
            per_token += bytes;
            // And says once of each entry whether it leaves when the shares are made.
            let leaving = if policy.shares_out().is_some() { sequences * num_kv_heads * length } else { 0 };
            let evicted = plan.len() - length + if leaving > 0 { self.sizes.chunk_size } else { 0 };
            whole += bytes * evicted as u64 + leaving as u64;
        }
        (Bytes(per_token), Bytes(whole))
    }

    /// The chunks and columns of a batch. Without a key no size is drawn: all are `chunk_size`.
    pub fn plan(&self, batch: &Batch, key: Option<ChunkKey>) -> Result<ChunkPlan, EngineError> {
        let lengths: Vec<usize> = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
        if lengths.is_empty() || lengths.contains(&0) {
            return Err(EngineError::EmptySequence);
        }
        let tokens = lengths.iter().copied().max().unwrap_or(0);
        self.check_fits(tokens)?;
        let longest = self.cache_lengths.iter().map(|&c| c.min(tokens.max(1))).max().unwrap_or(1);
        let width = match self.width {
            Width::Chunks(chunks) => ColumnWidth::Chunks(chunks),
            // The rule of the reference: one layer checkpoint of a cell weighs as much as one cache.
            Width::TokensPerSlot(factor) => ColumnWidth::Tokens((factor * longest as f64) as usize),
        };
        Ok(ChunkPlan::cut(&lengths, &self.cuts(batch, key), width))
    }

    fn cuts(&self, batch: &Batch, key: Option<ChunkKey>) -> Cuts {
        let span = self.cache_lengths.iter().copied().min().unwrap_or(usize::MAX);
        let key = key.filter(|_| self.sizes.randomizes);
        Cuts {
            span,
            chunk_size: self.sizes.chunk_size,
            sizes: key.map(|key| RandomSizes::new(key, self.sizes.chunk_size, span)),
            full_at: full_at(self.sizes.chunking, &self.cache_lengths),
            singles_from: if self.single_tokens_for_targets { first_target(batch) } else { None },
        }
    }
}

/// The first position with a target in any sequence.
fn first_target(batch: &Batch) -> Option<usize> {
    let of_sequence = |sequence: &crate::data::Sequence| match &sequence.targets {
        Targets::NextToken(targets) => targets.iter().position(|&target| target != IGNORE),
        Targets::Class(_) => sequence.inputs.len().checked_sub(1),
    };
    batch.sequences.iter().filter_map(of_sequence).min()
}

/// The longest chunk that reaches the cache of a layer while that is full.
fn longest_chunk(sizes: Sizes, lengths: &[usize], layer: usize) -> usize {
    let Sizes { chunk_size, chunking, randomizes } = sizes;
    let cuts = Cuts { chunk_size, full_at: full_at(chunking, lengths), ..Cuts::default() };
    let smallest = lengths.iter().copied().min().unwrap_or(usize::MAX);
    let largest = cuts.full_at.last().copied().unwrap_or(0);
    if randomizes {
        let drawn = chunk_size.max(*RandomSizes::range(chunk_size, smallest).end());
        // Where the last cache is full nothing is bent any more, and the first chunk stands before all that are.
        let bent = if lengths[layer] < largest { (drawn + BENT_BY).min(largest - smallest) } else { 0 };
        return drawn.max(bent);
    }
    let (mut start, mut longest) = (smallest, chunk_size);
    while start < largest {
        let end = cuts.end(start, 1, usize::MAX);
        if start >= lengths[layer] {
            longest = longest.max(end - start);
        }
        start = end;
    }
    longest
}

/// Where chunks are bent to: the lengths at which caches become full.
fn full_at(chunking: Chunking, lengths: &[usize]) -> Vec<usize> {
    if chunking == Chunking::Plain {
        return Vec::new();
    }
    let mut full_at = lengths.to_vec();
    full_at.sort_unstable();
    full_at.dedup();
    full_at
}

/// Chunks that are drawn or bent can be longer than `chunk_size`, and must not evict themselves or a protected token either.
fn check_longest_chunk(sizes: Sizes, lengths: &[usize], policies: &[Box<dyn Policy>]) -> Result<(), EngineError> {
    let evicting: Vec<usize> = (0..lengths.len()).filter(|&layer| policies[layer].evicts()).collect();
    let allowed = |layer: usize| policies[layer].max_chunk_size(lengths[layer]);
    let fits = |size: usize, layer: usize| longest_chunk(Sizes { chunk_size: size, ..sizes }, lengths, layer) <= allowed(layer);
    let Some(&layer) = evicting.iter().find(|&&layer| !fits(sizes.chunk_size, layer)) else { return Ok(()) };
    let most = evicting.iter().map(|&layer| allowed(layer)).min().unwrap_or(0).min(sizes.chunk_size);
    Err(EngineError::LongestChunk {
        chunk_size: sizes.chunk_size,
        longest: longest_chunk(sizes, lengths, layer),
        layer,
        cache_length: lengths[layer],
        allowed: allowed(layer),
        largest: (1..=most).rev().find(|&size| evicting.iter().all(|&layer| fits(size, layer))).unwrap_or(0),
    })
}

fn check_chunk_size(chunk_size: usize, lengths: &[usize], policies: &[Box<dyn Policy>]) -> Result<(), CacheError> {
    let evicting = lengths.iter().zip(policies).enumerate().filter(|(_, (_, p))| p.evicts());
    let Some((layer, (&cache_length, policy))) = evicting.min_by_key(|(_, (c, p))| p.max_chunk_size(**c)) else {
        return Ok(());
    };
    let largest = policy.max_chunk_size(cache_length);
    if chunk_size <= largest {
        return Ok(());
    }
    let is_uniform = lengths.iter().all(|&c| c == cache_length);
    let layer = if is_uniform { "every layer".to_owned() } else { format!("layer {layer}") };
    let (sinks, grace) = (policy.sinks(), policy.grace());
    let share = policy.shares_out().map(|floor| (floor * cache_length as f64) as usize);
    let initial = policy.initial_part().map_or(0, |_| cache_length.saturating_sub(largest + sinks + grace));
    Err(CacheError::ChunkTooLarge { chunk_size, layer, cache_length, sinks, grace, share, initial, largest })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The bound holds for every plan, and is reached where no size is drawn.
        #[test]
        fn no_chunk_that_reaches_a_full_cache_is_longer_than_was_checked(
            lengths in prop::collection::vec(1usize..60, 1..4), chunk_size in 1usize..20, total in 1usize..120,
            (is_bent, is_drawn, seed) in (any::<bool>(), any::<bool>(), any::<u64>()),
        ) {
            let chunking = if is_bent { Chunking::Reference } else { Chunking::Plain };
            let checked = Sizes { chunk_size, chunking, randomizes: is_drawn };
            let span = *lengths.iter().min().unwrap();
            let sizes = is_drawn.then(|| RandomSizes::new(ChunkKey { seed, step: 1 }, chunk_size, span));
            let cuts = Cuts { span, chunk_size, sizes, full_at: full_at(chunking, &lengths), singles_from: None };
            let longest_of = |total: usize, cache_length: usize| {
                let spans = ChunkPlan::cut(&[total], &cuts, ColumnWidth::Chunks(1)).spans.into_iter();
                spans.filter(|s| s.start >= cache_length).map(|s| s.len).max().unwrap_or(0)
            };
            for (layer, &cache_length) in lengths.iter().enumerate() {
                let longest = longest_chunk(checked, &lengths, layer);
                prop_assert!(longest >= chunk_size && longest_of(total, cache_length) <= longest);
                prop_assert!(is_drawn || longest_of(200, cache_length) == longest);
            }
        }
    }
}
