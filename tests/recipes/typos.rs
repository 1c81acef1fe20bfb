//! Seeded typos: each must get the right line and the right suggestion.

use super::{SMALL, Told, parse_with, refused, with};

/// A recipe with every table; the typos are put into it.
const FULL: &str = r#"output_dir = "run"
[model]
path = "model"
adapter = "adapter"
dtype = "f32"
[lora]
r = 4
alpha = 8
dropout = 0.1
target_modules = "all-linear"
[data]
format = "longbench-v2"
train = "t.json"
validation_fraction = 0.1
max_seq_length = 4096
on_too_long = "drop"
order = "shuffled"
train_on_prompt = false
[head]
kind = "seq_classification_on_logits"
label_tokens = [40, 41]
[kv_cache]
policy = "h2o"
buffer = "plain"
cache_length = 32
chunk_size = 8
chunking = "reference"
randomize_chunk_sizes = false
storage = "preallocated"
[grad]
layers_per_cell = 1
chunks_per_cell_multiplier = 1.0
layer_checkpoints = "plain"
single_tokens_for_targets = false
[train]
micro_batch_size = 2
gradient_accumulation_steps = 2
max_steps = 1
epochs = 2
max_grad_norm = 1.0
seed = 1
deterministic = true
[optimizer]
learning_rate = 1e-4
weight_decay = 0.0
betas = [0.9, 0.999]
schedule = "cosine"
warmup_steps = 3
[eval]
interval = 5
initial = true
metric = "accuracy"
mode = "max"
[checkpoint]
save_interval = 10
intermediate_save_interval = 5
intermediate_save_keep = 3
[log]
interval = 2
"#;

/// What is written right, what is written instead, and what must be suggested (where it is not the former).
const TYPOS: &[(&str, &str, &str)] = &[
    ("output_dir", "ouput_dir", ""),
    ("[model]", "[modle]", "model"),
    ("path =", "pth =", "path"),
    ("adapter =", "adaptor =", "adapter"),
    ("dtype =", "dtpye =", "dtype"),
    ("\"f32\"", "\"f23\"", "f32"),
    ("[lora]", "[Lora]", "lora"),
    ("alpha =", "aplha =", "alpha"),
    ("dropout =", "drop_out =", "dropout"),
    ("dropout =", "droput =", "dropout"),
    ("target_modules =", "target_module =", "target_modules"),
    ("\"all-linear\"", "\"all-linaer\"", "all-linear"),
    ("format =", "fromat =", "format"),
    ("\"longbench-v2\"", "\"longbench-2\"", "longbench-v2"),
    ("validation_fraction =", "validation_fration =", "validation_fraction"),
    ("max_seq_length =", "max_seq_lenght =", "max_seq_length"),
    ("on_too_long =", "on_to_long =", "on_too_long"),
    ("\"drop\"", "\"dorp\"", "drop"),
    ("\"shuffled\"", "\"shufled\"", "shuffled"),
    ("train_on_prompt =", "train_on_promt =", "train_on_prompt"),
    ("kind =", "knd =", "kind"),
    ("\"seq_classification_on_logits\"", "\"seq_classification_on_logit\"", "seq_classification_on_logits"),
    ("label_tokens =", "lable_tokens =", "label_tokens"),
    ("[kv_cache]", "[kvcache]", "kv_cache"),
    ("[kv_cache]", "[kv_cahce]", "kv_cache"),
    ("policy =", "polcy =", "policy"),
    ("buffer =", "bufer =", "buffer"),
    ("cache_length =", "cache_lenght =", "cache_length"),
    ("cache_length =", "cacheLength =", "cache_length"),
    ("chunk_size =", "chunk_sise =", "chunk_size"),
    ("chunk_size =", "chunksize =", "chunk_size"),
    ("chunking =", "chunkin =", "chunking"),
    ("\"reference\"", "\"refrence\"", "reference"),
    ("randomize_chunk_sizes =", "randomise_chunk_sizes =", "randomize_chunk_sizes"),
    ("\"preallocated\"", "\"pre-alocated\"", "preallocated"),
    ("layers_per_cell =", "layer_per_cell =", "layers_per_cell"),
    ("chunks_per_cell_multiplier =", "chunks_per_cell_mulitplier =", "chunks_per_cell_multiplier"),
    ("layer_checkpoints =", "layer_checkpoint =", "layer_checkpoints"),
    ("single_tokens_for_targets =", "single_token_for_targets =", "single_tokens_for_targets"),
    ("micro_batch_size =", "microbatch_size =", "micro_batch_size"),
    ("gradient_accumulation_steps =", "gradient_acumulation_steps =", "gradient_accumulation_steps"),
    ("max_steps =", "max_step =", "max_steps"),
    ("epochs =", "epoch =", "epochs"),
    ("max_grad_norm =", "max_gard_norm =", "max_grad_norm"),
    ("seed =", "sede =", "seed"),
    ("[optimizer]", "[optimiser]", "optimizer"),
    ("learning_rate =", "leraning_rate =", "learning_rate"),
    ("weight_decay =", "wieght_decay =", "weight_decay"),
    ("schedule =", "shedule =", "schedule"),
    ("\"cosine\"", "\"cosin\"", "cosine"),
    ("warmup_steps =", "warmup_step =", "warmup_steps"),
    ("initial =", "inital =", "initial"),
    ("metric =", "metrik =", "metric"),
    ("\"accuracy\"", "\"accurcay\"", "accuracy"),
    ("[checkpoint]", "[checkpoints]", "checkpoint"),
    ("intermediate_save_keep =", "intermediate_save_kep =", "intermediate_save_keep"),
    // A typo of an alias leads to the alias.
    ("r = 4", "rnak = 4", "rank"),
];

#[test]
fn every_typo_gets_the_right_line_and_suggestion() {
    assert!(TYPOS.len() >= 30);
    for (right, wrong, suggestion) in TYPOS {
        let at = FULL.find(&format!("\n{right}")).map(|at| at + 1).or_else(|| FULL.find(right)).unwrap();
        let line = FULL[..at].matches('\n').count() + 1;
        let error = refused(&format!("{}{wrong}{}", &FULL[..at], &FULL[at + right.len()..]));
        let suggestion = if suggestion.is_empty() { right } else { suggestion };
        assert_eq!(error.hint(), Some(format!("did you mean `{suggestion}`?")), "{wrong}: {error}");
        assert_eq!(error.line(), Some(line), "{wrong}: {error}");
        let marked = error.to_string().lines().last().unwrap().matches('^').count();
        let word = wrong.trim_end_matches(" =").trim_matches(['[', ']']).split(" = ").next().unwrap();
        assert_eq!(marked, word.chars().count(), "{wrong}: {error}");
    }
}

#[test]
fn a_key_in_the_wrong_table_is_told_where_it_belongs() {
    for (table, key, hint) in [
        ("[train]", "chunk_size", "`chunk_size` belongs in `[kv_cache]`"),
        ("[data]", "output_dir", "`output_dir` belongs at the top of the file"),
        ("[train]", "lr_scheduler_type", "`lr_scheduler_type` belongs in `[optimizer]`, as `schedule`"),
        ("[kv_cache]", "max_steps", "`max_steps` belongs in `[train]`"),
        ("[model]", "use_dora", "`use_dora` belongs in `[lora]`"),
        ("[train]", "use_rslora", "`use_rslora` belongs in `[lora]`"),
        ("[data]", "interval", "did you mean `eval.interval` or `log.interval`?"),
    ] {
        let error = refused(&with(&format!("{table}\n{key} = 1")));
        assert_eq!((error.hint().unwrap().as_str(), error.further().len()), (hint, 0), "{error}");
        let error = parse_with(SMALL, &[&format!("{}.{key}=1", table.trim_matches(['[', ']']))]).map(drop).unwrap_err();
        assert_eq!(error.hint().unwrap(), hint, "{error}");
    }
}

#[test]
fn a_word_that_may_be_auto_has_it_among_its_suggestions() {
    let suggestions = [
        ("layer_checkpoints = \"int9\"", "did you mean `int8`?"),
        ("layer_checkpoints = \"atuo\"", "did you mean `auto`?"),
        ("layer_checkpoints = \"Auto\"", "did you mean `auto`?"),
        ("layer_checkpoints = \"exact\"", "choose `plain`, `int8`, `int4` or `auto`"),
        ("undo_log_place = \"disk\"", "choose `memory`, `file` or `auto`"),
        ("undo_log_place = 3", "write `memory`, `file` or `auto`"),
        ("layers_per_cell = \"automatic\"", "write a whole number, 0 or more, or `\"auto\"`"),
    ];
    for (line, hint) in suggestions {
        assert_eq!(refused(&with(&format!("[grad]\n{line}"))).hint().unwrap(), hint, "{line}");
    }
    // Elsewhere the word is none.
    assert_eq!(refused(&with("[kv_cache]\nbuffer = \"exact\"")).hint().unwrap(), "choose `plain`, `int8` or `int4`");
}

#[test]
fn the_error_shows_the_line_with_a_caret_below_the_key() {
    let error = refused(&FULL.replace("chunk_size", "chunk_sise"));
    let expected =
        "unknown key `chunk_sise` in `[kv_cache]`\n  --> /nowhere/a.toml:26:1\n   |\n26 | chunk_sise = 8\n   | ^^^^^^^^^^";
    assert_eq!(error.to_string(), expected);
    assert_eq!((error.to_string().lines().count(), error.line(), error.column()), (5, Some(26), Some(1)));
}

#[test]
fn keys_of_other_programs_without_a_counterpart_get_advice() {
    for (table, key) in
        [("[train]", "global_batch_size"), ("[checkpoint]", "save_total_limit"), ("[train]", "packing"), ("[data]", "datasets")]
    {
        let error = refused(&FULL.replace(table, &format!("{table}\n{key} = 1")));
        assert!(!error.hint().unwrap().starts_with("did you mean"), "{error}");
        assert!(error.message().contains(key), "{error}");
    }
    assert_eq!(refused(&FULL.replace("[log]", "[log]\nfoo = 1")).hint().unwrap(), "choose `interval`");
}

#[test]
fn an_override_has_the_same_suggestions() {
    let error = parse_with(FULL, &["kv_cache.chunk_sise=8"]).map(|r| r.recipe).unwrap_err();
    let expected = "unknown key `chunk_sise` in `[kv_cache]`\n  --> --set kv_cache.chunk_sise=8";
    assert_eq!((error.to_string().as_str(), error.hint().unwrap().as_str()), (expected, "did you mean `chunk_size`?"));
    let error = parse_with(FULL, &["chunk_size_=8"]).map(|r| r.recipe).unwrap_err();
    assert_eq!(error.hint().unwrap(), "did you mean `chunk_size`?");
}

#[test]
fn text_that_is_not_toml_is_refused_where_it_stands() {
    let cases = [
        ("r = 4", "r = ", 7),
        ("r = 4", "r = 4\nr = 5", 8),
        ("dtype = \"f32\"", "dtype = f32", 5),
        ("[lora]", "[lora", 6),
        ("seed = 1", "seed = 99999999999999999999", 41),
        ("alpha = 8", "alpha = 1e999", 8),
    ];
    for (right, wrong, line) in cases {
        let error = refused(&FULL.replace(right, wrong));
        assert_eq!(error.line(), Some(line), "{wrong}: {error}");
    }
    // Neither a file without an end of line nor one of another system moves the caret.
    assert_eq!(refused("[model]\r\npath = \"m\"\r\npat = 1").line(), Some(3));
    assert_eq!(refused("[model]\npath = \"ä\" # ä\nä = 1").column(), Some(1));
}
