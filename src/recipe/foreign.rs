//! Keys of other programs whose meaning depends on their value: each is read as a key of kvtune's, left out with a note, or refused with the
//! way out.

use super::diagnose::{Checked, one_of};
use super::overrides::move_to;
use super::plan::TABLES;
use super::refusals::Refusals;
use super::table::{dotted, table_of};
use super::tree::{Document, KeyValue, Node, Spot};

/// What a value of another program's key means.
pub enum Meaning {
    /// A key of kvtune's, and its word.
    Is(&'static str, &'static str),
    /// Nothing that would change anything, and why.
    LeftOut(&'static str),
    /// Something that there is not, and the way out.
    Refused(&'static str, &'static str),
}
use Meaning::{Is, LeftOut, Refused};

const ANY: &str = "…";

const DTYPE: Meaning = LeftOut("`model.dtype` says what is computed in");
const QUANTISED: Meaning =
    Refused("`model.quantize` says how weights are packed", "write `model.quantize = \"nf4\"` for 4 bits, `\"int8\"` for 8");
const RECOMPUTED: Meaning = LeftOut("the tables `[kv_cache]` and `[grad]` say what is recomputed");
const ATTENTION: Meaning = LeftOut("kvtune chooses its attention kernels by the device");
const PINNED: Meaning = LeftOut("what a GPU copies waits in pinned memory in any case");
const VARIANTS: &str = "leave it out; `lora.use_dora`, `lora.use_rslora` and `lora.init_lora_weights` choose its variants";

/// Keys, at the top of the file or in any table of kvtune's, with their values and what each means.
pub const FOREIGN: &[(&str, &str, Meaning)] = &[
    ("lora_target_linear", "true", Is("lora.target_modules", "all-linear")),
    ("lora_target_linear", "false", LeftOut("`lora.target_modules` says which modules get an adapter")),
    ("bf16", "true", Is("model.dtype", "bf16")),
    ("bf16", "auto", Is("model.dtype", "bf16")),
    ("bf16", "full", Is("model.dtype", "bf16")),
    ("bf16", "false", DTYPE),
    ("fp16", "false", DTYPE),
    ("fp16", ANY, Refused("gradients fall below the smallest number of f16", "write `model.dtype = \"bf16\"` or `\"f32\"`")),
    ("load_in_4bit", "false", LeftOut("weights are packed only where `model.quantize` says so")),
    ("load_in_4bit", ANY, QUANTISED),
    ("load_in_8bit", "false", LeftOut("weights are packed only where `model.quantize` says so")),
    ("load_in_8bit", ANY, QUANTISED),
    ("task_type", "CAUSAL_LM", LeftOut("`head.kind` says what is predicted, by default the next token")),
    ("task_type", "SEQ_CLS", Refused("`head.kind` says what is predicted", "write `head.kind = \"seq_classification\"`")),
    ("task_type", ANY, Refused("there is no such head", "leave it out, and choose `head.kind`")),
    ("peft_type", "LORA", LeftOut("the adapter is LoRA in any case")),
    ("peft_type", ANY, Refused("the adapter is LoRA", VARIANTS)),
    ("eval_strategy", "steps", LeftOut("a validation comes every `eval.interval` steps")),
    ("eval_strategy", "no", Refused("some samples validate", "to hold none out, write `data.validation_fraction = 0`")),
    ("eval_strategy", ANY, Refused("a validation comes every `eval.interval` steps", "write `eval.interval` in steps")),
    ("assistant_only_loss", "true", Is("data.train_on", "assistant")),
    (
        "assistant_only_loss",
        ANY,
        Refused("`data.train_on` says what is trained", "to train on whole conversations, write `\"all\"` there"),
    ),
    ("final_validation", "true", LeftOut("a run ends with a validation in any case")),
    (
        "final_validation",
        ANY,
        Refused(
            "a run ends with a validation where some samples validate",
            "to hold none out, write `data.validation_fraction = 0`",
        ),
    ),
    ("allocate_buffers", ANY, LeftOut("`kv_cache.storage` says when buffers are allocated")),
    ("layercp_pin_memory", ANY, PINNED),
    ("cachecp_pin_memory", ANY, PINNED),
    ("max_match_trials_pack_arg", ANY, LeftOut("what the undo log has is put back without a search")),
    ("neftune_noise_alpha", ANY, Refused("no noise is added to embeddings", "leave it out")),
    ("gradient_checkpointing", ANY, RECOMPUTED),
    ("gradient_checkpointing_kwargs", ANY, RECOMPUTED),
    ("enable_activation_checkpointing", ANY, RECOMPUTED),
    ("flash_attention", ANY, ATTENTION),
    ("flash_attn", ANY, ATTENTION),
    ("attn_implementation", ANY, ATTENTION),
];

/// Deals with all of them, and adds a note for each that is not refused.
pub(super) fn apply(document: &mut Document, notes: &mut Vec<(Spot, String)>, refusals: &mut Refusals) {
    for (name, ..) in FOREIGN {
        for key in TABLES.iter().map(|(table, _)| dotted(table, name)) {
            let Some(entry) = document.root.take(&key) else { continue };
            let (spot, read) = (entry.spot, read(document, &key, entry, name));
            notes.extend(refusals.catch(&[table_of(&key)], read).map(|note| (spot, note)));
        }
    }
}

fn read(document: &mut Document, key: &str, entry: KeyValue, name: &str) -> Checked<String> {
    let (written, word) = (entry.node.to_value(), entry.node.word());
    let values = FOREIGN.iter().filter(|(other, ..)| *other == name);
    match values.clone().find(|(_, value, _)| *value == word || *value == ANY) {
        Some((.., Is(to, word))) => {
            let node = Node::string(word, entry.node.spot);
            move_to(document, key, to, KeyValue { node, ..entry })?;
            Ok(format!("`{key} = {written}` is read as `{to} = \"{word}\"`"))
        }
        Some((.., LeftOut(why))) => Ok(format!("`{key}` is left out: {why}")),
        Some((.., Refused(why, hint))) => {
            Err(document.source.reject(entry.spot, format!("`{key}` is not supported: {why}"), *hint))
        }
        None => {
            let hint = format!("choose {}", one_of(values.map(|(_, value, _)| *value)));
            Err(document.source.reject(entry.node.spot, format!("unknown value `{written}` for `{key}`"), hint))
        }
    }
}
