//! What is exported and for whom.

use std::path::Path;

use crate::checkpoint::TrainState;
use crate::files::{self, GgufDtype};
use crate::recipe::{Recipe, TrainedWeights};
use crate::report::metrics::StepMetrics;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportTarget {
    /// PEFT, and what reads all that it writes.
    Peft,
    Vllm,
    Merged,
    /// A file for llama.cpp: a whole model with matrices in this type, or the adapter alone; for Ollama with a `Modelfile`.
    Gguf {
        whole: Option<GgufDtype>,
        for_ollama: bool,
    },
}

impl ExportTarget {
    /// The library that loads it, by its name on the Hub.
    pub(super) fn library(self) -> &'static str {
        match self {
            Self::Merged => "transformers",
            Self::Gguf { .. } => "gguf",
            Self::Peft | Self::Vllm => "peft",
        }
    }

    /// Whether it is a model, and no adapter.
    pub(super) fn is_whole(self) -> bool {
        matches!(self, Self::Merged | Self::Gguf { whole: Some(_), .. })
    }
}

/// What came of a split with one cache.
#[derive(Clone, Debug)]
pub struct CacheResult {
    pub split: String,
    /// The policy's name, and the slots, as `kvtune evaluate` prints them.
    pub policy: String,
    pub cache_length: String,
    /// Names, as `loss` or `f1`, with their values, and how many samples each is a mean over, where that is known.
    pub figures: Vec<(String, f64, Option<usize>)>,
}

impl CacheResult {
    /// The result of a cache that a recipe describes. A policy may have its parameters with it, as `{ h2o = { grace_period = 8 } }`.
    pub fn of_recipe(split: String, policy: &str, cache_length: String) -> Self {
        let policy = policy.trim_start_matches(['{', ' ']).split([' ', '=']).next().unwrap_or_default().to_owned();
        // `dense` keeps everything, whatever length its recipe has.
        let cache_length = if policy == "dense" { "all".to_owned() } else { cache_length };
        Self { split, policy, cache_length, figures: Vec::new() }
    }
}

#[derive(Debug)]
pub struct Trained<'a> {
    pub checkpoint: &'a Path,
    pub holds: TrainedWeights,
    /// Where an adapter's base is, if somebody says so.
    pub base: Option<&'a Path>,
    pub recipe: Option<&'a Recipe>,
    pub state: Option<TrainState>,
    /// The figures of its run up to it.
    pub metrics: Vec<StepMetrics>,
    pub results: Vec<CacheResult>,
    /// The chat template that it was trained with in place of the base's own.
    pub chat_template: Option<String>,
}

impl Trained<'_> {
    /// The last two names of its path.
    pub(super) fn name(&self) -> String {
        let absolute = files::absolute(self.checkpoint);
        let names = absolute.iter().rev().take(2).map(|name| name.to_string_lossy().into_owned());
        names.collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("/")
    }
}
