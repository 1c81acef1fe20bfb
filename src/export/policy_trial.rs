//! One short prompt through a small cache of the trained policy: which token leaves when.

use serde::{Deserialize, Serialize};

use crate::data::{Batch, IGNORE, Sequence, Targets};
use crate::engine::{Engine, Settings};
use crate::head::Head;
use crate::model::{Model, ModelConfig};
use crate::recipe::{CacheLength, CacheRecipe, GradRecipe, Storage};
use crate::units::Fault;
use crate::verify::departures;

/// For each layer, KV head and token: the first query that does not see the token any more, `null` where it stays. Layers with windows have no heads.
pub(super) type Departures = Vec<Vec<Vec<Option<usize>>>>;

/// The test as the file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedTrial {
    pub prompt: Vec<u32>,
    /// Begin and end of the prompt's initial part.
    pub initial_part: (usize, usize),
    /// Slots of each layer's cache at most: smaller than in training, so that a short prompt evicts.
    pub cache_length: usize,
    pub chunk_size: usize,
    pub dtype: String,
    pub left: Departures,
}

pub struct PolicyTrial {
    engine: Engine,
    batch: Batch,
    cache_length: usize,
    chunk_size: usize,
}

/// The smallest cache that is tried.
const MIN_SLOTS: usize = 16;
/// A policy that needs a large cache makes the prompt long enough.
const MAX_CHUNK: usize = 64;
const CHUNKS: usize = 8;
/// What may count as the initial part of the prompt.
const INITIAL_PART: (usize, usize) = (0, 4);

impl PolicyTrial {
    /// The smallest cache that the policy gets along with, and a prompt with which it chooses eight times; one that evicts nothing is filled.
    pub fn smallest(config: &ModelConfig, kv: &CacheRecipe, grad: &GradRecipe) -> Result<Self, Fault> {
        let largest = kv.cache_length.by_layer(config.num_layers()).into_iter().max().unwrap_or(MIN_SLOTS);
        let wanted = kv.wanted_chunk_size();
        let mut cache_length = MIN_SLOTS;
        while cache_length < largest {
            let chunk_size = wanted.min(cache_length / 4).min(MAX_CHUNK);
            if let Ok(trial) = Self::new(config, kv, grad, cache_length, Some(chunk_size), None) {
                return Ok(trial);
            }
            cache_length *= 2;
        }
        Self::new(config, kv, grad, largest, kv.chunk_size, None)
    }

    /// With a cache of so many slots at most, and the prompt that was recorded or one that is long enough.
    pub(super) fn new(
        config: &ModelConfig,
        kv: &CacheRecipe,
        grad: &GradRecipe,
        cache_length: usize,
        chunk_size: Option<usize>,
        recorded: Option<&RecordedTrial>,
    ) -> Result<Self, Fault> {
        let lengths = kv.cache_length.by_layer(config.num_layers()).into_iter().map(|own| own.min(cache_length)).collect();
        let kv = CacheRecipe {
            cache_length: CacheLength::PerLayer(lengths),
            chunk_size,
            storage: Storage::Preallocated,
            randomize_chunk_sizes: false,
            ..kv.clone()
        };
        // Its chunks are those of a prompt, whatever is trained.
        let grad = GradRecipe { single_tokens_for_targets: false, ..grad.closed() };
        let settings = Settings::new(config, &kv, &grad)?;
        let chunk_size = settings.chunk_size();
        let (inputs, initial) = if let Some(recorded) = recorded {
            (recorded.prompt.clone(), recorded.initial_part)
        } else {
            let evicting = if settings.scope().is_some() { CHUNKS * chunk_size.min(MAX_CHUNK) + 1 } else { 0 };
            let tokens = cache_length + evicting;
            (ids(tokens.min(config.trained_positions()), config.vocab_size), INITIAL_PART)
        };
        let next = || inputs[1..].iter().map(|&id| i64::from(id)).chain([IGNORE]).collect();
        let (targets, head) = match config.num_classes {
            Some(_) => (Targets::Class(0), Head::ClassScores),
            None => (Targets::NextToken(next()), Head::NextToken),
        };
        let sequence = Sequence { sample: 0, inputs, targets, initial: Some(initial) };
        let engine = Engine::new(settings, head);
        Ok(Self { engine, batch: Batch { sequences: vec![sequence] }, cache_length, chunk_size })
    }

    pub fn run(&self, model: &Model) -> Result<Departures, Fault> {
        let (_, log) = self.engine.inspect(model, &self.batch, None, &mut |_, _| {})?;
        let layers = model.config().layers.iter().enumerate();
        layers
            .map(|(layer, spec)| {
                if spec.attention.rule.window.is_some() {
                    return Ok(Vec::new());
                }
                let when = |&query: &i64| (query != i64::MAX).then_some(query as usize);
                let of_sequence = departures(&log, layer, spec.attention.num_kv_heads)?.swap_remove(0);
                Ok(of_sequence.iter().map(|head| head.iter().map(when).collect()).collect())
            })
            .collect()
    }

    pub fn record(&self, model: &Model, dtype: &str) -> Result<RecordedTrial, Fault> {
        let sequence = &self.batch.sequences[0];
        Ok(RecordedTrial {
            prompt: sequence.inputs.clone(),
            initial_part: sequence.initial.unwrap_or(INITIAL_PART),
            cache_length: self.cache_length,
            chunk_size: self.chunk_size,
            dtype: dtype.to_owned(),
            left: self.run(model)?,
        })
    }
}

/// Twice what a prompt is recorded with beyond a cache of so many slots.
pub(super) fn longest_prompt(slots: usize) -> usize {
    slots.saturating_add(2 * CHUNKS * MAX_CHUNK)
}

/// Tokens without meaning, the same every time; none twice in a row.
fn ids(count: usize, vocab_size: usize) -> Vec<u32> {
    let mut state = 1u64;
    let mut next = || {
        // Knuth's MMIX generator.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab_size as u64) as u32
    };
    (0..count).map(|_| next()).collect()
}

/// The first token that leaves at another time than was recorded, in words.
pub(super) fn first_difference(recorded: &Departures, found: &Departures) -> Option<String> {
    let tokens = recorded.iter().zip(found).enumerate().flat_map(|(layer, (expected, found))| {
        expected.iter().zip(found).enumerate().flat_map(move |(head, (expected, found))| {
            expected.iter().zip(found).enumerate().map(move |(token, when)| (layer, head, token, when))
        })
    });
    let at = |when: &Option<usize>| when.unwrap_or(usize::MAX);
    let first = tokens.filter(|(.., (expected, found))| expected != found).min_by_key(|(.., (a, b))| at(a).min(at(b)));
    let words = |when: &Option<usize>| when.map_or("stays".to_owned(), |query| format!("leaves before query {query}"));
    first.map(|(layer, head, token, (expected, found))| {
        format!("layer {layer}, KV head {head}, token {token} {}, recorded: {}", words(found), words(expected))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_difference_is_named() {
        let recorded = vec![vec![], vec![vec![Some(9), Some(20), None]], vec![vec![Some(8), Some(12), None]]];
        let mut found = recorded.clone();
        assert_eq!(first_difference(&recorded, &found), None);
        (found[1][0][1], found[2][0][2]) = (Some(24), Some(16));
        let text = first_difference(&recorded, &found).unwrap();
        assert_eq!(text, "layer 2, KV head 0, token 2 leaves before query 16, recorded: stays");
        found[2][0][2] = None;
        assert!(first_difference(&recorded, &found).unwrap().starts_with("layer 1, KV head 0, token 1 leaves before query 24"));
    }
}
