//! The way out of a key that does not exist: the one that was probably meant.

use super::diagnose::{listed, nearest};
use super::plan::tables;
use super::table::RecipeKey;

/// Packing saves the pads of a batch, of which there are none here.
const NO_PACKING: &str = "leave it out: sequences of similar length share a batch, those that end leave it, and nothing is computed for pads; \
                          `train.max_tokens_per_batch` has many short ones run together";

/// Keys of other programs that have no counterpart of the same meaning, and what to do instead.
pub(super) const ADVICE: &[(&str, &str)] = &[
    ("global_batch_size", "set `train.gradient_accumulation_steps` to the global batch divided by `train.micro_batch_size`"),
    ("max_time", "limit the run by `train.max_steps`; an interrupted run can be resumed"),
    ("use_dora", "leave it out: the adapter is plain LoRA"),
    ("use_rslora", "leave it out, and set `lora.alpha` to alpha times the square root of r"),
    (
        "save_total_limit",
        "set `checkpoint.intermediate_save_interval` and `intermediate_save_keep`: of these saves only the last stay",
    ),
    ("packing", NO_PACKING),
    ("sample_packing", NO_PACKING),
    ("packed", NO_PACKING),
    ("neat_packing", NO_PACKING),
    ("padding_free", NO_PACKING),
    ("eval_packing", NO_PACKING),
    ("eval_sample_packing", NO_PACKING),
    ("packing_strategy", NO_PACKING),
    (
        "group_by_length",
        "leave it out: a batch holds sequences of similar length in any case; `data.order` says in which order they come",
    ),
    ("gradient_checkpointing", "leave it out: the tables `kv_cache` and `grad` say what is recomputed"),
    ("enable_activation_checkpointing", "leave it out: the tables `kv_cache` and `grad` say what is recomputed"),
    ("report_to", "leave it out: every run writes `metrics.jsonl` and TensorBoard events"),
];

/// The way out of a key that `table` (dotted; empty at the top level) does not know: one of its own keys, else one of another table,
/// else a list of what it knows.
pub(super) fn suggest_key(table: &str, written: &str, known: &[&str]) -> String {
    if let Some((_, advice)) = ADVICE.iter().find(|(name, _)| *name == written) {
        return (*advice).to_owned();
    }
    let tables = tables();
    let other_names = tables.iter().flat_map(|(_, keys)| keys).flat_map(|key| key.text.also).filter_map(|name| {
        let (outer, key) = name.rsplit_once('.').unwrap_or(("", name));
        (outer == table).then_some(key)
    });
    if let Some(key) = nearest(written, known.iter().copied()).or_else(|| nearest(written, other_names)) {
        return format!("did you mean `{key}`?");
    }
    // An exact name in any table counts more than a near one in an earlier table.
    let elsewhere = || tables.iter().filter(|(table, _)| !table.is_empty()).map(|(table, keys)| (*table, names(keys)));
    let exact = elsewhere().find_map(|(table, names)| Some((table, names.into_iter().find(|name| *name == written)?)));
    match exact.or_else(|| elsewhere().find_map(|(table, names)| Some((table, nearest(written, names)?)))) {
        Some((table, key)) => format!("did you mean `{table}.{key}`?"),
        None if known.is_empty() => "it has no keys: leave it out".to_owned(),
        None => format!("choose {}", listed(known.iter().copied())),
    }
}

fn names(keys: &[RecipeKey]) -> Vec<&str> {
    keys.iter().map(|key| key.text.name.as_str()).collect()
}
