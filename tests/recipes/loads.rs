//! Recipes that load: the one that the project was asked for, those that come with it, and the defaults.

use std::path::Path;

use kvtune::data::formats;
use kvtune::recipe::{
    BatchOrder, BestMetric, CacheLength, Chunking, ClassList, Dtype, GradRecipe, HeadRecipe, LearningRateSchedule, MetricMode,
    ModuleSet, OnTooLong, OpenKey, Pyramid, Recipe, Storage, StoreForm, StorePlace, StoreRecipe, TrainedWeights,
    ValidationSource, Warmup, know_formats,
};

use super::{SMALL, Told, parse, parse_with, with};

const ASKED_FOR: &str = r#"
[model]
path = "../shared/golden/model-qwen2"      # a directory
adapter = "../shared/golden/adapter-qwen2" # optional: start from a PEFT adapter
dtype = "f32"
[lora]
r = 4
alpha = 8
target_modules = "all-linear"
[data]
format = "tokens"                # longbench-v2 | prompt-completion | tokens
train = "tokens.jsonl"           # see below
[head]
kind = "next_token"              # or kind = "seq_classification_on_logits"
[kv_cache]
policy = "h2o"                   # or: policy.h2o = { grace_period = 64 }
buffer = "plain"
cache_length = 32
chunk_size = 8
[grad]
layers_per_cell = 1
chunks_per_cell_multiplier = 1.0
layer_checkpoints = "plain"      # plain | int8
[train]
micro_batch_size = 2
max_steps = 1
seed = 1
"#;

#[test]
fn the_recipe_that_was_asked_for_loads_as_it_stands() {
    let resolved = parse(ASKED_FOR).unwrap();
    assert_eq!(resolved.notes, Vec::<String>::new());
    let recipe = resolved.recipe;
    assert_eq!(recipe.model.path, Path::new("/shared/golden/model-qwen2"));
    assert_eq!(recipe.model.adapter.as_deref(), Some(Path::new("/shared/golden/adapter-qwen2")));
    assert_eq!(recipe.data.train.paths(), [Path::new("/nowhere/tokens.jsonl")]);
    let lora = recipe.lora.unwrap();
    assert_eq!((lora.r, lora.alpha), (4, 8.0));
    assert_eq!(recipe.kv_cache.policy.name, "h2o");
    assert_eq!(recipe.kv_cache.cache_length, CacheLength::Uniform(32));
    assert_eq!((recipe.train.batch_size.sequences(), recipe.train.max_steps), (2, Some(1)));
}

#[test]
fn what_is_left_out_has_its_default() {
    let recipe = parse(SMALL).unwrap().recipe;
    assert_eq!(recipe.train.weights, TrainedWeights::Adapter);
    assert_eq!((recipe.model.dtype, recipe.model.adapter), (Dtype::F32, None));
    let lora = recipe.lora.unwrap();
    assert_eq!((lora.r, lora.alpha, lora.dropout), (8, 16.0, 0.0));
    assert_eq!(lora.target_modules, ModuleSet::AllLinear);
    assert_eq!(recipe.data.validation, ValidationSource::Fraction(0.1));
    assert_eq!((recipe.data.on_too_long, recipe.data.order), (OnTooLong::Error, BatchOrder::Shuffled));
    assert_eq!((recipe.data.max_seq_length, recipe.data.train_on_prompt), (None, false));
    assert_eq!(recipe.head, HeadRecipe::NextToken);
    assert_eq!(recipe.kv_cache.storage, Storage::Preallocated);
    assert_eq!((recipe.kv_cache.chunking, recipe.kv_cache.randomize_chunk_sizes), (Chunking::Plain, false));
    assert!(!recipe.grad.single_tokens_for_targets);
    assert!(!recipe.model.allow_tf32 && !recipe.train.deterministic);
    assert_eq!((recipe.grad.layers_per_cell, recipe.grad.chunks_per_cell_multiplier), (1, 1.0));
    assert_eq!((recipe.grad.chunks_per_cell, recipe.grad.scratch_dir), (None, None));
    assert_eq!([recipe.grad.layer_checkpoints, recipe.grad.undo_log], [StoreRecipe::PLAIN; 2]);
    assert_eq!(recipe.grad.open, []);
    assert_eq!((recipe.train.epochs, recipe.train.gradient_accumulation_steps, recipe.train.max_grad_norm), (1.0, 1, 1.0));
    let optimizer = recipe.optimizer;
    assert_eq!((optimizer.learning_rate, optimizer.weight_decay, optimizer.eps), (2e-4, None, None));
    assert_eq!(
        (optimizer.betas, optimizer.schedule, optimizer.warmup),
        ((0.9, 0.999), LearningRateSchedule::Cosine, Warmup::Ratio(0.05))
    );
    assert_eq!(
        (recipe.eval.interval, recipe.eval.initial, recipe.eval.metric, recipe.eval.mode),
        (100, false, BestMetric::Loss, MetricMode::Min)
    );
    let checkpoint = recipe.checkpoint;
    assert_eq!(
        (checkpoint.save_interval, checkpoint.intermediate_save_interval, checkpoint.intermediate_save_keep),
        (50, None, 2)
    );
    assert_eq!((recipe.log.interval, recipe.output_dir), (1, None));
}

/// What is written counts for the recipe's own policy.
#[test]
fn storage_follows_the_policy_where_none_is_written_for_it() {
    let dense = "[kv_cache]\npolicy = \"dense\"\n";
    let (sized, stored) = (format!("{dense}cache_length = 64\n"), format!("{dense}storage = \"growing\"\ncache_length = 64\n"));
    let other = "[kv_cache]\npolicy = \"h2o\"\ncache_length = 64\nstorage = \"preallocated\"\n";
    let (to_h2o, to_dense) = ("kv_cache.policy=h2o", "kv_cache.policy=dense");
    let cases: [(&str, &[&str], Storage); 8] = [
        (dense, &[], Storage::Growing),
        (&sized, &[], Storage::Preallocated),
        (&stored, &[], Storage::Growing),
        (dense, &["kv_cache.cache_length=64"], Storage::Preallocated),
        (dense, &[to_h2o], Storage::Preallocated),
        (&stored, &[to_h2o], Storage::Preallocated),
        (other, &[to_dense], Storage::Preallocated),
        (other, &[to_dense, "kv_cache.storage=paged"], Storage::Paged),
    ];
    for (lines, overrides, storage) in cases {
        assert_eq!(parse_with(&with(lines), overrides).unwrap().recipe.kv_cache.storage, storage, "{lines} {overrides:?}");
    }
    assert!(parse_with(&with(dense), &[to_h2o, "kv_cache.storage=growing"]).is_err());
}

#[test]
fn keys_that_are_left_open_have_their_defaults() {
    let default = parse(SMALL).unwrap().recipe.grad;
    for key in OpenKey::ALL {
        let grad = parse(&with(&format!("[grad]\n{key} = \"auto\""))).unwrap().recipe.grad;
        assert!(OpenKey::ALL.iter().all(|other| grad.is_open(*other) == (other == key)), "{key}");
        assert_eq!(GradRecipe { open: Vec::new(), ..grad }, default, "{key}");
    }
    // In any order, beside keys that are decided, and with the multiplier of a width that is not.
    let lines = "undo_log_place = \"file\"\nundo_log = \"auto\"\nlayer_checkpoints_place = \"auto\"\nlayer_checkpoints = \"int8\"\n\
                 chunks_per_cell_multiplier = 2.0\nchunks_per_cell = \"auto\"";
    let grad = parse(&with(&format!("[grad]\n{lines}"))).unwrap().recipe.grad;
    assert_eq!(grad.open, [OpenKey::ChunksPerCell, OpenKey::LayerCheckpointsPlace, OpenKey::UndoLog]);
    assert_eq!(grad.layer_checkpoints, StoreRecipe { form: StoreForm::Int8, ..StoreRecipe::PLAIN });
    assert_eq!(grad.undo_log, StoreRecipe { place: StorePlace::File, ..StoreRecipe::PLAIN });
    assert_eq!((grad.layers_per_cell, grad.chunks_per_cell, grad.chunks_per_cell_multiplier), (1, None, 2.0));
}

#[test]
fn the_undo_log_of_a_quantised_cache_may_be_left_open() {
    let recipe = parse(&with("[kv_cache]\nbuffer = \"int8\"\n[grad]\nundo_log = \"auto\"")).unwrap().recipe;
    assert_eq!((recipe.grad.open, recipe.grad.undo_log), (vec![OpenKey::UndoLog], StoreRecipe::PLAIN));
}

#[test]
fn a_pyramid_is_written_inside_or_below_its_table() {
    let pyramid = CacheLength::Pyramid(Pyramid { mean: 4096, top: 1024 });
    let written = [
        "[kv_cache]\ncache_length.pyramid = { mean = 4096, top = 1024 }",
        "[kv_cache]\ncache_length = { pyramid = { mean = 4096, top = 1024 } }",
        "[kv_cache.cache_length.pyramid]\nmean = 4096\ntop = 1024",
    ];
    for lines in written {
        assert_eq!(parse(&with(lines)).unwrap().recipe.kv_cache.cache_length, pyramid, "{lines}");
    }
}

#[test]
fn classification_takes_labels_or_tokens_and_accuracy_wants_the_larger() {
    let head = |line: &str| parse(&with(&format!("[head]\nkind = \"seq_classification_on_logits\"\n{line}"))).unwrap().recipe;
    let texts = head("labels = [\"A\", \"B\"]\n[eval]\nmetric = \"accuracy\"");
    assert_eq!(texts.head, HeadRecipe::SeqClassificationOnLogits(ClassList::Named(vec!["A".into(), "B".into()])));
    assert_eq!(texts.eval.mode, MetricMode::Max);
    let tokens = head("label_tokens = [40, 41, 42, 43]");
    assert_eq!(tokens.head, HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(vec![40, 41, 42, 43])));
}

#[test]
fn the_recipes_that_come_along_load() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let load = |name: &str| {
        know_formats(formats());
        let resolved = Recipe::load(&folder.join(name), &[]).unwrap();
        assert_eq!(resolved.notes, Vec::<String>::new());
        resolved.recipe
    };
    let quick = load("quickstart.toml");
    assert_eq!((quick.kv_cache.cache_length, quick.kv_cache.chunk_size), (CacheLength::Uniform(1024), Some(256)));
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().unwrap().join("data/demo");
    assert_eq!(quick.model.path, data.join("model"));
    assert_eq!(quick.data.validation, ValidationSource::File(data.join("validation.json").into()));
    let long = load("longbench.toml");
    assert_eq!((long.data.format.as_deref(), long.data.max_seq_length), (Some("longbench-v2"), Some(32768)));
}

#[test]
fn a_recipe_that_cannot_be_read_says_so() {
    let error = Recipe::load(Path::new("/nowhere/none.toml"), &[]).map(|r| r.recipe).unwrap_err();
    assert!(error.message().starts_with("the recipe cannot be read: "), "{error}");
    assert!(error.to_string().ends_with("\n  --> /nowhere/none.toml"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let latin = folder.path().join("latin.toml");
    std::fs::write(&latin, b"# \xe9\n").unwrap();
    assert!(Recipe::load(&latin, &[]).is_err());
}

/// Whatever else `[lora]` gives.
#[test]
fn keys_that_lora_leaves_out_are_those_of_the_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let settings = r#"{"r": 2, "exclude_modules": ["down_proj"], "rank_pattern": {"q_proj": 3}, "layers_to_transform": [0]}"#;
    std::fs::write(dir.path().join("adapter_config.json"), settings).unwrap();
    let text = format!("adapter = {:?}\n", dir.path());
    let text = with(&format!("[model]\n{text}")) + "[lora]\nr = 4\nalpha = 8\ntarget_modules = \"all-linear\"\n";
    let lora = parse(&text).unwrap().recipe.lora.unwrap();
    assert_eq!(
        (lora.r, lora.exclude_modules, lora.layers_to_transform),
        (4, ModuleSet::Names(vec!["down_proj".into()]), vec![0])
    );
    assert_eq!(lora.rank_pattern["q_proj"], 3);
}
