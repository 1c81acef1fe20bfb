//! What cannot be, one line each: the message, and the line that the caret stands on.

use kvtune::data::formats;
use kvtune::recipe::{Recipe, TrainedWeights};

use super::{SMALL, Told, refused, with};

/// Lines that are added, the key that must be marked, and a part of the message.
const REFUSED: &[(&str, &str, &str)] = &[
    ("[model]\ndtype = \"f16\"", "dtype", "`model.dtype = \"f16\"` cannot be trained in"),
    ("[model]\ndtype = \"float16\"", "dtype", "cannot be trained in"),
    ("[model]\nadapter = \"\"", "adapter", "`model.adapter` must be a path"),
    ("[model]\nrope_scaling = { factor = 4.0 }", "rope_scaling", "`model.rope_scaling.rope_type` is missing"),
    ("[model]\nrope_scaling = { type = 4 }", "rope_scaling", "`model.rope_scaling.rope_type` is missing"),
    ("[model]\nrope_scaling = 4", "4", "must be a table"),
    ("[lora]\nr = 0", "r", "`lora.r` must be at least 1, found 0"),
    ("[lora]\nr = -1", "-1", "`lora.r` must be a whole number, 0 or more, found `-1`"),
    ("[lora]\nr = 4.0", "4.0", "found `4.0`"),
    ("[lora]\nr = \"4\"", "\"4\"", "found the string \"4\""),
    ("[lora]\nalpha = 0", "alpha", "`lora.alpha` must be more than 0, and finite, found 0.0"),
    ("[lora]\nalpha = -1.0", "alpha", "more than 0"),
    ("[lora]\nalpha = nan", "alpha", "more than 0"),
    ("[lora]\nalpha = inf", "alpha", "and finite"),
    ("[lora]\ndropout = 1.0", "dropout", "at least 0 and less than 1, found 1.0"),
    ("[lora]\ndropout = -0.1", "dropout", "at least 0 and less than 1"),
    ("[lora]\ntarget_modules = []", "target_modules", "must list at least 1, found 0"),
    ("[lora]\ntarget_modules = [\"q_proj\", \"q_proj\"]", "target_modules", "lists \"q_proj\" twice"),
    ("[lora]\ntarget_modules = 3", "3", "or an array of module names, found `3`"),
    ("[data]\nvalidation = \"v\"\nvalidation_fraction = 0.2", "validation_fraction", "contradict each other"),
    ("[data]\nvalidation_fraction = 1.0", "validation_fraction", "less than 1"),
    ("[data]\nvalidation_fraction = -0.5", "validation_fraction", "at least 0"),
    ("[data]\nmax_seq_length = 1", "max_seq_length", "at least 2"),
    ("[data]\nsplit_overlap = 8", "split_overlap", "there are no windows"),
    ("[data]\non_too_long = \"split\"\nmax_seq_length = 9\nsplit_overlap = 8", "split_overlap", "none would go on"),
    ("[data]\ntrain_on_prompt = true", "train_on_prompt", "says nothing"),
    ("[data]\ntrain_on = \"all\"", "train_on", "says nothing"),
    ("[data]\ntrain_on_end_of_turn = false\non_too_long = \"split\"", "train_on_end_of_turn", "contradicts"),
    ("[data]\nboundary = \"joined\"", "boundary", "says nothing"),
    ("[data]\ncolumns = { ids = \"x\", label = \"y\" }", "columns", "names the field `ids`, which `tokens` does not have"),
    ("[data]\nchat_template = \" \"", "chat_template", "is empty"),
    ("[data]\nchat_template_date = \"today\"", "\"today\"", "a date is written as 2026-11-22"),
    ("[data]\ntrain_on_prompt = 1", "1", "must be `true` or `false`, found `1`"),
    ("[head]\nlabels = [\"A\", \"B\"]", "labels", "says nothing where `head.kind` is `next_token`"),
    ("[head]\nkind = \"next_token\"\nlabel_tokens = [1, 2]", "label_tokens", "says nothing"),
    ("[head]\nkind = \"seq_classification_on_logits\"", "kind", "needs classes"),
    (
        "[head]\nkind = \"seq_classification_on_logits\"\nlabels = [\"A\", \"B\"]\nlabel_tokens = [1, 2]",
        "label_tokens",
        "contradict each other",
    ),
    ("[head]\nkind = \"seq_classification_on_logits\"\nlabels = [\"A\"]", "labels", "at least 2, found 1"),
    ("[head]\nkind = \"seq_classification_on_logits\"\nlabel_tokens = [7, 7]", "label_tokens", "lists 7 twice"),
    ("[kv_cache]\nchunk_size = 0", "chunk_size", "`kv_cache.chunk_size` must be at least 1, found 0"),
    ("[kv_cache]\ncache_length = 0", "cache_length", "must be at least 1 and at most 2^40, found 0"),
    ("[kv_cache]\ncache_length = [8, 0]", "cache_length", "at least 1 and at most 2^40, found 0"),
    ("[kv_cache]\ncache_length = []", "cache_length", "at least 1 in every layer"),
    ("[kv_cache]\ncache_length = \"8\"", "\"8\"", "a whole number of slots, an array of one per layer, or"),
    ("[kv_cache]\ncache_length = -8", "-8", "found `-8`"),
    ("[kv_cache]\ncache_length = {}", "{}", "lacks `pyramid`"),
    ("[kv_cache]\ncache_length.pyramid = { mean = 8, top = 9 }", "top", "must be at most the mean, 8, found 9"),
    ("[kv_cache]\ncache_length.pyramid = { mean = 8, top = 0 }", "top", "at least 1 and at most 2^40, found 0"),
    ("[kv_cache]\ncache_length.pyramid = { mean = 0, top = 0 }", "mean", "at least 1 and at most 2^40, found 0"),
    ("[kv_cache]\ncache_length.pyramid = { mean = 8 }", "{ mean = 8 }", "`kv_cache.cache_length.pyramid` lacks `top`"),
    ("[kv_cache]\ncache_length.pyramid = { mean = 8, tip = 4 }", "tip", "unknown key `tip`"),
    ("[kv_cache]\ncache_length.pyramids = { mean = 8, top = 4 }", "pyramids", "unknown key `pyramids`"),
    ("[kv_cache]\nchunk_size = 8\ndecode_block = 9", "decode_block", "is 9, more than `kv_cache.chunk_size`, which is 8"),
    ("[kv_cache]\ndecode_block = 0", "decode_block", "must be at least 1, found 0"),
    (
        "[kv_cache]\npolicy = \"dense\"\nstorage = \"paged\"\nstatic = true",
        "static",
        "contradicts `kv_cache.storage = \"paged\"`",
    ),
    ("[kv_cache]\nchunking = \"bent\"", "\"bent\"", "unknown value `bent`"),
    ("[kv_cache]\nrandomize_chunk_sizes = 1", "1", "must be `true` or `false`"),
    ("[kv_cache]\nbuffer = \"int8\"\n[grad]\nundo_log = \"int8\"", "undo_log", "contradicts `kv_cache.buffer = \"int8\"`"),
    ("[kv_cache]\nbuffer = \"int4\"\n[grad]\nundo_log = \"int8\"", "undo_log", "in the few bits that the cache has for it"),
    (
        "[grad]\nlayers_per_cell = \"automatic\"",
        "\"automatic\"",
        "a whole number, 0 or more, or `\"auto\"`, found the string \"automatic\"",
    ),
    ("[grad]\nlayers_per_cell = \"Auto\"", "\"Auto\"", "or `\"auto\"`, found the string \"Auto\""),
    ("[grad]\nchunks_per_cell = -1", "-1", "a whole number, 0 or more, or `\"auto\"`, found `-1`"),
    ("[grad]\nchunks_per_cell = 1.5", "1.5", "or `\"auto\"`, found `1.5`"),
    ("[grad]\nchunks_per_cell = [\"auto\"]", "[\"auto\"]", "or `\"auto\"`, found an array"),
    ("[grad]\nchunks_per_cell = { auto = true }", "{ auto = true }", "or `\"auto\"`, found a table"),
    ("[grad]\nattention_outputs = \"keep\"\nundo_log = \"int8\"", "attention_outputs", "contradicts a store that rounds"),
    ("[grad]\nundo_log = 8", "8", "`grad.undo_log` must be `plain`, `int8`, `int4` or `auto`, found `8`"),
    ("[grad]\nchunks_per_cell_multiplier = \"auto\"", "\"auto\"", "must be a number, found the string \"auto\""),
    ("[grad]\nsingle_tokens_for_targets = \"auto\"", "\"auto\"", "must be `true` or `false`, found the string \"auto\""),
    ("[kv_cache]\nchunk_size = \"auto\"", "\"auto\"", "must be a whole number, 0 or more, found the string \"auto\""),
    ("[kv_cache]\nbuffer = \"auto\"", "\"auto\"", "unknown value `auto` for `kv_cache.buffer`"),
    ("[kv_cache]\nbuffer = 8", "8", "`kv_cache.buffer` must be `plain`, `int8` or `int4`, found `8`"),
    (
        "[kv_cache]\nbuffer = \"int8\"\n[grad]\nundo_log = \"int8\"\nundo_log_place = \"auto\"",
        "undo_log",
        "contradicts `kv_cache.buffer = \"int8\"`",
    ),
    ("[grad]\nundo_log = \"int2\"", "\"int2\"", "unknown value `int2`"),
    ("[grad]\nlayer_checkpoints_place = \"disk\"", "\"disk\"", "unknown value `disk`"),
    ("[grad]\nscratch_dir = \"\"", "scratch_dir", "`grad.scratch_dir` must be a path"),
    (
        "[grad]\nsingle_tokens_for_targets = true\n[head]\nkind = \"seq_classification_on_logits\"\nlabel_tokens = [1, 2]",
        "single_tokens_for_targets",
        "contradicts the head",
    ),
    ("[kv_cache]\nstorage = \"growing\"", "storage", "contradicts the policy `h2o`"),
    ("[kv_cache]\npolicy = { h2o = {}, dense = {} }", "dense", "a table with exactly one, found `h2o` and `dense`"),
    ("[kv_cache]\npolicy = {}", "policy", "found an empty table"),
    ("[kv_cache]\npolicy = 3", "3", "found `3`"),
    ("[kv_cache]\npolicy = { h2o = 3 }", "h2o", "`h2o` without a table of parameters"),
    ("[kv_cache]\nname = \"h2o-bnb-quantized8\"", "name", "the buffer `bnb-quantized8`, which is not there"),
    ("[kv_cache]\nname = 3", "3", "`kv_cache.name` must be a string"),
    ("[grad]\nlayers_per_cell = 0", "layers_per_cell", "at least 1"),
    ("[grad]\nchunks_per_cell_multiplier = 0.05", "chunks_per_cell_multiplier", "at least 0.1, found 0.05"),
    ("[grad]\nchunks_per_cell_multiplier = nan", "chunks_per_cell_multiplier", "at least 0.1"),
    ("[grad]\nchunks_per_cell = 0", "chunks_per_cell", "at least 1"),
    ("[train]\nmicro_batch_size = 0", "micro_batch_size", "at least 1"),
    ("[train]\nmax_tokens_per_batch = 0", "max_tokens_per_batch", "at least 1"),
    ("[train]\nmicro_batch_size = 2\nmax_tokens_per_batch = 9", "max_tokens_per_batch", "contradict each other"),
    ("[train]\ngradient_accumulation_steps = 0", "gradient_accumulation_steps", "at least 1"),
    ("[train]\nmax_steps = 0", "max_steps", "at least 1"),
    ("[train]\nepochs = 0", "epochs", "more than 0"),
    ("[train]\nmax_grad_norm = 0", "max_grad_norm", "more than 0"),
    ("[train]\nseed = -1", "-1", "a whole number, 0 or more"),
    ("[train]\nweights = \"full\"", "\"full\"", "unknown value `full` for `train.weights`"),
    ("[train]\nweights = \"all\"\n[lora]\nr = 4", "lora", "`[lora]` says nothing where all weights are trained"),
    ("[lora]\n[train]\nweights = \"all\"", "lora", "there is no adapter"),
    ("[optimizer]\nlearning_rate = 0.0", "learning_rate", "more than 0"),
    ("[optimizer]\nlearning_rate = -1e-4", "learning_rate", "more than 0"),
    ("[optimizer]\nweight_decay = -0.1", "weight_decay", "0 or more"),
    ("[optimizer]\nmomentum = 0.9", "momentum", "`adamw` has no such thing: `sgd`, `rmsprop` have"),
    ("[optimizer]\nname = \"sgd\"\neps = 1e-6", "eps", "`sgd` has no such thing"),
    ("[optimizer]\nname = \"sgd\"\nnesterov = true", "nesterov", "nothing to look ahead with"),
    ("[optimizer]\nname = \"sgd\"\ndampening = 0.1", "dampening", "needs a momentum"),
    ("[optimizer]\nname = \"sgd\"\nmomentum = 0.9\nnesterov = true\ndampening = 0.1", "dampening", "does not look ahead"),
    ("[optimizer]\nschedule = \"constant\"\nmin_lr_ratio = 0.1", "min_lr_ratio", "never falls"),
    ("[optimizer]\nbetas = [1.0, 0.999]", "betas", "less than 1"),
    ("[optimizer]\nbetas = [0.9, -0.1]", "betas", "at least 0"),
    ("[optimizer]\nbetas = [0.9]", "[0.9]", "an array of length 2, found one of length 1"),
    ("[optimizer]\nbetas = [0.9, 0.9, 0.9]", "[0.9, 0.9, 0.9]", "length 3"),
    ("[optimizer]\neps = 0", "eps", "more than 0"),
    ("[optimizer]\nwarmup_steps = 3\nwarmup_ratio = 0.1", "warmup_ratio", "contradict each other"),
    ("[optimizer]\nwarmup_ratio = 1.5", "warmup_ratio", "less than 1"),
    ("[eval]\nmetric = \"accuracy\"", "metric", "contradicts the head `next_token`"),
    ("[eval]\ninterval = 0", "interval", "at least 1"),
    ("[eval]\nmicro_batch_size = 0", "micro_batch_size", "at least 1"),
    ("[eval]\nmax_batches = 0", "max_batches", "at least 1"),
    ("[eval.generate]\nmetrics = []", "metrics", "must list at least 1"),
    ("[eval.generate]\nmetrics = [\"f1\", \"f1\"]", "metrics", "lists \"f1\" twice"),
    ("[eval.generate]\nmetrics = [\"f1\"]\nsamples = 0", "samples", "at least 1"),
    ("[eval]\nmetric = \"f1\"\ngenerate = { metrics = [\"rouge_l\"] }", "metric", "not among the metrics of `eval.generate`"),
    (
        "[eval.generate]\nmetrics = [\"f1\"]\n[head]\nkind = \"seq_classification_on_logits\"\nlabels = [\"A\", \"B\"]",
        "generate",
        "contradicts the head",
    ),
    ("[checkpoint]\nsave_interval = 0", "save_interval", "at least 1"),
    ("[checkpoint]\nintermediate_save_interval = 0", "intermediate_save_interval", "at least 1"),
    ("[checkpoint]\nintermediate_save_keep = 0", "intermediate_save_keep", "at least 1"),
    ("[log]\ninterval = 0", "interval", "at least 1"),
    ("output_dir = \"\"", "output_dir", "must be a path"),
    ("lora = 3", "3", "`lora` must be a table, found `3`"),
    ("[[lora]]\nr = 3", "[[lora]]", "`lora` must be a table, found an array"),
];

#[test]
fn each_is_refused_where_it_stands() {
    for (lines, marked, message) in REFUSED {
        let text = with(lines);
        let error = refused(&text);
        assert!(error.message().contains(message), "{lines}: {error}");
        let (line, column) = (error.line().expect(lines), error.column().expect(lines));
        let written = text.lines().nth(line - 1).unwrap();
        assert!(written[column - 1..].starts_with(marked), "{lines}: {error}");
        let under = error.to_string().lines().last().map_or(0, |line| line.matches('^').count());
        assert_eq!(under, marked.len(), "{lines}: {error}");
    }
}

#[test]
fn a_prompt_cannot_be_trained_on_by_a_classification() {
    for (lines, words) in [
        ("[data]\ntrain_on = \"completion\"", "means what follows a prompt, and `messages` has none"),
        ("[data]\ntrain_on = \"last\"\ntrain_on_prompt = true", "contradicts `data.train_on = \"last\"`"),
        ("[head]\nkind = \"seq_classification\"\nnum_labels = 2", "a conversation has no class"),
    ] {
        let error = refused(&with(lines).replace("\"tokens\"", "\"messages\""));
        assert!(error.to_string().contains(words), "{lines}: {error}");
    }
    let text = with("[data]\ntrain_on_prompt = true").replace("\"tokens\"", "\"longbench-v2\"");
    let error = refused(&format!("{text}[head]\nkind = \"seq_classification_on_logits\"\nlabels = [\"A\", \"B\"]\n"));
    assert!(error.message().contains("contradicts"), "{error}");
}

#[test]
fn an_adapter_to_start_from_needs_one_that_is_trained() {
    let error = refused(&format!("{}[train]\nweights = \"all\"\n", with("[model]\nadapter = \"a\"")));
    assert!(error.message().starts_with("`model.adapter` says nothing where all weights are trained"), "{error}");
    assert_eq!(error.line(), Some(2));
}

#[test]
fn what_is_trained_is_what_the_command_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.toml");
    let load = |text: &str, weights: TrainedWeights| {
        std::fs::write(&path, text).unwrap();
        Recipe::load_to_train(&path, &[], weights).map(|resolved| resolved.recipe)
    };
    for &weights in TrainedWeights::ALL {
        let recipe = load(&with(""), weights).unwrap();
        assert_eq!((recipe.train.weights, recipe.lora.is_some()), (weights, weights == TrainedWeights::Adapter));
        assert_eq!(load(&recipe.to_toml(), weights).unwrap(), recipe);
        let other = if weights == TrainedWeights::All { TrainedWeights::Adapter } else { TrainedWeights::All };
        let error = load(&recipe.to_toml(), other).unwrap_err();
        let expected = format!("`train.weights = \"{weights}\"` contradicts the command, which trains `{other}`");
        assert!(error.message() == expected && error.hint().is_some() && error.line().is_some(), "{error}");
    }
    assert!(load(&with("[lora]\nr = 4"), TrainedWeights::All).unwrap_err().message().starts_with("`[lora]` says nothing"));
}

#[test]
fn what_has_no_default_is_missed_by_name() {
    let error = refused("[model]\ndtype = \"f32\"\n[data]\nformat = \"tokens\"\ntrain = \"t\"\n");
    assert_eq!((error.message().as_str(), error.line()), ("`model.path` is missing: the directory of the model", Some(1)));
    let error = refused("[data]\nformat = \"tokens\"\n");
    assert_eq!((error.message().as_str(), error.line()), ("`data.train` is missing: the file of training examples", Some(1)));
    let error = refused("");
    assert!(error.message().starts_with("`model.path` is missing") && error.line().is_none(), "{error}");
    assert!(error.further()[0].message().starts_with("`data.train` is missing"), "{error}");
    assert!(error.to_string().ends_with("\n  --> /nowhere/a.toml"), "{error}");
}

#[test]
fn a_format_that_there_is_not_is_refused_where_it_stands() {
    let names: Vec<String> = formats().iter().map(|format| format!("`{}`", format.name)).collect();
    let (last, rest) = names.split_last().unwrap();
    let all = format!("{} or {last}", rest.join(", "));
    for (written, message, hint) in [
        ("\"txt\"", "unknown value `txt` for `data.format`".to_owned(), "did you mean `text`?".to_owned()),
        ("\"xml\"", "unknown value `xml` for `data.format`".to_owned(), format!("choose {all}")),
        ("3", format!("`data.format` must be {all}, found `3`"), format!("write {all}")),
    ] {
        let error = refused(&SMALL.replace("\"tokens\"", written));
        assert_eq!((error.message(), error.hint().unwrap()), (message, hint));
        assert_eq!((error.line(), error.column()), (Some(4), Some(10)));
    }
}
