//! A resolved recipe that is written and read again is the same, and two recipes differ exactly where they do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtune::data::formats;
use kvtune::metrics::Metric;
use kvtune::recipe::{
    AttentionOutputs, BatchOrder, BatchSize, BestMetric, Boundary, BufferKind, CacheLength, CacheRecipe, ChatRecipe,
    CheckpointRecipe, Chunking, ClassList, DataRecipe, DistillRecipe, Dtype, EvalRecipe, GenerateRecipe, GradRecipe, HeadRecipe,
    HelmetFamily, InitLora, KeepGraph, LearningRateSchedule, LogRecipe, LongBenchPrompt, LoraRecipe, LossMean, MetricMode,
    ModelRecipe, ModuleSet, Offload, OnBadRow, OnNonFinite, OnOutOfMemory, OnSigterm, OnTooLong, OpenKey, OptimizerName,
    OptimizerRecipe, PolicyRecipe, Pyramid, Recipe, ReportRecipe, RopeScalingRecipe, Storage, StoreForm, StorePlace, StoreRecipe,
    TemplateChoice, TemplateDate, TrainOn, TrainRecipe, TrainedBias, TrainedWeights, ValidationSource, Warmup,
};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::{SMALL, parse, parse_with};

fn path() -> impl Strategy<Value = PathBuf> {
    "[^/\\x00]{1,12}"
        .prop_filter("not a step up", |name| !matches!(name.as_str(), "." | ".."))
        .prop_map(|name| Path::new("/x").join(name))
}

fn number() -> impl Strategy<Value = f64> {
    (1e-12..1e12_f64).prop_union(1e-3..1e3_f64)
}

fn large() -> impl Strategy<Value = u64> {
    1..=i64::MAX as u64
}

fn small() -> impl Strategy<Value = usize> {
    1..100_000_usize
}

fn targets() -> impl Strategy<Value = ModuleSet> {
    let names = prop::collection::btree_set("[a-z_.\"]{1,8}", 1..4).prop_map(|names| names.into_iter().collect());
    prop_oneof![
        Just(ModuleSet::AllLinear),
        names.prop_map(ModuleSet::Names),
        "[a-z\\\\.*+|()]{1,8}[.*]".prop_filter_map("is no expression", |written| ModuleSet::matching(&written).ok()),
    ]
}

prop_compose! {
    fn lora()(numbers in (small(), number(), 0.0..1.0_f64), target_modules in targets(),
              excluded in prop::collection::btree_set("[a-z_.]{1,8}", 0..3),
              layers_to_transform in prop::collection::vec(0..100_usize, 0..3),
              rank_pattern in prop::collection::btree_map("[a-z.*\\\\\"]{1,6}", small(), 0..3),
              alpha_pattern in prop::collection::btree_map("[a-z.*\\\\\"]{1,6}", number(), 0..3),
              (use_rslora, use_dora, lora_bias) in any::<(bool, bool, bool)>(),
              bias in select(TrainedBias::ALL), init_lora_weights in select(InitLora::ALL)) -> LoraRecipe {
        let plain = LoraRecipe::plain(numbers.0, numbers.1, numbers.2, target_modules);
        LoraRecipe {
            exclude_modules: ModuleSet::Names(excluded.into_iter().collect()),
            layers_to_transform,
            rank_pattern,
            alpha_pattern,
            use_rslora,
            use_dora,
            lora_bias,
            bias,
            init_lora_weights,
            ..plain
        }
    }
}

fn head() -> impl Strategy<Value = HeadRecipe> {
    let tokens = prop::collection::btree_set(any::<u32>(), 2..5).prop_map(|set| ClassList::Tokens(set.into_iter().collect()));
    let texts = prop::collection::btree_set(".{0,4}", 2..5).prop_map(|set| ClassList::Named(set.into_iter().collect()));
    prop_oneof![
        Just(HeadRecipe::NextToken),
        tokens.prop_map(HeadRecipe::SeqClassificationOnLogits),
        texts.prop_map(HeadRecipe::SeqClassificationOnLogits),
    ]
}

prop_compose! {
    fn chat()(train_on in option::of(select(TrainOn::ALL)), train_on_end_of_turn in any::<bool>(), boundary in select(Boundary::ALL),
            template in option::of("[a-z]{1,4}|[a-z]\\{[a-z\n'\"]{0,4}"), date in option::of(0..4_000_000_000_i64),
            variables in prop::collection::btree_map("[a-z_]{1,5}", any::<bool>(), 0..3),
            roles in prop::collection::btree_map("[a-z]{1,4}", "[a-z]{1,4}", 0..3)) -> ChatRecipe {
        ChatRecipe {
            train_on,
            train_on_end_of_turn,
            boundary,
            chat_template: template.map(TemplateChoice),
            chat_template_kwargs: variables.into_iter().map(|(name, yes)| (name, yes.into())).collect(),
            chat_template_date: date.map(|second| TemplateDate(chrono::DateTime::from_timestamp(second, 0).unwrap().naive_utc())),
            roles,
        }
    }
}

prop_compose! {
    fn data(head: HeadRecipe)(format in select(formats()), train in path(), file in option::of(path()),
            part in 0.0..1.0_f64, max_seq_length in option::of(2..1_000_000_usize), on_too_long in select(OnTooLong::ALL),
            order in select(BatchOrder::ALL), prompt in any::<bool>(), on_bad_row in select(OnBadRow::ALL),
            columns in prop::collection::vec("[a-z]{1,6}", 0..3), max_line_bytes in 1..1_000_000_usize,
            (wording, most, kind) in (select(LongBenchPrompt::ALL), 1..1_000_000_usize, select(HelmetFamily::ALL)),
            chat in chat()) -> DataRecipe {
        // A conversation has no class.
        let format = if format.is_chat() && head != HeadRecipe::NextToken { formats().into_iter().find(|format| format.name == "prompt-completion").unwrap() } else { format };
        let (is_longbench, is_helmet) = (format.name == "longbench-v2", format.name == "helmet");
        let prompt_key = (is_longbench && head == HeadRecipe::NextToken).then_some(wording);
        let validation = file.map_or(ValidationSource::Fraction(part), |file| ValidationSource::File(file.into()));
        let train_on_prompt = prompt && format.has_texts && head == HeadRecipe::NextToken;
        let is_free = format.name == "prompt-completion" && head == HeadRecipe::NextToken && !train_on_prompt;
        let chat = ChatRecipe { train_on: chat.train_on.filter(|_| is_free), ..chat };
        // What a format has not, and what contradicts windows, is refused.
        let chat = ChatRecipe {
            train_on_end_of_turn: chat.train_on_end_of_turn || on_too_long == OnTooLong::Split,
            boundary: if format.has_prompt { chat.boundary } else { Boundary::Separate },
            roles: if format.name == "sharegpt" { chat.roles } else { BTreeMap::new() },
            ..chat
        };
        let columns = format.fields().map(str::to_owned).zip(columns).collect();
        let format = Some(format.name.to_owned());
        let train = train.into();
        let split_overlap = if on_too_long == OnTooLong::Split { max_seq_length.map_or(3, |length| (length - 2).min(7)) } else { 0 };
        DataRecipe {
            format,
            train,
            sets: Vec::new(),
            validation,
            max_seq_length,
            on_too_long,
            split_overlap,
            order,
            train_on_prompt,
            prompt: prompt_key,
            max_prompt_tokens: is_longbench.then_some(most),
            family: is_helmet.then_some(kind),
            columns,
            on_bad_row,
            max_line_bytes,
            chat,
        }
    }
}

fn policy() -> impl Strategy<Value = PolicyRecipe> {
    let value = prop_oneof![
        any::<i64>().prop_map(toml::Value::Integer),
        any::<bool>().prop_map(toml::Value::Boolean),
        number().prop_map(toml::Value::Float),
        ".{0,6}".prop_map(toml::Value::String),
    ];
    let params = prop::collection::btree_map("[a-z_]{1,6}", value, 0..3);
    ("[a-z][a-z0-9-]{0,8}", params).prop_map(|(name, params)| PolicyRecipe::with_params(&name, params.into_iter().collect()))
}

prop_compose! {
    fn kv_cache()(policy in policy(), lengths in prop::collection::vec(small(), 1..4), uniform in any::<bool>(),
                  chunk_size in small(), grow in any::<bool>(), buffer in select(BufferKind::ALL),
                   cpu_offload in any::<bool>(), pyramid in option::of((small(), small())),
                  chunking in select(Chunking::ALL), randomize_chunk_sizes in any::<bool>(), block in small()) -> CacheRecipe {
        let cache_length = match pyramid {
            Some((a, b)) => CacheLength::Pyramid(Pyramid { mean: a.max(b), top: a.min(b) }),
            None if uniform => CacheLength::Uniform(lengths[0]),
            None => CacheLength::PerLayer(lengths),
        };
        let policy = if grow { PolicyRecipe::named("dense") } else { policy };
        let growing = if chunk_size % 2 == 0 { Storage::Growing } else { Storage::Paged };
        let storage = if grow { growing } else { Storage::Preallocated };
        let (decode_block, r#static) = (block.min(chunk_size).min(1024), !grow && block % 2 == 0);
        let chunk_size = (block % 3 > 0).then_some(chunk_size);
        let gates = (block % 2 == 1).then(|| PathBuf::from("/gates"));
        CacheRecipe { policy, gates, buffer, cache_length, chunk_size, chunking, randomize_chunk_sizes, decode_block, r#static, storage, cpu_offload }
    }
}

prop_compose! {
    fn train()(size in small(), by_tokens in any::<bool>(), gradient_accumulation_steps in small(), max_steps in option::of(large()),
               epochs in number(), norm in option::of(number()), seed in 0..=i64::MAX as u64, deterministic in any::<bool>(),
               offload in select(&[Offload::None, Offload::Optimizer]), on_non_finite in select(OnNonFinite::ALL),
               max_skipped_steps in small(), max_loss in option::of(number())) -> TrainRecipe {
        let max_grad_norm = norm.unwrap_or(f64::INFINITY);
        let weights = TrainedWeights::Adapter;
        TrainRecipe {
            batch_size: if by_tokens { BatchSize::Tokens(size) } else { BatchSize::Sequences(size) },
            gradient_accumulation_steps,
            max_steps,
            epochs,
            max_grad_norm,
            loss_mean: LossMean::Sequences,
            router_aux_loss_coef: 0.0,
            seed,
            deterministic,
            offload,
            on_non_finite,
            max_skipped_steps,
            max_loss,
            weights,
        }
    }
}

prop_compose! {
    fn optimizer()(learning_rate in number(), weight_decay in option::of(0.0..1e3_f64), betas in (0.0..1.0_f64, 0.0..1.0_f64),
                   eps in option::of(number()), min_lr_ratio in 0.0..1.0_f64,
                   schedule in select(LearningRateSchedule::ALL), steps in option::of(large()), ratio in 0.0..1.0_f64) -> OptimizerRecipe {
        let warmup = steps.map_or(Warmup::Ratio(ratio), Warmup::Steps);
        OptimizerRecipe {
            name: OptimizerName::AdamW,
            learning_rate,
            loraplus_lr_ratio: 4.0,
            weight_decay,
            betas,
            eps,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            smoothing: None,
            schedule,
            min_lr_ratio: if schedule == LearningRateSchedule::Constant { 0.0 } else { min_lr_ratio },
            warmup,
        }
    }
}

prop_compose! {
    fn eval(head: HeadRecipe)(interval in large(), initial in any::<bool>(), accuracy in any::<bool>(), mode in select(MetricMode::ALL),
            micro_batch_size in option::of(small()), max_batches in option::of(small()),
            generate in option::of((small(), small(), any::<bool>()))) -> EvalRecipe {
        let metrics = vec![Metric::F1, Metric::RulerAll];
        let generate = generate.filter(|_| head == HeadRecipe::NextToken);
        let figure = if generate.is_some_and(|(.., chooses)| chooses) { BestMetric::Answers(Metric::F1) } else { BestMetric::Loss };
        let generate = generate.map(|(samples, max_new_tokens, _)| GenerateRecipe { metrics, samples, max_new_tokens });
        let metric = if accuracy && head != HeadRecipe::NextToken { BestMetric::Accuracy } else { figure };
        EvalRecipe { interval, initial, metric, mode, micro_batch_size, max_batches, generate }
    }
}

prop_compose! {
    fn store()(form in select(StoreForm::ALL), place in select(StorePlace::ALL)) -> StoreRecipe {
        StoreRecipe { form, place }
    }
}

prop_compose! {
    fn stores()(layer_checkpoints in store(), undo_log in store(), scratch_dir in option::of(path()))
            -> (StoreRecipe, StoreRecipe, Option<PathBuf>) {
        (layer_checkpoints, undo_log, scratch_dir)
    }
}

/// What open keys say has its default.
fn opened(open: Vec<OpenKey>, mut grad: GradRecipe) -> GradRecipe {
    for key in &open {
        match key {
            OpenKey::LayersPerCell => grad.layers_per_cell = 1,
            OpenKey::ChunksPerCell => grad.chunks_per_cell = None,
            OpenKey::LayerCheckpoints => grad.layer_checkpoints.form = StoreForm::Plain,
            OpenKey::LayerCheckpointsPlace => grad.layer_checkpoints.place = StorePlace::Memory,
            OpenKey::UndoLog => grad.undo_log.form = StoreForm::Plain,
            OpenKey::UndoLogPlace => grad.undo_log.place = StorePlace::Memory,
            OpenKey::AttentionOutputs => grad.attention_outputs = AttentionOutputs::Recompute,
        }
    }
    GradRecipe { open, ..grad }
}

prop_compose! {
    fn rope_scaling()(original_max_position_embeddings in option::of(small()), beta_slow in 0.1..9.0_f64, more in 0.1..9.0_f64)
                     -> RopeScalingRecipe {
        let mut table = toml::Table::from_iter([("rope_type".to_owned(), "dynamic_yarn".into())]);
        table.extend([("beta_fast", beta_slow + more), ("beta_slow", beta_slow)].map(|(key, value)| (key.to_owned(), value.into())));
        table.extend(original_max_position_embeddings.map(|tokens| ("original_max_position_embeddings".to_owned(), (tokens as i64).into())));
        RopeScalingRecipe(table)
    }
}

fn keep_graph() -> impl Strategy<Value = KeepGraph> {
    prop_oneof![Just(KeepGraph::None), Just(KeepGraph::Auto), Just(KeepGraph::All), small().prop_map(KeepGraph::Cells)]
}

prop_compose! {
    fn rest(head: HeadRecipe)(model in (path(), option::of(path()), select(Dtype::ALL), any::<bool>(), option::of(rope_scaling())),
              grad in (small(), 0.1..1e3_f64, option::of(small()), any::<bool>()), stores in stores(),
              on_out_of_memory in select(OnOutOfMemory::ALL), cuda_graphs in any::<bool>(), keep_graph in keep_graph(),
              attention_outputs in select(AttentionOutputs::ALL),
              open in subsequence(OpenKey::ALL, 0..=OpenKey::ALL.len()),
              checkpoint in (large(), option::of(large()), small(), select(OnSigterm::ALL)), interval in large(), output_dir in option::of(path()))
             -> (ModelRecipe, GradRecipe, CheckpointRecipe, LogRecipe, Option<PathBuf>) {
        let (layers_per_cell, chunks_per_cell_multiplier, chunks_per_cell, singles) = grad;
        let single_tokens_for_targets = singles && head == HeadRecipe::NextToken;
        let (save_interval, intermediate_save_interval, intermediate_save_keep, on_sigterm) = checkpoint;
        (
            ModelRecipe { path: model.0, revision: None, adapter: model.1, dtype: model.2, allow_tf32: model.3, rope_scaling: model.4, quantize: None },
            opened(
                open,
                GradRecipe {
                    layers_per_cell,
                    chunks_per_cell_multiplier,
                    chunks_per_cell,
                    layer_checkpoints: stores.0,
                    undo_log: stores.1,
                    scratch_dir: stores.2,
                    single_tokens_for_targets,
                    on_out_of_memory,
                    keep_graph,
                    attention_outputs,
                    cuda_graphs,
                    open: Vec::new(),
                },
            ),
            CheckpointRecipe { save_interval, intermediate_save_interval, intermediate_save_keep, on_sigterm },
            LogRecipe { interval },
            output_dir,
        )
    }
}

prop_compose! {
    fn distill()(weight in 0.01..1.0_f64, temperature in 0.1..4.0_f64, top_k in small()) -> DistillRecipe {
        DistillRecipe { weight, temperature, top_k }
    }
}

fn recipe() -> impl Strategy<Value = Recipe> {
    head().prop_flat_map(|head| {
        let lora = option::weighted(0.8, lora());
        let parts = (
            (rest(head.clone()), option::of(distill())),
            lora,
            data(head.clone()),
            kv_cache(),
            train(),
            optimizer(),
            eval(head.clone()),
        );
        parts.prop_map(
            move |(((model, grad, checkpoint, log, output_dir), distill), lora, data, kv_cache, train, optimizer, eval)| {
                let head = head.clone();
                // The beginning of an adapter that is not new, and LoRA+ without one, are refused.
                let is_plain = |lora: &LoraRecipe| lora.init_lora_weights == InitLora::Uniform;
                let adapter = model.adapter.filter(|_| lora.as_ref().is_some_and(is_plain));
                let loraplus_lr_ratio = if lora.is_some() { optimizer.loraplus_lr_ratio } else { 1.0 };
                let optimizer = OptimizerRecipe { loraplus_lr_ratio, ..optimizer };
                let model = ModelRecipe { adapter, ..model };
                let distill = distill.filter(|_| lora.is_some() && head == HeadRecipe::NextToken);
                let train =
                    TrainRecipe { weights: if lora.is_some() { TrainedWeights::Adapter } else { TrainedWeights::All }, ..train };
                // A quantised cache has an exact undo log.
                let form = if kv_cache.buffer == BufferKind::Plain { grad.undo_log.form } else { StoreForm::Plain };
                let waits = train.offload == Offload::Weights;
                let keep_graph = if waits && grad.keep_graph.cells() > 0 { KeepGraph::None } else { grad.keep_graph };
                let mut grad = GradRecipe { undo_log: StoreRecipe { form, ..grad.undo_log }, keep_graph, ..grad };
                // Beside a store that rounds no output is kept.
                if grad.rounds() {
                    grad.attention_outputs = AttentionOutputs::Recompute;
                }
                let report = ReportRecipe { command: output_dir.as_ref().map(|dir| format!("cat >{}", dir.display())) };
                Recipe {
                    model,
                    lora,
                    data,
                    head,
                    distill,
                    kv_cache,
                    grad,
                    train,
                    optimizer,
                    eval,
                    checkpoint,
                    log,
                    report,
                    output_dir,
                }
            },
        )
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(recipe in recipe()) {
        let text = recipe.to_toml();
        let resolved = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        prop_assert_eq!(&resolved.recipe, &recipe, "{}", text);
        prop_assert!(resolved.notes.is_empty(), "{:?}", resolved.notes);
        prop_assert!(recipe.changes_refused_on_resume(&resolved.recipe).is_empty());
    }

    #[test]
    fn no_text_breaks_the_reader(text in "[\\[\\]a-z_.=\"'{},#0-9 \n\t\u{e9}]{0,60}", set in "[a-z_.=\\[{\"0-9]{0,16}") {
        let _ = parse_with(&text, &[&set]).map_err(|e| e.to_string());
        let _ = parse_with(&format!("{SMALL}{text}"), &[]).map_err(|e| e.to_string());
    }
}

#[test]
fn a_resolved_recipe_does_not_depend_on_where_it_lies() {
    let text = format!("output_dir = \"../runs/./a\"\n{SMALL}");
    let recipe = parse_with(&text, &["model.adapter=/abs/b"]).unwrap().recipe;
    assert_eq!(recipe.output_dir.as_deref(), Some(Path::new("/runs/a")));
    assert_eq!(recipe.model.adapter.as_deref(), Some(Path::new("/abs/b")));
    let elsewhere = Recipe::parse(recipe.to_toml(), Path::new("/some/where/else.toml"), &[]).unwrap();
    assert_eq!(elsewhere.recipe, recipe);
}

#[test]
fn what_has_two_forms_prints_in_words() {
    let words = [
        (CacheLength::Uniform(8).to_string(), "8"),
        (CacheLength::PerLayer(vec![8, 4]).to_string(), "[8, 4]"),
        (CacheLength::Pyramid(Pyramid { mean: 8, top: 4 }).to_string(), "8 on average, 4 at the top"),
        (ModuleSet::AllLinear.to_string(), "all-linear"),
        (ModuleSet::Names(vec!["q_proj".into(), "v_proj".into()]).to_string(), "q_proj, v_proj"),
        (ClassList::Named(vec!["A".into(), "B".into()]).to_string(), "A, B"),
        (ClassList::Tokens(vec![32, 33]).to_string(), "tokens 32, 33"),
    ];
    for (shown, expected) in words {
        assert_eq!(shown, expected);
    }
}

/// Keys that a resumed run may not change, with other values than those of the small recipe.
const BOUND: &[(&str, &str)] = &[
    ("model.adapter", "a"),
    ("model.dtype", "bf16"),
    ("lora.r", "7"),
    ("lora.alpha", "7"),
    ("lora.dropout", "0.7"),
    ("lora.target_modules", "[\"q_proj\"]"),
    ("lora.target_modules", "'.*q_proj'"),
    ("lora.exclude_modules", "[\"q_proj\"]"),
    ("lora.layers_to_transform", "[0]"),
    ("lora.rank_pattern", "{ q_proj = 7 }"),
    ("lora.alpha_pattern", "{ q_proj = 7.0 }"),
    ("lora.use_rslora", "true"),
    ("lora.use_dora", "true"),
    ("lora.lora_bias", "true"),
    ("lora.bias", "lora_only"),
    ("lora.init_lora_weights", "gaussian"),
    ("data.format", "longbench-v2"),
    ("data.validation_fraction", "0.7"),
    ("data.max_seq_length", "7"),
    ("data.on_too_long", "drop"),
    ("data.order", "longest_first"),
    ("kv_cache.policy", "lastrec"),
    ("head.distill", "{ weight = 0.5, temperature = 1.0, top_k = 8 }"),
    ("kv_cache.cache_length", "7"),
    ("kv_cache.cache_length", "{ pyramid = { mean = 7, top = 3 } }"),
    ("kv_cache.chunk_size", "7"),
    ("kv_cache.chunking", "reference"),
    ("kv_cache.buffer", "int8"),
    ("kv_cache.randomize_chunk_sizes", "true"),
    ("kv_cache.decode_block", "4"),
    ("kv_cache.static", "true"),
    ("grad.single_tokens_for_targets", "true"),
    ("train.micro_batch_size", "7"),
    ("train.gradient_accumulation_steps", "7"),
    ("train.max_grad_norm", "7"),
    ("train.seed", "7"),
    ("train.deterministic", "true"),
    ("model.allow_tf32", "true"),
    ("model.rope_scaling", "{ rope_type = \"dynamic_yarn\" }"),
    ("eval.interval", "7"),
    ("eval.mode", "max"),
    ("eval.max_batches", "7"),
    ("eval.generate", "{ metrics = [\"f1\"] }"),
    ("optimizer.learning_rate", "7"),
    ("optimizer.weight_decay", "7"),
    ("optimizer.betas", "[0.7, 0.7]"),
    ("optimizer.eps", "7"),
    ("optimizer.schedule", "linear"),
    ("optimizer.warmup_ratio", "0.7"),
];

#[test]
fn a_resumed_run_trains_the_same_weights() {
    let all = parse_with(SMALL, &["train.weights=all"]).unwrap().recipe;
    let found = parse(SMALL).unwrap().recipe.changes_refused_on_resume(&all);
    let keys: Vec<_> = found.iter().map(|d| d.key.as_str()).collect();
    let (last, of_adapter) = keys.split_last().unwrap();
    assert!(*last == "train.weights" && of_adapter.iter().all(|key| key.starts_with("lora.")), "{keys:?}");
    assert!(["lora.r", "lora.target_modules", "lora.use_dora"].iter().all(|key| of_adapter.contains(key)), "{keys:?}");
}

#[test]
fn a_resumed_run_may_change_its_length_logging_saving_and_tiling_only() {
    let run = parse(SMALL).unwrap().recipe;
    let differences = |set: &[&str]| {
        let resumed = parse_with(SMALL, set).unwrap().recipe;
        assert_ne!(run, resumed, "{set:?}");
        run.changes_refused_on_resume(&resumed)
    };
    let free = [
        "train.epochs=7",
        "train.max_steps=7",
        "log.interval=7",
        "report.command=cat",
        "checkpoint.save_interval=7",
        "checkpoint.intermediate_save_interval=7",
        "checkpoint.intermediate_save_keep=7",
        "grad.layers_per_cell=7",
        "grad.chunks_per_cell_multiplier=7",
        "grad.chunks_per_cell=7",
        "grad.layer_checkpoints=int8",
        "grad.layer_checkpoints_place=file",
        "grad.undo_log=int4",
        "grad.undo_log_place=file",
        "grad.scratch_dir=elsewhere",
        "grad.on_out_of_memory=retreat",
        "grad.cuda_graphs=true",
        "model.path=other",
        "data.train=other",
        "output_dir=other",
    ];
    assert_eq!(differences(&free), []);
    for key in OpenKey::ALL {
        assert_eq!(differences(&[&format!("grad.{key}=auto")]), []);
    }
    for (key, value) in BOUND {
        let found = differences(&[&format!("{key}={value}")]);
        assert_eq!(found.iter().map(|d| d.key.as_str()).collect::<Vec<_>>(), [*key]);
    }
    let found = differences(&["lora.r=7", "data.max_seq_length=64"]);
    let shown: Vec<_> = found.iter().map(|d| (d.key.as_str(), d.before.as_str(), d.after.as_str())).collect();
    assert_eq!(shown, [("data.max_seq_length", "not set", "64"), ("lora.r", "8", "7")]);
}
