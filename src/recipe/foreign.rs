//! Keys of other programs whose meaning depends on their value: each is read as a key of kvtune's, left out with a note, or refused with the
//! way out.

use std::fmt;

use super::diagnose::{Checked, listed};
use super::overrides::move_to;
use super::refusals::Refusals;
use super::table::{dotted, table_of};
use super::tree::{Document, KeyValue, Node, NodeValue, Spot};

/// What a value of another program's key means.
pub(super) enum Meaning {
    /// A key of kvtune's, and its word.
    Is(&'static str, &'static str),
    /// Nothing that would change anything, and why.
    LeftOut(&'static str),
    /// Something that there is not, and the way out.
    Refused(&'static str, &'static str),
}
use Meaning::{Is, LeftOut, Refused};

/// For the reference.
impl fmt::Display for Meaning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Is(key, word) => write!(f, "read as `{key} = \"{word}\"`"),
            LeftOut(why) => write!(f, "left out: {why}"),
            Refused(why, hint) => write!(f, "refused, as {why}: {hint}"),
        }
    }
}

/// Keys that mean the same, and their values with what each means.
type Foreign = (&'static [&'static str], &'static [(&'static str, Meaning)]);

/// Any value.
const ANY: &str = "…";

/// At the top of the file or in any table.
pub(super) const FOREIGN: &[Foreign] = &[
    (
        &["lora_target_linear"],
        &[
            ("true", Is("lora.target_modules", "all-linear")),
            ("false", LeftOut("`lora.target_modules` says which modules get an adapter")),
        ],
    ),
    (
        &["bf16"],
        &[
            ("true", Is("model.dtype", "bf16")),
            ("auto", Is("model.dtype", "bf16")),
            ("full", Is("model.dtype", "bf16")),
            ("false", LeftOut("`model.dtype` says what is computed in")),
        ],
    ),
    (
        &["fp16"],
        &[
            ("false", LeftOut("`model.dtype` says what is computed in")),
            (ANY, Refused("gradients fall below the smallest number of f16", "write `model.dtype = \"bf16\"` or `\"f32\"`")),
        ],
    ),
    (
        &["load_in_4bit", "load_in_8bit"],
        &[
            ("false", LeftOut("weights are not quantised in any case")),
            (
                ANY,
                Refused(
                    "the base model's weights are not quantised",
                    "leave it out: `model.dtype = \"bf16\"` takes 2 bytes a weight, and `train.offload = \"weights\"` keeps most of them in \
                     the host's memory",
                ),
            ),
        ],
    ),
    (
        &["task_type"],
        &[
            ("CAUSAL_LM", LeftOut("`head.kind` says what is predicted, by default the next token")),
            (
                "SEQ_CLS",
                Refused("`head.kind` says what is predicted", "write `head.kind = \"seq_classification\"` and `head.labels`"),
            ),
            (ANY, Refused("there is no such head", "leave it out, and choose `head.kind`")),
        ],
    ),
    (
        &["peft_type"],
        &[
            ("LORA", LeftOut("the adapter is LoRA in any case")),
            (
                ANY,
                Refused(
                    "the adapter is LoRA",
                    "leave it out; `lora.use_dora`, `lora.use_rslora` and `lora.init_lora_weights` choose its variants",
                ),
            ),
        ],
    ),
    (
        &["eval_strategy", "evaluation_strategy"],
        &[
            ("steps", LeftOut("a validation comes every `eval.interval` steps")),
            (
                "no",
                Refused(
                    "a validation comes every `eval.interval` steps",
                    "to hold nothing out, write `data.validation_fraction = 0`",
                ),
            ),
            (ANY, Refused("a validation comes every `eval.interval` steps", "write `eval.interval` in steps")),
        ],
    ),
    (
        &["assistant_only_loss"],
        &[
            ("true", Is("data.train_on", "assistant")),
            (
                ANY,
                Refused(
                    "`data.train_on` says what is trained",
                    "write `data.train_on = \"all\"` to train on whole conversations",
                ),
            ),
        ],
    ),
    (&["neftune_noise_alpha"], &[(ANY, Refused("no noise is added to embeddings", "leave it out"))]),
    (
        &["gradient_checkpointing", "gradient_checkpointing_kwargs", "enable_activation_checkpointing"],
        &[(ANY, LeftOut("the tables `[kv_cache]` and `[grad]` say what is recomputed"))],
    ),
    (
        &["flash_attention", "flash_attn", "attn_implementation"],
        &[(ANY, LeftOut("kvtune chooses its attention kernels by the device"))],
    ),
];

/// Deals with all of them, and adds a note for each that is not refused.
pub(super) fn apply(document: &mut Document, notes: &mut Vec<(Spot, String)>, refusals: &mut Refusals) {
    let tables = document.root.entries().iter().filter(|entry| matches!(entry.node.value, NodeValue::Table(_)));
    let tables: Vec<String> = tables.map(|entry| entry.key.clone()).chain([String::new()]).collect();
    for (names, values) in FOREIGN {
        for key in names.iter().flat_map(|name| tables.iter().map(|table| dotted(table, name))) {
            let Some(entry) = document.root.take(&key) else { continue };
            let (spot, read) = (entry.spot, read(document, &key, entry, values));
            if let Some(note) = refusals.catch(&[table_of(&key)], read) {
                notes.push((spot, note));
            }
        }
    }
}

/// Reads one of them; returns the note.
fn read(document: &mut Document, key: &str, entry: KeyValue, values: &[(&str, Meaning)]) -> Checked<String> {
    let written = entry.node.to_value();
    let text = entry.node.word();
    match values.iter().find(|(value, _)| *value == text || *value == ANY) {
        Some((_, Is(to, word))) => {
            let node = Node { value: NodeValue::String((*word).to_owned()), spot: entry.node.spot };
            move_to(document, key, to, KeyValue { node, ..entry })?;
            Ok(format!("`{key} = {written}` is read as `{to} = \"{word}\"`"))
        }
        Some((_, LeftOut(why))) => Ok(format!("`{key}` is left out: {why}")),
        Some((_, Refused(why, hint))) => {
            Err(document.source.reject(entry.spot, format!("`{key}` is not supported: {why}"), *hint))
        }
        None => {
            let known = format!("choose {}", listed(values.iter().map(|(value, _)| *value)));
            Err(document.source.reject(entry.node.spot, format!("unknown value `{written}` for `{key}`"), known))
        }
    }
}
