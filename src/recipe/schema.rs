//! The recipe as it is written: which tables and keys there are, and of which type. Nothing is checked or filled in here.

use std::fmt;

use serde::de::{DeserializeOwned, Error, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::auto::Auto;
use super::cache_length::CacheLength;
use super::diagnose::{listed, nearest};
use super::grad::{OnOutOfMemory, StoreForm, StorePlace};
use super::kv_cache::{BufferKind, Chunking, Storage};
use super::plan::{BatchOrder, DataFormat, Dtype, Metric, Mode, OnTooLong, Schedule, TargetModules, Weights};
use super::{alias, read};

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Schema {
    pub(super) model: ModelTable,
    pub(super) lora: LoraTable,
    pub(super) data: DataTable,
    pub(super) head: HeadTable,
    pub(super) kv_cache: KvCacheTable,
    pub(super) grad: GradTable,
    pub(super) train: TrainTable,
    pub(super) optimizer: OptimizerTable,
    pub(super) eval: EvalTable,
    pub(super) checkpoint: CheckpointTable,
    pub(super) log: LogTable,
    pub(super) output_dir: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ModelTable {
    pub(super) path: Option<String>,
    pub(super) adapter: Option<String>,
    pub(super) dtype: Option<Dtype>,
    pub(super) allow_tf32: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct LoraTable {
    pub(super) r: Option<usize>,
    pub(super) alpha: Option<f64>,
    pub(super) dropout: Option<f64>,
    pub(super) target_modules: Option<TargetModules>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct DataTable {
    pub(super) format: Option<DataFormat>,
    pub(super) train: Option<String>,
    pub(super) validation: Option<String>,
    pub(super) validation_fraction: Option<f64>,
    pub(super) max_seq_length: Option<usize>,
    pub(super) on_too_long: Option<OnTooLong>,
    pub(super) order: Option<BatchOrder>,
    pub(super) train_on_prompt: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct HeadTable {
    pub(super) kind: Option<HeadKind>,
    pub(super) labels: Option<Vec<String>>,
    pub(super) label_tokens: Option<Vec<u32>>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(super) enum HeadKind {
    NextToken,
    SeqClassificationOnLogits,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct KvCacheTable {
    /// A name, or a table with one: read by [`super::choice`].
    pub(super) policy: Option<IgnoredAny>,
    pub(super) buffer: Option<BufferKind>,
    pub(super) cache_length: Option<CacheLength>,
    pub(super) chunk_size: Option<usize>,
    pub(super) chunking: Option<Chunking>,
    pub(super) randomize_chunk_sizes: Option<bool>,
    pub(super) storage: Option<Storage>,
    pub(super) cpu_offload: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GradTable {
    pub(super) layers_per_cell: Option<Auto<usize>>,
    pub(super) chunks_per_cell_multiplier: Option<f64>,
    pub(super) chunks_per_cell: Option<Auto<usize>>,
    pub(super) layer_checkpoints: Option<Auto<StoreForm>>,
    pub(super) layer_checkpoints_place: Option<Auto<StorePlace>>,
    pub(super) undo_log: Option<Auto<StoreForm>>,
    pub(super) undo_log_place: Option<Auto<StorePlace>>,
    pub(super) scratch_dir: Option<String>,
    pub(super) single_tokens_for_targets: Option<bool>,
    pub(super) on_out_of_memory: Option<OnOutOfMemory>,
    pub(super) cuda_graphs: Option<bool>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TrainTable {
    pub(super) micro_batch_size: Option<usize>,
    pub(super) gradient_accumulation_steps: Option<usize>,
    pub(super) max_steps: Option<u64>,
    pub(super) epochs: Option<u64>,
    pub(super) max_grad_norm: Option<f64>,
    pub(super) seed: Option<u64>,
    pub(super) deterministic: Option<bool>,
    pub(super) weights: Option<Weights>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct OptimizerTable {
    pub(super) learning_rate: Option<f64>,
    pub(super) weight_decay: Option<f64>,
    pub(super) betas: Option<(f64, f64)>,
    pub(super) eps: Option<f64>,
    pub(super) schedule: Option<Schedule>,
    pub(super) warmup_steps: Option<u64>,
    pub(super) warmup_ratio: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct EvalTable {
    pub(super) interval: Option<u64>,
    pub(super) initial: Option<bool>,
    pub(super) metric: Option<Metric>,
    pub(super) mode: Option<Mode>,
    pub(super) micro_batch_size: Option<usize>,
    pub(super) max_batches: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct CheckpointTable {
    pub(super) save_interval: Option<u64>,
    pub(super) intermediate_save_interval: Option<u64>,
    pub(super) intermediate_save_keep: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct LogTable {
    pub(super) interval: Option<u64>,
}

/// The tables and their keys.
fn tables() -> [(&'static str, &'static [&'static str]); 11] {
    fn keys<T: DeserializeOwned>() -> &'static [&'static str] {
        read::keys_of::<T>()
    }
    [
        ("model", keys::<ModelTable>()),
        ("lora", keys::<LoraTable>()),
        ("data", keys::<DataTable>()),
        ("head", keys::<HeadTable>()),
        ("kv_cache", keys::<KvCacheTable>()),
        ("grad", keys::<GradTable>()),
        ("train", keys::<TrainTable>()),
        ("optimizer", keys::<OptimizerTable>()),
        ("eval", keys::<EvalTable>()),
        ("checkpoint", keys::<CheckpointTable>()),
        ("log", keys::<LogTable>()),
    ]
}

/// The way out of a key that `table` (dotted; empty at the top level) does not know: one of its own keys, else one of
/// another table, else a list of what it knows.
pub(super) fn suggest_key(table: &str, written: &str, known: &[&str]) -> String {
    if let Some(advice) = alias::advice_for(written) {
        return advice.to_owned();
    }
    if let Some(key) = nearest(written, known.iter().copied()) {
        return format!("did you mean `{key}`?");
    }
    if let Some(key) = nearest(written, alias::spellings_in(table)) {
        return format!("did you mean `{key}`?");
    }
    let exact = |keys: &'static [&'static str]| keys.iter().copied().find(|key| *key == written);
    let near = |keys: &'static [&'static str]| nearest(written, keys.iter().copied());
    let elsewhere = tables()
        .into_iter()
        .find_map(|(name, keys)| Some((name, exact(keys)?)))
        .or_else(|| tables().into_iter().find_map(|(name, keys)| Some((name, near(keys)?))));
    match elsewhere {
        Some((name, key)) => format!("did you mean `{name}.{key}`?"),
        None if known.is_empty() => "it has no keys: leave it out".to_owned(),
        None => format!("choose {}", listed(known.iter().copied())),
    }
}

impl<'de> Deserialize<'de> for TargetModules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordOrList;

        impl<'de> Visitor<'de> for WordOrList {
            type Value = TargetModules;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`\"all-linear\"` or an array of module names")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<TargetModules, E> {
                match word {
                    "all-linear" => Ok(TargetModules::AllLinear),
                    _ => Err(E::unknown_variant(word, &["all-linear", "[\"q_proj\", …]"])),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<TargetModules, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = sequence.next_element()? {
                    names.push(name);
                }
                Ok(TargetModules::Names(names))
            }
        }

        deserializer.deserialize_any(WordOrList)
    }
}
