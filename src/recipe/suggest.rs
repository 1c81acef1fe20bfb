//! The way out of a key that does not exist: the one that was probably meant.

use super::diagnose::{nearest, one_of};
use super::plan::{TABLES, keys};
use super::table::{RecipeKey, dotted};

/// Packing saves the pads of a batch, of which there are none here.
const NO_PACKING: &str = "leave it out: sequences of similar length share a batch, those that end leave it, and nothing is computed for pads; \
                          `train.max_tokens_per_batch` has many short ones run together";

const LORA_MODULES: &str = "name the modules in `lora.target_modules`, as `[\"q_proj\", \"v_proj\", \"down_proj\"]`";
const ANSWERS: &str = "write `eval.generate = { metrics = [\"f1\"], samples = 16, max_new_tokens = 64 }`: answers are greedy";
const LOGS: &str = "leave it out: every run writes `metrics.jsonl` and TensorBoard events";
const KERNELS: &str = "leave it out: kvtune chooses its attention kernels, and how much they take at a time, by the device";

/// Keys of other programs that have no counterpart of the same meaning, with their table where others have one of that name, and what to do
/// instead.
pub const ADVICE: &[(&str, &str)] = &[
    ("lora.kind", "write `lora.use_dora = true` for DoRA, `lora.use_rslora = true` for rsLoRA, else leave it out"),
    ("lora.query", LORA_MODULES),
    ("lora.key", LORA_MODULES),
    ("lora.value", LORA_MODULES),
    ("lora.projection", LORA_MODULES),
    ("lora.mlp", LORA_MODULES),
    ("lora.head", LORA_MODULES),
    ("eval.max_new_tokens", ANSWERS),
    ("evaluate_example", ANSWERS),
    ("use_sample_metric", ANSWERS),
    ("sample_metric_max_generated_tokens", ANSWERS),
    ("sdpa", KERNELS),
    ("attention_forward_temp_size_gb", KERNELS),
    ("attention_backward_temp_size_gb", KERNELS),
    ("cache_kwargs", "write the policy's parameters in `[kv_cache.policy.NAME]`"),
    ("mask_prompt", "write `data.train_on_prompt`, which says the opposite"),
    ("head_model", "write `head.kind`"),
    ("yarn_rope", "write `model.rope_scaling = { rope_type = \"dynamic_yarn\" }`, with its further keys as in recipe.md"),
    ("devices", "start so many ranks: `kvtune launch --nproc N -- finetune-lora …`, torchrun or SLURM"),
    ("resume", "leave it out: `kvtune resume RUN` goes on from the last checkpoint"),
    ("global_batch_size", "set `train.gradient_accumulation_steps` to the global batch divided by `train.micro_batch_size`"),
    ("max_time", "limit the run by `train.max_steps`; an interrupted run can be resumed"),
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
    (
        "datasets",
        "list the files as `data.train = [\"a.jsonl\", \"b.jsonl\"]`, or, where they differ, write a `[[data.sets]]` table for each",
    ),
    ("report_to", LOGS),
    ("logger_name", LOGS),
];

/// The way out of a key that `table` (dotted; empty at the top level) does not know: the table that has it, else one of its own keys, else a
/// near one of another table, else a list of what it knows.
pub(super) fn suggest_key(table: &str, written: &str, known: &[&str]) -> String {
    if let Some((_, advice)) = ADVICE.iter().find(|(name, _)| *name == written || *name == dotted(table, written)) {
        return (*advice).to_owned();
    }
    if let Some(place) = where_it_belongs(written) {
        return place;
    }
    let other_names = keys().flat_map(|(_, key)| key.also).filter_map(|name| {
        let (outer, key) = name.rsplit_once('.').unwrap_or(("", name));
        (outer == table).then_some(key)
    });
    if let Some(key) = nearest(written, known.iter().copied()).or_else(|| nearest(written, other_names)) {
        return format!("did you mean `{key}`?");
    }
    let near = |(table, keys): &(&str, Vec<RecipeKey>)| {
        let key = nearest(written, keys.iter().map(|key| key.name.as_str()))?;
        Some(format!("did you mean `{table}.{key}`?"))
    };
    let elsewhere = TABLES.iter().filter(|(table, _)| !table.is_empty()).find_map(near);
    elsewhere.unwrap_or_else(|| match known {
        [] => "it has no keys: leave it out".to_owned(),
        _ => format!("choose {}", one_of(known.iter().copied())),
    })
}

/// The place of a key that stands in the wrong one: of its own name, else of a name that another program has for it.
fn where_it_belongs(written: &str) -> Option<String> {
    let last = |name: &&str| name.rsplit('.').next() == Some(written);
    let own: Vec<_> = keys().filter(|(_, key)| key.name == written).collect();
    let others: Vec<_> = keys().filter(|(_, key)| own.is_empty() && key.also.iter().any(last)).collect();
    match [own, others].concat()[..] {
        [(table, key)] => {
            let place = if table.is_empty() { "at the top of the file".to_owned() } else { format!("in `[{table}]`") };
            let name = if key.name == written { String::new() } else { format!(", as `{}`", key.name) };
            Some(format!("`{written}` belongs {place}{name}"))
        }
        [] => None,
        ref several => {
            let names: Vec<String> = several.iter().map(|(table, key)| dotted(table, &key.name)).collect();
            Some(format!("did you mean {}?", one_of(names.iter().map(String::as_str))))
        }
    }
}
