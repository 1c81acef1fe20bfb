//! Spellings of other programs that mean the same: accepted, with a note. What means something else is not here.

use super::diagnose::RecipeError;
use super::overrides::{Winner, winner};
use super::tree::{Document, KeyValue, Node, NodeValue, Spot};

/// Other names of keys. Both are dotted; without a dot, a key stands at the top level.
const RENAMES: &[(&str, &[&str])] = &[
    (
        "model.path",
        &[
            "model.checkpoint_dir",
            "model.base_model",
            "model.model_name_or_path",
            "model.name_or_path",
            "checkpoint_dir",
            "base_model",
            "model_name_or_path",
            "checkpointer.checkpoint_dir",
        ],
    ),
    ("model.dtype", &["model.precision", "model.torch_dtype", "precision", "dtype", "torch_dtype", "train.precision"]),
    ("model.allow_tf32", &["model.tf32", "train.tf32", "train.allow_tf32", "allow_tf32", "tf32"]),
    ("lora.r", &["lora.rank", "lora.lora_r", "lora.lora_rank", "model.lora_rank", "lora_r", "lora_rank"]),
    ("lora.alpha", &["lora.lora_alpha", "model.lora_alpha", "lora_alpha"]),
    ("lora.dropout", &["lora.lora_dropout", "model.lora_dropout", "lora_dropout"]),
    (
        "lora.target_modules",
        &[
            "lora.target",
            "lora.targets",
            "lora.lora_target",
            "lora.lora_target_modules",
            "lora_target",
            "lora_target_modules",
            "target_modules",
        ],
    ),
    ("data.format", &["data.type", "data.format_type"]),
    ("data.train", &["data.path", "data.train_file"]),
    ("data.validation", &["data.validation_file"]),
    ("data.validation_fraction", &["data.val_split_fraction", "data.val_fraction"]),
    (
        "data.max_seq_length",
        &[
            "data.max_seq_len",
            "data.max_length",
            "data.sequence_len",
            "data.cutoff_len",
            "max_seq_length",
            "max_seq_len",
            "sequence_len",
            "cutoff_len",
            "tokenizer.max_seq_len",
            "train.max_seq_length",
        ],
    ),
    ("data.on_too_long", &["data.excess_length_strategy", "excess_length_strategy"]),
    ("data.train_on_prompt", &["data.train_on_inputs", "data.train_on_input", "train_on_inputs", "train_on_prompt"]),
    ("kv_cache.cache_length", &["cache_length"]),
    ("kv_cache.chunk_size", &["chunk_size"]),
    ("kv_cache.randomize_chunk_sizes", &["randomize_chunk_sizes"]),
    ("grad.layer_checkpoints", &["grad.layercp_qname"]),
    ("grad.single_tokens_for_targets", &["single_tokens_for_targets"]),
    (
        "train.micro_batch_size",
        &[
            "train.batch_size",
            "train.per_device_train_batch_size",
            "micro_batch_size",
            "batch_size",
            "per_device_train_batch_size",
        ],
    ),
    (
        "train.gradient_accumulation_steps",
        &[
            "train.accumulation",
            "train.accumulation_steps",
            "train.gradient_accumulation",
            "train.grad_accumulation_steps",
            "gradient_accumulation_steps",
        ],
    ),
    ("train.epochs", &["train.num_epochs", "train.num_train_epochs", "epochs", "num_epochs", "num_train_epochs"]),
    ("train.max_steps", &["max_steps"]),
    (
        "train.max_grad_norm",
        &[
            "train.clip_grad_norm",
            "train.max_norm",
            "optimizer.max_grad_norm",
            "optimizer.clip_grad_norm",
            "max_grad_norm",
            "clip_grad_norm",
        ],
    ),
    ("train.seed", &["seed", "random_seed", "train.random_seed", "data.seed"]),
    ("grad.cuda_graphs", &["train.cuda_graphs", "cuda_graphs"]),
    ("train.deterministic", &["train.full_determinism", "deterministic", "full_determinism"]),
    ("optimizer.learning_rate", &["optimizer.lr", "train.learning_rate", "train.lr", "learning_rate", "lr"]),
    ("optimizer.weight_decay", &["train.weight_decay", "weight_decay"]),
    ("optimizer.betas", &["optimizer.adam_betas"]),
    ("optimizer.eps", &["optimizer.adam_epsilon"]),
    (
        "optimizer.schedule",
        &[
            "optimizer.scheduler",
            "optimizer.lr_scheduler",
            "optimizer.lr_scheduler_type",
            "scheduler.name",
            "lr_scheduler",
            "lr_scheduler_type",
        ],
    ),
    (
        "optimizer.warmup_steps",
        &[
            "optimizer.num_warmup_steps",
            "optimizer.lr_warmup_steps",
            "scheduler.warmup_steps",
            "scheduler.num_warmup_steps",
            "train.warmup_steps",
            "train.lr_warmup_steps",
            "warmup_steps",
            "lr_warmup_steps",
        ],
    ),
    (
        "optimizer.warmup_ratio",
        &[
            "optimizer.warmup_fraction",
            "optimizer.lr_warmup_fraction",
            "scheduler.warmup_ratio",
            "train.warmup_ratio",
            "train.lr_warmup_fraction",
            "warmup_ratio",
            "lr_warmup_fraction",
        ],
    ),
    ("eval.interval", &["eval.steps", "eval.eval_steps", "train.eval_steps", "eval_steps"]),
    ("eval.initial", &["eval.initial_validation"]),
    ("eval.micro_batch_size", &["eval.batch_size", "eval.per_device_eval_batch_size"]),
    ("eval.max_batches", &["eval.max_iters"]),
    (
        "checkpoint.save_interval",
        &[
            "checkpoint.save_steps",
            "checkpoint.interval",
            "checkpoint.steps",
            "train.save_interval",
            "train.save_steps",
            "save_interval",
            "save_steps",
        ],
    ),
    (
        "checkpoint.intermediate_save_interval",
        &["checkpoint.intermediate_interval", "checkpoint.intermed_save_interval", "train.intermed_save_interval"],
    ),
    (
        "checkpoint.intermediate_save_keep",
        &["checkpoint.intermediate_keep", "checkpoint.intermed_save_num", "train.intermed_save_num"],
    ),
    (
        "log.interval",
        &[
            "log.steps",
            "log.logging_steps",
            "log.log_every_n_steps",
            "train.log_interval",
            "log_interval",
            "logging_steps",
            "log_every_n_steps",
        ],
    ),
    ("output_dir", &["out_dir", "train.output_dir", "training.output_dir"]),
];

/// Other names of values.
const VALUES: &[(&str, &str, &[&str])] = &[
    ("model.dtype", "f32", &["float32", "fp32", "32-true", "32"]),
    ("model.dtype", "bf16", &["bfloat16", "bf16-true"]),
    ("model.dtype", "f64", &["float64", "fp64", "64-true", "64"]),
    ("lora.target_modules", "all-linear", &["all", "all_linear"]),
    ("data.format", "longbench-v2", &["longbench_v2", "longbenchv2", "LongBenchV2", "LongBench-v2"]),
    ("data.format", "prompt-completion", &["prompt_completion"]),
    ("data.on_too_long", "error", &["raise"]),
    ("data.order", "longest_first", &["longest-first"]),
    ("data.order", "shortest_first", &["shortest-first"]),
    ("head.kind", "next_token", &["next-token", "next_token_prediction"]),
    ("head.kind", "seq_classification_on_logits", &["seq-classification-on-logits"]),
    ("kv_cache.buffer", "plain", &["default"]),
    ("kv_cache.buffer", "int8", &["torch-quantized8"]),
    ("kv_cache.buffer", "int4", &["torch-quantized4"]),
    ("grad.layer_checkpoints", "plain", &["default"]),
    ("grad.layer_checkpoints", "int8", &["torch-quantized8"]),
    ("grad.layer_checkpoints", "int4", &["torch-quantized4"]),
    ("eval.metric", "loss", &["eval_loss"]),
];

/// Parameters of policies that may stand beside `policy` instead of inside it.
const FLAT: &[&str] = &[
    "grace_period",
    "init_grace_tokens",
    "sink_tokens",
    "keep_initial_fraction",
    "normalize_scores",
    "combination_constant",
    "score_prefill",
    "end_initial_regex",
    "max_initial_fraction",
    "include_end_string",
    "range_is_prefix",
];

/// Keys of other programs that have no counterpart of the same meaning, and what to do instead.
const ADVICE: &[(&str, &str)] = &[
    ("global_batch_size", "set `train.gradient_accumulation_steps` to the global batch divided by `train.micro_batch_size`"),
    ("max_time", "limit the run by `train.max_steps`; an interrupted run can be resumed"),
    ("use_dora", "leave it out: the adapter is plain LoRA"),
    ("use_rslora", "leave it out, and set `lora.alpha` to alpha times the square root of r"),
    (
        "save_total_limit",
        "set `checkpoint.intermediate_save_interval` and `intermediate_save_keep`: of these saves only the last stay",
    ),
    ("packed", "leave it out: batches are made of sequences of similar length"),
    ("gradient_checkpointing", "leave it out: the tables `kv_cache` and `grad` say what is recomputed"),
    ("enable_activation_checkpointing", "leave it out: the tables `kv_cache` and `grad` say what is recomputed"),
    ("report_to", "leave it out: every run writes `metrics.jsonl` and TensorBoard events"),
];

/// Policy of a recipe that names none.
pub(super) const DEFAULT_POLICY: &str = "h2o";

/// What to do instead of a key that other programs have and kvtune does not.
pub(super) fn advice_for(key: &str) -> Option<&'static str> {
    ADVICE.iter().find(|(name, _)| *name == key).map(|(_, advice)| *advice)
}

/// The other names that a table accepts.
pub(super) fn spellings_in(table: &str) -> impl Iterator<Item = &'static str> {
    RENAMES.iter().flat_map(|(_, names)| names.iter()).filter_map(move |name| match name.rsplit_once('.') {
        Some((outer, key)) => (outer == table).then_some(key),
        None => table.is_empty().then_some(*name),
    })
}

/// Brings all spellings to kvtune's own. Returns one line for each that was another.
pub(super) fn apply(document: &mut Document) -> Result<Vec<String>, RecipeError> {
    let mut notes = Vec::new();
    for (to, names) in RENAMES {
        for name in *names {
            if let Some(entry) = document.root.take(name) {
                notes.push((entry.spot, format!("`{name}` is read as `{to}`")));
                move_to(document, name, to, entry)?;
            }
        }
    }
    split_cache_name(document, &mut notes)?;
    gather_policy_params(document, &mut notes)?;
    for (key, to, names) in VALUES {
        let Some(node) = document.root.get_mut(key) else { continue };
        let text = match &node.value {
            NodeValue::Integer(number) => number.to_string(),
            _ => node.as_str().unwrap_or_default().to_owned(),
        };
        if names.contains(&text.as_str()) {
            node.value = NodeValue::String((*to).to_owned());
            notes.push((node.spot, format!("`{key} = \"{text}\"` is read as `\"{to}\"`")));
        }
    }
    notes.sort();
    Ok(notes.into_iter().map(|(spot, note)| format!("{}: {note}", document.source.place(spot).short())).collect())
}

/// Puts the value of `name` at `to`, unless that is there: of two, an override wins over the recipe, and else both are refused.
fn move_to(document: &mut Document, name: &str, to: &str, entry: KeyValue) -> Result<(), RecipeError> {
    match document.root.entry(to).map(|there| winner(entry.spot, there.spot)) {
        Some(Some(Winner::Second)) => return Ok(()),
        Some(None) => {
            let message = format!("`{name}` and `{to}` mean the same, and both are given");
            return Err(document.source.reject(entry.spot, message, format!("remove `{name}`")));
        }
        Some(Some(Winner::First)) | None => {}
    }
    if document.root.put(to, entry.spot, entry.node) {
        return Ok(());
    }
    let message = format!("`{name}` means `{to}`, but a part of that is a value and not a table");
    Err(document.source.reject(entry.spot, message, format!("write `{to}` inside its table")))
}

/// `kv_cache.name = "h2o-torch-quantized8"` is a policy and a buffer.
fn split_cache_name(document: &mut Document, notes: &mut Vec<(Spot, String)>) -> Result<(), RecipeError> {
    const BUFFERS: [(&str, &str); 3] = [("-default", "plain"), ("-torch-quantized8", "int8"), ("-torch-quantized4", "int4")];
    const CODE_BOOKS: [(&str, &str); 2] = [("-bnb-quantized8", "int8"), ("-bnb-quantized4", "int4")];
    let Some(entry) = document.root.take("kv_cache.name") else { return Ok(()) };
    let Some(name) = entry.node.as_str().map(str::to_owned) else {
        let hint = "write `policy = \"h2o\"` and `buffer = \"plain\"`";
        return Err(document.source.reject(entry.node.spot, "`kv_cache.name` must be a string".to_owned(), hint));
    };
    let ending = |known: &[(&'static str, &'static str)]| known.iter().copied().find(|(ending, _)| name.ends_with(ending));
    if let Some((other, buffer)) = ending(&CODE_BOOKS) {
        let policy = name.trim_end_matches(other);
        let message = format!("`kv_cache.name = \"{name}\"` asks for the buffer `{}`, which is not there", &other[1..]);
        let hint = format!("write `policy = \"{policy}\"` and `buffer = \"{buffer}\"`");
        return Err(document.source.reject(entry.spot, message, hint));
    }
    let (other, buffer) = ending(&BUFFERS).unwrap_or(("", "plain"));
    let policy = name.strip_suffix(other).unwrap_or(&name).to_owned();
    notes.push((entry.spot, format!("`kv_cache.name = \"{name}\"` is read as `policy = \"{policy}\"`, `buffer = \"{buffer}\"`")));
    let word = |word: &str| Node { value: NodeValue::String(word.to_owned()), spot: entry.node.spot };
    let part = |node| KeyValue { node, ..entry.clone() };
    if !other.is_empty() {
        move_to(document, "kv_cache.name", "kv_cache.buffer", part(word(buffer)))?;
    }
    move_to(document, "kv_cache.name", "kv_cache.policy", part(word(&policy)))
}

/// `kv_cache.grace_period = 64` beside `policy = "h2o"` is `policy.h2o.grace_period`, and `sink_tokens` is `init_grace_tokens`.
fn gather_policy_params(document: &mut Document, notes: &mut Vec<(Spot, String)>) -> Result<(), RecipeError> {
    for key in FLAT {
        let Some(entry) = document.root.take(&format!("kv_cache.{key}")) else { continue };
        let policy = policy_name(document);
        let to = format!("kv_cache.policy.{policy}.{}", if *key == "sink_tokens" { "init_grace_tokens" } else { key });
        notes.push((entry.spot, format!("`kv_cache.{key}` is read as `{to}`")));
        move_to(document, &format!("kv_cache.{key}"), &to, entry)?;
    }
    let names = document.root.entry("kv_cache.policy").map(|policy| policy.node.entries().to_vec()).unwrap_or_default();
    for policy in names.iter().map(|entry| &entry.key) {
        let (name, to) = (format!("kv_cache.policy.{policy}.sink_tokens"), format!("kv_cache.policy.{policy}.init_grace_tokens"));
        // Not by its dotted key: a policy's table that gets empty must stay.
        let Some(params) = document.root.get_mut(&format!("kv_cache.policy.{policy}")) else { continue };
        let Some(entry) = params.take("sink_tokens") else { continue };
        notes.push((entry.spot, format!("`{name}` is read as `{to}`")));
        move_to(document, &name, &to, entry)?;
    }
    Ok(())
}

/// The name of the policy, which becomes a table so that it can take parameters.
fn policy_name(document: &mut Document) -> String {
    let Some(policy) = document.root.get_mut("kv_cache.policy") else {
        return DEFAULT_POLICY.to_owned();
    };
    if let NodeValue::String(name) = &policy.value {
        let (name, spot) = (name.clone(), policy.spot);
        let params = Node { spot, ..Node::table() };
        policy.value = NodeValue::Table(vec![KeyValue { key: name.clone(), spot, node: params }]);
        return name;
    }
    policy.entries().first().map_or_else(|| DEFAULT_POLICY.to_owned(), |entry| entry.key.clone())
}
