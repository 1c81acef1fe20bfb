//! What a recipe says of the cache: how the past is kept, and in which chunks it comes.

use std::cmp::Ordering;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use toml::Value;

use super::diagnose::Checked;
use super::policy_recipe::PolicyRecipe;
use super::table::table;
use super::tree::Document;
use super::value::{COUNT, KeyRule, RecipeValue};
use super::words::{forms, words};

/// A cache that keeps all, as a recipe says it.
pub(super) const DENSE: &str = "kv_cache = { policy = 'dense', storage = 'growing' }";

/// Tokens of a chunk, where none are written and the caches take so many.
const DEFAULT_CHUNK_SIZE: usize = 1024;

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct CacheRecipe in "kv_cache" {
        /// Which entries are evicted: `policy = "lastrec"`, or `policy.h2o = { grace_period = 64 }`.
        pub policy: PolicyRecipe = PolicyRecipe::by_default(),
        /// Gates for the policy `learned` and query statistics for `triattention`: the output of `kvtune calibrate`, a directory or file in the
        /// layout of KVzap or Fast KVzip, or a checkpoint that has gates. Gates beside the loaded adapter or model take precedence.
        pub gates: Option<PathBuf> = None,
        /// Storage format of cache entries (KV cache dtype). An entry is quantised after its own chunk has attended.
        pub buffer: BufferKind = BufferKind::Plain,
        /// Slots per KV head. A pyramid falls linearly from layer to layer.
        #[also("cache_length")]
        pub cache_length: CacheLength = CacheLength::Uniform(16384),
        /// Tokens of a chunk: at most the slots minus the tokens that the policy never evicts.
        #[also("chunk_size")]
        #[rule(COUNT)]
        #[default("1024, or half of the largest chunk that the caches allow if 1024 is too large")]
        pub chunk_size: Option<usize> = None,
        /// With `reference`, chunks also end where a layer's cache becomes full, as in `keys_values`.
        pub chunking: Chunking = Chunking::Plain,
        /// Training draws the sizes of chunks around `chunk_size`, five for each step.
        #[also("randomize_chunk_sizes")]
        pub randomize_chunk_sizes: bool = false,
        /// Tokens per eviction decision in decoding, and in training with `grad.single_tokens_for_targets`; at most `chunk_size`.
        #[rule(COUNT)]
        pub decode_block: usize = 1,
        /// Text is generated with fixed shapes: each chunk of a prompt is computed as `chunk_size` tokens, and all caches are allocated at full
        /// length. With `grad.cuda_graphs` a GPU then runs each layer as captured graphs.
        pub r#static: bool = false,
        /// Slots are allocated at once, by doubling, or by pages. The last two need the policy `dense`.
        #[default("`growing` for `dense` without a `cache_length`, else `preallocated`")]
        pub storage: Storage = Storage::Preallocated,
        /// The caches of layers that do not run are kept in host memory.
        pub cpu_offload: bool = false,
    }
}

/// Tokens of a chunk, at least `chunk_size`, where caches keep everything: chunks then change time and memory, the result by rounding alone, and
/// short ones take longer.
pub fn full_cache_chunk_size(chunk_size: usize) -> usize {
    chunk_size.max(DEFAULT_CHUNK_SIZE)
}

impl CacheRecipe {
    /// Tokens of a chunk as they are written, or by default. Where none are written it may be more than the caches take.
    pub fn wanted_chunk_size(&self) -> usize {
        self.chunk_size.unwrap_or(DEFAULT_CHUNK_SIZE)
    }
}

words! {
    pub enum BufferKind {
        Plain = "plain" | "default",
        /// 8 bits a value, with a minimum and a scale per head vector.
        Int8 = "int8" | "torch-quantized8",
        /// 4 bits a value likewise.
        Int4 = "int4" | "torch-quantized4",
    }
}

impl BufferKind {
    /// Whether the undo log may round what was overwritten: of a quantised cache it keeps the cache's own few bits.
    pub fn undo_log_may_round(self) -> bool {
        self == Self::Plain
    }
}

words! {
    pub enum Storage {
        Preallocated = "preallocated",
        Growing = "growing",
        /// Memory grows page by page, and nothing is copied.
        Paged = "paged",
    }
}

words! {
    /// Where chunks end, behind the first tokens that every cache holds.
    pub enum Chunking {
        Plain = "plain",
        /// METHOD.md says its rule, in section 2.
        Reference = "reference",
    }
}

/// Slots of a layer. No memory holds 2^40 of them.
const SLOTS: KeyRule = KeyRule {
    takes: "1 ≤ integer ≤ 2^40",
    expected: "at least 1 and at most 2^40",
    hint: "write the number of tokens that a layer keeps; what is never evicted needs no more than the longest sequence",
    is_fine: |number| (1.0..=1_099_511_627_776.0).contains(&number),
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheLength {
    /// Falling from the bottom to the top.
    Pyramid(Pyramid),
    #[serde(untagged)]
    Uniform(usize),
    #[serde(untagged)]
    PerLayer(Vec<usize>),
}

/// Lengths that fall along a line (`PyramidKV`, arXiv 2406.02069): lower layers spread their attention wider than upper ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Pyramid {
    pub mean: usize,
    /// Slots of the last layer, at most the mean; the first has `2 · mean − top`.
    pub top: usize,
}

impl Pyramid {
    fn length(self, layer: usize, num_layers: usize) -> usize {
        let mirror = num_layers - 1 - layer;
        match layer.cmp(&mirror) {
            // Wide, as a recipe may name any number.
            Ordering::Less => {
                let (steps, fall) = (num_layers as u128 - 1, 2 * (self.mean - self.top) as u128 * layer as u128);
                2 * self.mean - self.top - ((fall + steps / 2) / steps) as usize
            }
            Ordering::Equal => self.mean,
            Ordering::Greater => 2 * self.mean - self.length(mirror, num_layers),
        }
    }
}

impl CacheLength {
    /// Slots of each of `num_layers` layers; of a list, all that it has.
    ///
    /// Layer `i` and its mirror image `L − 1 − i` of a pyramid have `2 · mean` slots together, so that rounding does not change the
    /// mean. Example: mean 10, top 5 and four layers give 15, 12, 8, 5.
    pub fn by_layer(&self, num_layers: usize) -> Vec<usize> {
        match self {
            Self::Uniform(length) => vec![*length; num_layers],
            Self::PerLayer(lengths) => lengths.clone(),
            Self::Pyramid(pyramid) => (0..num_layers).map(|layer| pyramid.length(layer, num_layers)).collect(),
        }
    }
}

impl RecipeValue for CacheLength {
    fn takes(_: Option<&str>) -> String {
        format!("{}, array of one per layer, or `{{ pyramid = {{ mean = …, top = … }} }}`", SLOTS.takes)
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        if let Self::Pyramid(Pyramid { mean, top }) = self {
            let key_of_top = format!("{key}.pyramid.top");
            SLOTS.check(document, &format!("{key}.pyramid.mean"), &Value::Integer(mean as i64))?;
            SLOTS.check(document, &key_of_top, &Value::Integer(top as i64))?;
            if top > mean {
                let message = format!("`{key_of_top}` must be at most the mean, {mean}, found {top}");
                let hint = "a pyramid grows narrower towards the top: write less, or list one length per layer";
                return document.refuse(&key_of_top, message, hint);
            }
        } else if self == Self::PerLayer(Vec::new()) {
            let message = format!("`{key}` must be at least 1 in every layer, found []");
            return document.refuse(key, message, "write one number for all layers, or one per layer");
        }
        self.to_value().iter().try_for_each(|value| SLOTS.check(document, key, value))?;
        Ok(self)
    }
}

/// `1024`, `[1024, 512]`, or `1024 on average, 512 at the top`.
impl fmt::Display for CacheLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform(slots) => slots.fmt(f),
            Self::PerLayer(slots) => write!(f, "{slots:?}"),
            Self::Pyramid(Pyramid { mean, top }) => write!(f, "{mean} on average, {top} at the top"),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PyramidTable {
    pyramid: Pyramid,
}

forms! {
    CacheLength: "a whole number of slots, an array of one per layer, or `{ pyramid = { mean = …, top = … } }`";
    whole |slots| CacheLength::Uniform(slots);
    list |slots: Vec<usize>| CacheLength::PerLayer(slots);
    table |table: PyramidTable| CacheLength::Pyramid(table.pyramid);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pyramid(mean: usize, top: usize, num_layers: usize) -> Vec<usize> {
        CacheLength::Pyramid(Pyramid { mean, top }).by_layer(num_layers)
    }

    #[test]
    fn a_pyramid_falls_along_a_line() {
        assert_eq!(pyramid(4096, 1024, 4), [7168, 5120, 3072, 1024]);
        assert_eq!(pyramid(10, 5, 4), [15, 12, 8, 5]);
        assert_eq!(pyramid(10, 5, 3), [15, 10, 5]);
        assert_eq!((pyramid(10, 5, 1), pyramid(10, 5, 2), pyramid(7, 7, 3)), (vec![10], vec![15, 5], vec![7; 3]));
    }

    proptest! {
        #[test]
        fn a_pyramid_has_its_mean_and_its_top(mean in 1usize..10_000, part in 0.0..1.0_f64, num_layers in 2usize..90) {
            let top = ((mean as f64 * part) as usize).max(1);
            let lengths = pyramid(mean, top, num_layers);
            prop_assert_eq!(lengths.len(), num_layers);
            prop_assert_eq!(lengths.iter().sum::<usize>(), mean * num_layers);
            prop_assert_eq!((lengths[0], lengths[num_layers - 1]), (2 * mean - top, top));
            prop_assert!(lengths.is_sorted_by(|a, b| a >= b));
            let slope = 2.0 * (mean - top) as f64 / (num_layers - 1) as f64;
            for (i, &length) in lengths.iter().enumerate() {
                let line = (2 * mean - top) as f64 - slope * i as f64;
                prop_assert!((length as f64 - line).abs() <= 0.5 + 1e-9, "{}: {} of {}", i, length, line);
            }
        }
    }
}
