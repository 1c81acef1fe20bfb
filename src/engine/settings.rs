//! What an engine is built from, checked once: policies and lengths by layer, chunk size, cells.

use super::{ChunkPlan, ColumnWidth, EngineError};
use crate::cache::{self, CacheError, Policy};
use crate::model::ModelConfig;
use crate::recipe::{CacheLength, CacheRecipe, GradRecipe, LayerCheckpoints, Storage};
use crate::units::LayerIdx;

/// Checked settings of an engine.
#[derive(Debug)]
pub struct Settings {
    pub(super) policies: Vec<Box<dyn Policy>>,
    /// Slots of each layer; `usize::MAX` for a cache that grows.
    pub(super) cache_lengths: Vec<usize>,
    pub(super) chunk_size: usize,
    pub(super) grows: bool,
    pub(super) layers_per_cell: usize,
    pub(super) checkpoints: LayerCheckpoints,
    width: Width,
}

#[derive(Debug)]
enum Width {
    Chunks(usize),
    /// Tokens per slot of the longest cache: `multiplier · 2GD/E`.
    TokensPerSlot(f64),
}

impl Settings {
    /// Checks a recipe's cache and gradient sections against the model.
    pub fn new(config: &ModelConfig, kv: &CacheRecipe, grad: &GradRecipe) -> Result<Self, EngineError> {
        let recipe_lengths = match &kv.cache_length {
            CacheLength::Uniform(length) => vec![*length; config.num_layers],
            CacheLength::PerLayer(lengths) if lengths.len() == config.num_layers => lengths.clone(),
            CacheLength::PerLayer(lengths) => {
                return Err(CacheError::WrongNumberOfLengths { found: lengths.len(), expected: config.num_layers }.into());
            }
        };
        let policies = recipe_lengths.iter().map(|&c| cache::build(&kv.policy, c)).collect::<Result<Vec<_>, _>>()?;
        check_chunk_size(kv.chunk_size, &recipe_lengths, &policies)?;
        let grows = kv.storage == Storage::Growing;
        let cache_lengths = if grows { vec![usize::MAX; config.num_layers] } else { recipe_lengths };
        let per_slot = 2.0 * (config.num_kv_heads * config.head_dim) as f64 / config.hidden_size as f64;
        let width = match grad.chunks_per_cell {
            Some(chunks) => Width::Chunks(chunks),
            None => Width::TokensPerSlot(grad.chunks_per_cell_multiplier * per_slot),
        };
        let (layers_per_cell, checkpoints) = (grad.layers_per_cell.min(config.num_layers), grad.layer_checkpoints);
        Ok(Self { policies, cache_lengths, chunk_size: kv.chunk_size, grows, layers_per_cell, checkpoints, width })
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

    /// The chunks and columns of a batch whose rows have so many tokens.
    pub fn plan(&self, lengths: &[usize]) -> Result<ChunkPlan, EngineError> {
        if lengths.is_empty() || lengths.contains(&0) {
            return Err(EngineError::EmptyRow);
        }
        let tokens = lengths.iter().copied().max().unwrap_or(0);
        self.check_fits(tokens)?;
        let longest = self.cache_lengths.iter().map(|&c| c.min(tokens.max(1))).max().unwrap_or(1);
        let width = match self.width {
            Width::Chunks(chunks) => ColumnWidth::Chunks(chunks),
            // The rule of the reference: one layer checkpoint of a cell weighs as much as one cache.
            Width::TokensPerSlot(factor) => ColumnWidth::Tokens((factor * longest as f64) as usize),
        };
        let span = self.cache_lengths.iter().copied().min().unwrap_or(tokens);
        Ok(ChunkPlan::new(lengths, span, self.chunk_size, width))
    }
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
    Err(CacheError::ChunkTooLarge { chunk_size, layer, cache_length, sinks, grace, largest })
}
