//! Spellings of other programs: read as kvtune's own, with a note; two spellings of one thing are refused.

use super::{SMALL, Told, parse, refused, with};

/// kvtune's spelling, and another one that must lead to the same recipe.
const SAME: &[(&str, &str)] = &[
    ("[model]\ndtype = \"bf16\"", "[model]\nprecision = \"bf16-true\""),
    ("[model]\ndtype = \"bf16\"", "[model]\ntorch_dtype = \"bfloat16\""),
    ("[model]\ndtype = \"bf16\"", "precision = \"bf16\""),
    ("[model]\ndtype = \"f32\"", "dtype = \"float32\""),
    ("[model]\ndtype = \"f64\"", "precision = \"64-true\""),
    ("[model]\ndtype = \"f32\"", "[model]\nprecision = 32"),
    ("[model]\ndtype = \"bf16\"", "bf16 = true"),
    ("[model]\ndtype = \"bf16\"", "[train]\nbf16 = \"auto\""),
    ("[lora]\ntarget_modules = \"all-linear\"", "lora_target_linear = true"),
    ("[optimizer]\nwarmup_ratio = 0.2", "warmup_ratio = 0.2"),
    ("[optimizer]\nwarmup_ratio = 0.2", "[train]\nwarmup_ratio = 0.2"),
    ("[train]\noffload = \"optimizer\"", "[train]\ncpu_offload = true"),
    ("[model]\nallow_tf32 = true", "tf32 = true"),
    ("[model]\nallow_tf32 = true", "[train]\ntf32 = true"),
    ("[model]\nallow_tf32 = false", "[model]\ntf32 = false"),
    ("[train]\ndeterministic = true", "deterministic = true"),
    ("[train]\ndeterministic = true", "[train]\nfull_determinism = true"),
    ("[grad]\ncuda_graphs = true", "[train]\ncuda_graphs = true"),
    ("[grad]\ncuda_graphs = true", "cuda_graphs = true"),
    ("[lora]\nr = 5", "[lora]\nrank = 5"),
    ("[lora]\nr = 5", "[lora]\nlora_r = 5"),
    ("[lora]\nr = 5", "[lora]\nlora_rank = 5"),
    ("[lora]\nr = 5", "[model]\nlora_rank = 5"),
    ("[lora]\nr = 5", "lora_r = 5"),
    ("[lora]\nalpha = 5", "[lora]\nlora_alpha = 5"),
    ("[lora]\nalpha = 5", "lora_alpha = 5"),
    ("[lora]\ndropout = 0.5", "[lora]\nlora_dropout = 0.5"),
    ("[lora]\ntarget_modules = [\"q_proj\"]", "[lora]\ntarget = [\"q_proj\"]"),
    ("[lora]\ntarget_modules = [\"q_proj\"]", "[lora]\nlora_target = [\"q_proj\"]"),
    ("[lora]\ntarget_modules = \"all-linear\"", "[lora]\nlora_target = \"all\""),
    ("[lora]\ntarget_modules = [\"q_proj\"]", "lora_target_modules = [\"q_proj\"]"),
    ("[data]\nmax_seq_length = 99", "[data]\nsequence_len = 99"),
    ("[data]\nmax_seq_length = 99", "[data]\ncutoff_len = 99"),
    ("[data]\nmax_seq_length = 99", "[data]\nmax_seq_len = 99"),
    ("[data]\nmax_seq_length = 99", "[tokenizer]\nmax_seq_len = 99"),
    ("[data]\non_too_long = \"error\"", "[data]\nexcess_length_strategy = \"raise\""),
    ("[data]\non_too_long = \"drop\"", "excess_length_strategy = \"drop\""),
    ("[data]\ntrain_on_prompt = false", "[data]\ntrain_on_inputs = false"),
    ("[data]\ntrain_on_end_of_turn = false", "[data]\ntrain_on_eot = false"),
    ("[data]\nchat_template = \"x\"", "chat_template = \"x\""),
    ("[data]\nvalidation_fraction = 0.2", "[data]\nval_split_fraction = 0.2"),
    ("[data]\norder = \"longest_first\"", "[data]\norder = \"longest-first\""),
    ("[data]\norder = \"shortest_first\"", "[data]\norder = \"shortest-first\""),
    ("[head]\nkind = \"next_token\"", "[head]\nkind = \"next_token_prediction\""),
    ("[kv_cache]\nbuffer = \"plain\"", "[kv_cache]\nbuffer = \"default\""),
    ("[kv_cache]\npolicy = \"lastrec\"", "[kv_cache]\nname = \"lastrec-default\""),
    ("[kv_cache]\npolicy = \"h2o\"", "[kv_cache]\nname = \"h2o\""),
    ("[kv_cache]\npolicy = \"smart-lastrec\"", "[kv_cache]\nname = \"smart-lastrec-default\""),
    ("[kv_cache]\npolicy.h2o.grace_period = 4", "[kv_cache]\npolicy = \"h2o\"\ngrace_period = 4"),
    ("[kv_cache]\npolicy.h2o.grace_period = 4", "[kv_cache]\nname = \"h2o-default\"\ngrace_period = 4"),
    ("[kv_cache]\npolicy.h2o = { grace_period = 4, normalize_scores = true }", "[kv_cache]\ngrace_period = 4"),
    ("[kv_cache]\npolicy.h2o = { grace_period = 0.375, normalize_scores = false }", "[kv_cache]\nnormalize_scores = false"),
    (
        "[kv_cache]\npolicy.h2o = { grace_period = 4, normalize_scores = true, keep_initial_fraction = 0.5 }",
        "[kv_cache]\ngrace_period = 4\npolicy.h2o.normalize_scores = true\nkeep_initial_fraction = 0.5",
    ),
    ("[kv_cache]\npolicy.lastrec.init_grace_tokens = 4", "[kv_cache]\npolicy.lastrec.sink_tokens = 4"),
    ("[kv_cache]\npolicy.lastrec.init_grace_tokens = 4", "[kv_cache]\npolicy = \"lastrec\"\nsink_tokens = 4"),
    ("[kv_cache]\npolicy.lastrec.init_grace_tokens = 4", "[kv_cache]\npolicy = \"lastrec\"\ninit_grace_tokens = 4"),
    ("[kv_cache]\nrandomize_chunk_sizes = true", "randomize_chunk_sizes = true"),
    ("[grad]\nsingle_tokens_for_targets = true", "single_tokens_for_targets = true"),
    ("[grad]\nlayer_checkpoints = \"int8\"", "[grad]\nlayercp_qname = \"torch-quantized8\""),
    ("[grad]\nlayer_checkpoints = \"plain\"", "[grad]\nlayercp_qname = \"default\""),
    ("[train]\nmicro_batch_size = 3", "[train]\nbatch_size = 3"),
    ("[train]\nmicro_batch_size = 3", "[train]\nper_device_train_batch_size = 3"),
    ("[train]\nmicro_batch_size = 3", "micro_batch_size = 3"),
    ("[train]\nmax_tokens_per_batch = 3", "[train]\ntokens_per_batch = 3"),
    ("[train]\nmax_tokens_per_batch = 3", "max_tokens_per_batch = 3"),
    ("[data]\norder = \"length_buckets\"", "[data]\norder = \"group_by_length\""),
    ("[train]\ngradient_accumulation_steps = 3", "[train]\naccumulation = 3"),
    ("[train]\ngradient_accumulation_steps = 3", "gradient_accumulation_steps = 3"),
    ("[train]\nepochs = 3", "[train]\nnum_train_epochs = 3"),
    ("[train]\nepochs = 3", "num_epochs = 3"),
    ("[train]\nmax_steps = 3", "max_steps = 3"),
    ("[train]\nmax_grad_norm = 3.0", "[train]\nclip_grad_norm = 3.0"),
    ("[train]\nmax_grad_norm = 3.0", "[train]\nmax_norm = 3.0"),
    ("[train]\nseed = 3", "seed = 3"),
    ("[train]\nseed = 3", "[train]\nrandom_seed = 3"),
    ("[optimizer]\nlearning_rate = 0.3", "[optimizer]\nlr = 0.3"),
    ("[optimizer]\nlearning_rate = 0.3", "[train]\nlearning_rate = 0.3"),
    ("[optimizer]\nlearning_rate = 0.3", "learning_rate = 0.3"),
    ("[optimizer]\nbetas = [0.5, 0.6]", "[optimizer]\nadam_betas = [0.5, 0.6]"),
    ("[optimizer]\nschedule = \"linear\"", "[optimizer]\nlr_scheduler_type = \"linear\""),
    ("[optimizer]\nschedule = \"linear\"", "lr_scheduler = \"linear\""),
    ("[optimizer]\nschedule = \"linear\"\nwarmup_steps = 7", "[scheduler]\nname = \"linear\"\nwarmup_steps = 7"),
    ("[optimizer]\nwarmup_steps = 7", "[optimizer]\nnum_warmup_steps = 7"),
    ("[optimizer]\nwarmup_ratio = 0.2", "[train]\nlr_warmup_fraction = 0.2"),
    ("[eval]\ninterval = 7", "[eval]\nsteps = 7"),
    ("[eval]\ninterval = 7", "eval_steps = 7"),
    ("[eval]\ninitial = true", "[eval]\ninitial_validation = true"),
    ("[eval]\nmax_batches = 7", "[eval]\nmax_iters = 7"),
    ("[checkpoint]\nsave_interval = 7", "[checkpoint]\nsave_steps = 7"),
    ("[checkpoint]\nsave_interval = 7", "[train]\nsave_interval = 7"),
    ("[checkpoint]\nintermediate_save_interval = 7", "[train]\nintermed_save_interval = 7"),
    ("[checkpoint]\nintermediate_save_keep = 7", "[checkpoint]\nintermed_save_num = 7"),
    ("[log]\ninterval = 7", "[log]\nsteps = 7"),
    ("[log]\ninterval = 7", "logging_steps = 7"),
    ("[log]\ninterval = 7", "log_every_n_steps = 7"),
    ("output_dir = \"run\"", "out_dir = \"run\""),
    ("output_dir = \"run\"", "[training]\noutput_dir = \"run\""),
];

#[test]
fn each_means_the_same_and_is_noted_with_its_line() {
    for (own, other) in SAME {
        let expected = parse(&with(own)).unwrap_or_else(|e| panic!("{own}: {e}"));
        let text = with(other);
        let read = parse(&text).unwrap_or_else(|e| panic!("{other}: {e}"));
        assert_eq!(read.recipe, expected.recipe, "{other}");
        assert_eq!(expected.notes, Vec::<String>::new(), "{own}");
        assert!(!read.notes.is_empty(), "{other}");
        assert!(read.notes.iter().all(|note| note.starts_with("/nowhere/a.toml:") && !note.contains('\n')), "{:?}", read.notes);
    }
}

#[test]
fn what_says_nothing_here_is_left_out_with_a_note() {
    let own = parse(SMALL).unwrap().recipe;
    for line in [
        "task_type = \"CAUSAL_LM\"",
        "peft_type = \"LORA\"",
        "eval_strategy = \"steps\"",
        "gradient_checkpointing = true",
        "flash_attention = true",
        "load_in_4bit = false",
        "load_in_8bit = false",
        "fp16 = false",
        "bf16 = false",
        "lora_target_linear = false",
    ] {
        for text in [with(line), with(&format!("[train]\n{line}")), with(&format!("[model]\n{line}"))] {
            let read = parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!((read.recipe, read.notes.len()), (own.clone(), 1), "{text}");
            assert!(read.notes[0].contains("is left out: "), "{:?}", read.notes);
        }
    }
    let notes = parse(&with("[train]\nbf16 = true")).unwrap().notes;
    assert_eq!(notes, ["/nowhere/a.toml:7: `train.bf16 = true` is read as `model.dtype = \"bf16\"`"]);
}

#[test]
fn what_asks_for_something_else_is_refused_with_a_way_out() {
    for (line, message, hint) in [
        ("fp16 = true", "`fp16` is not supported: gradients fall below", "`model.dtype = \"bf16\"`"),
        ("load_in_4bit = true", "`model.quantize` says how weights are packed", "`model.quantize = \"nf4\"`"),
        ("load_in_8bit = true", "not supported", "`\"int8\"`"),
        ("task_type = \"SEQ_CLS\"", "`head.kind`", "`head.kind = \"seq_classification\"`"),
        ("task_type = \"TOKEN_CLS\"", "no such head", "`head.kind`"),
        ("peft_type = \"IA3\"", "the adapter is LoRA", "`lora.use_dora`"),
        ("eval_strategy = \"epoch\"", "every `eval.interval` steps", "`eval.interval` in steps"),
        ("eval_strategy = \"no\"", "some samples validate", "`data.validation_fraction = 0`"),
        ("assistant_only_loss = false", "`data.train_on`", "`\"all\"`"),
        ("neftune_noise_alpha = 5", "no noise", "leave it out"),
        ("bf16 = 3", "unknown value `3` for `bf16`", "choose `true`, `auto`, `full` or `false`"),
    ] {
        let error = refused(&with(line));
        assert!(error.message().contains(message) && error.hint().unwrap().contains(hint), "{error}: {:?}", error.hint());
        assert_eq!((error.line(), error.further().len()), (Some(1), 0), "{error}");
    }
}

#[test]
fn the_note_says_what_is_read_as_what() {
    let notes = parse(&with("[lora]\nrank = 5\nlora_alpha = 3")).unwrap().notes;
    let expected =
        ["/nowhere/a.toml:7: `lora.rank` is read as `lora.r`", "/nowhere/a.toml:8: `lora.lora_alpha` is read as `lora.alpha`"];
    assert_eq!(notes, expected);
    let notes = parse(&with("[kv_cache]\nname = \"h2o-default\"")).unwrap().notes;
    assert_eq!(
        notes,
        ["/nowhere/a.toml:7: `kv_cache.name = \"h2o-default\"` is read as `policy = \"h2o\"`, `buffer = \"plain\"`"]
    );
}

#[test]
fn only_what_the_assistant_says_is_trained_by_another_name() {
    let chat = |line: &str| parse(&with(line).replace("\"tokens\"", "\"messages\"")).unwrap();
    let read = chat("assistant_only_loss = true");
    assert_eq!((read.recipe, read.notes.len()), (chat("[data]\ntrain_on = \"assistant\"").recipe, 1));
}

#[test]
fn model_and_data_have_other_names_too() {
    let own = parse(SMALL).unwrap().recipe;
    for (name, other) in [("path =", "base_model ="), ("path =", "checkpoint_dir ="), ("path =", "model_name_or_path =")] {
        let read = parse(&SMALL.replacen(name, other, 1)).unwrap();
        assert_eq!((read.recipe, read.notes.len()), (own.clone(), 1), "{other}");
    }
    let text = SMALL.replace("[model]\npath", "model_name_or_path").replace("format", "type");
    assert_eq!(parse(&text).unwrap().recipe, own);
}

#[test]
fn two_spellings_at_once_contradict() {
    let both = [
        ("[lora]\nr = 5\nrank = 5", 8),
        ("[lora]\nrank = 5\nlora_r = 5", 8),
        ("[optimizer]\nlr = 1e-4\nlearning_rate = 1e-4", 7),
        ("[kv_cache]\npolicy = \"h2o\"\nname = \"h2o-default\"", 8),
        ("[kv_cache]\npolicy.h2o.grace_period = 4\ngrace_period = 4", 8),
        ("[kv_cache]\npolicy.lastrec = { sink_tokens = 4, init_grace_tokens = 4 }", 7),
        ("[log]\ninterval = 1\nsteps = 1", 8),
    ];
    for (lines, line) in both {
        let error = refused(&with(lines));
        assert!(error.message().contains("mean the same, and both are given"), "{error}");
        assert_eq!(error.line(), Some(line), "{error}");
    }
}

#[test]
fn an_error_in_an_alias_points_at_what_was_written() {
    let error = refused(&with("[lora]\nrank = 0"));
    assert_eq!((error.line(), error.to_string().matches('^').count()), (Some(7), "rank".len()), "{error}");
}
