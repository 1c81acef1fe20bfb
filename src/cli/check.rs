//! `kvtune check`: parses, resolves, looks at model and data, and prints what would run.

use std::ops::Range;

use clap::Args;
use serde_json::{Value, json};
use tch::Device;

use super::architecture::{architecture, experts, windows};
use super::recipe_file::RecipeFile;
use super::world::{Joining, time_of_sums};
use crate::cache::{Routing, Scope};
use crate::data::{Dataset, Splits, Tokenizer, auto_tokenizer_differs};
use crate::dist::ProcessGroup;
use crate::engine::{ChunkPlan, Settings};
use crate::files::Scratch;
use crate::model::{LayerSpec, Model, ModelConfig, TrainedPart, kind_of, trained_by_kind};
use crate::plan::{Alternative, GRAPHS, Machine};
use crate::recipe::{BufferKind, CacheLength, Chunking, LoraRecipe, Offload, OnOutOfMemory, Recipe, Storage, StoreForm};
use crate::report::console;
use crate::report::table::Table;
use crate::train::{self, ExpectedEvictions, ResolvedRun, RunSchedule};
use crate::units::{Bytes, Fault};
use crate::verify::ErrorBound;

/// Check a recipe, its model and its data, and print what would run.
#[derive(Debug, Args)]
pub(super) struct Check {
    #[command(flatten)]
    recipe: RecipeFile,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl Check {
    pub(super) fn run(&self, device: Device, world: &ProcessGroup) -> Result<(), Fault> {
        let recipe = self.recipe.load(device)?;
        train::check_even(world, &recipe)?;
        let config = train::as_headed(&recipe, Model::check(&recipe.model)?)?;
        train::check_trained(&recipe, &config)?;
        train::check_data(&recipe, &config)?;
        // The run would end at its first file.
        if let Some(dir) = recipe.grad.scratch_dir.as_ref().filter(|_| recipe.grad.may_use_files()) {
            Scratch::create(dir)?;
        }
        let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
        let machine = Machine::here(recipe.model.dtype, device).of_ranks(world.ranks_here(), world.size());
        let mut said = Ok(());
        // Before anything is refused that may be in it.
        let say = |data: &Splits| said = console::outcome(&data.to_string(), &in_json(data));
        let resolved = train::resolved_with_data(recipe, &config, tokenizer.as_ref(), None, machine, say)?;
        said?;
        train::check_answers(&resolved.recipe, &resolved.data)?;
        let ResolvedRun { recipe, planned, engine, data, .. } = resolved;
        let longest = (0..data.train.len()).max_by_key(|&sample| data.train.lengths()[sample]).unwrap_or(0);
        let plan = engine.settings().plan(&data.train.batch(&[longest])?, None)?;
        if let Some(tokenizer) = &tokenizer
            && let Some(note) = auto_tokenizer_differs(&recipe.model.path, tokenizer)?
        {
            console::note(&note);
        }
        let first_trained = TrainedPart::of(&config, recipe.lora.as_ref())?.first_layer;
        for note in notes(&recipe, engine.settings(), &config, first_trained) {
            console::note(&note);
        }
        let kinds = trained_by_kind(&config, recipe.lora.as_ref())?;
        let numbers: u64 = kinds.iter().map(|(_, numbers)| *numbers as u64).sum();
        let kinds: Vec<String> = kinds.iter().map(|(kind, numbers)| format!("{kind} {numbers}")).collect();
        let mut table = table(&recipe, &config, &kinds.join(", "));
        let (bands, columns) = (engine.settings().trained_bands(first_trained).len(), plan.columns.len());
        table.row(&["longest sample", &format!("{} tokens in {} chunks", plan.len(), plan.spans.len())]);
        table.row(&["cells", &format!("{bands} layer bands × {columns} columns")]);
        table.row(&["graphs kept", &kept(&recipe, bands * columns)]);
        table.row(&["layer checkpoints", &recipe.grad.layer_checkpoints.to_string()]);
        table.row(&["undo log", &recipe.grad.undo_log.to_string()]);
        table.row(&["attention outputs", recipe.grad.attention_outputs.name()]);
        table.row(&["steps", &RunSchedule::new(&recipe, data.train.lengths()).to_string()]);
        let waits =
            (recipe.train.offload != Offload::None).then(|| waiting_parts(&recipe, engine.settings(), &config, first_trained));
        table.figure("waits on the host", waits);
        if let Some(evictions) = ExpectedEvictions::new(&recipe, engine.settings(), data.train.lengths()) {
            evictions.warning().iter().for_each(|warning| console::warning(warning));
            table.row(&["evictions", &evictions.to_string()]);
        }
        table.row(&["replay log", &replay_log(engine.settings(), &config, &plan)]);
        table.row(&["peak memory, planned", &(planned.words() + &kept_bytes(&planned))]);
        table.figure("ranks", (world.size() > 1).then(|| ranks(world, machine, Bytes(4 * numbers))).transpose()?);
        console::table(&table)
    }
}

fn in_json(data: &Splits) -> Value {
    let files: Vec<String> = data.files.iter().map(ToString::to_string).collect();
    let held_out = data.validation.as_ref().map_or(0, Dataset::len);
    json!({ "train": data.train.len(), "validation": held_out, "files": files, "warnings": data.warnings })
}

/// The ranks, what each may take, and how long they take to add up so many bytes of gradients.
fn ranks(world: &ProcessGroup, machine: Machine, gradients: Bytes) -> Result<String, Fault> {
    let (ranks, here) = (world.size(), world.ranks_here());
    let each = machine.limits.host.map_or_else(String::new, |host| format!(", each of which may take {host} of its memory"));
    let sum = 1e3 * time_of_sums(world, gradients.0, machine.device)?.0;
    Ok(format!(
        "{ranks}, {here} of them on this machine{each}; {gradients} of gradients are added up in {sum:.1} ms, once a step"
    ))
}

/// What a reader of the recipe might not expect.
fn notes(recipe: &Recipe, settings: &Settings, config: &ModelConfig, first_trained: usize) -> Vec<String> {
    let (kv, grad) = (&recipe.kv_cache, &recipe.grad);
    let mut notes = Vec::new();
    let mut note = |is_so: bool, what: &str, words: &str| notes.extend(is_so.then(|| format!("{what}: {words}")));
    let words = "the sequences of a batch decide together: a sequence is what it is alone in batches of one sequence only";
    note(settings.couples_sequences(), &format!("the policy `{}`", kv.policy.name), words);
    let words = "spares the memory of a GPU; where the CPU computes, slots are copied for nothing";
    note(kv.cpu_offload, "`kv_cache.cpu_offload`", words);
    let words =
        "graphs are captured where texts are generated on a GPU at fixed widths, `kv_cache.static = true`, and nowhere else";
    note(grad.cuda_graphs, "`grad.cuda_graphs`", words);
    let words = "the first target of any sequence counts for its whole batch: a sequence is what it is alone in batches of one sequence only";
    note(grad.single_tokens_for_targets, "`grad.single_tokens_for_targets`", words);
    let words = match kv.cache_length {
        CacheLength::Uniform(_) => "changes nothing where all layers have caches of one length",
        _ => "where layers have caches of different length, the borders of chunks follow the longest sequence of a batch",
    };
    note(kv.chunking == Chunking::Reference, "`kv_cache.chunking = \"reference\"`", words);
    for (key, form) in settings.inexact_stores(first_trained) {
        let words = format!("{}; `kvtune verify` says how near it comes on yours", not_exact(form));
        note(true, &format!("`{key} = \"{form}\"`"), &words);
    }
    let rounds =
        grad.on_out_of_memory == OnOutOfMemory::Retreat && train::ends_rounding(grad, &(first_trained..config.num_layers()));
    let words = "if a step fits no other way, it and all that follow are made with layer checkpoints in int8; then";
    note(rounds, "`grad.on_out_of_memory = \"retreat\"`", &format!("{words} {}", not_exact(StoreForm::Int8)));
    let unties = |lora: &LoraRecipe| !lora.modules_to_save.iter().all(|name| name.ends_with("norm"));
    let words = "the model's embedding is its output projection, too; a copy that is trained is no longer tied to it, as in PEFT";
    note(config.tie_word_embeddings && recipe.lora.as_ref().is_some_and(unties), "`lora.modules_to_save`", words);
    let words = "in training only; the chunks below are of `chunk_size`";
    note(kv.randomize_chunk_sizes, "`kv_cache.randomize_chunk_sizes`", words);
    notes
}

fn not_exact(form: StoreForm) -> String {
    let ErrorBound { smallest_cosine, largest_error } = ErrorBound::of(form);
    format!(
        "the gradient is not exact (cosine to the exact one at least {smallest_cosine} and relative error at most {:.1} % on the models \
         of the tests)",
        100.0 * largest_error
    )
}

/// The cache in words, and the slots of each layer where they differ.
fn cache(recipe: &Recipe, config: &ModelConfig) -> (String, Option<String>) {
    let kv = &recipe.kv_cache;
    let lengths = kv.cache_length.by_layer(config.num_layers());
    let is_uniform = lengths.iter().all(|length| *length == lengths[0]);
    let slots = match (kv.storage, is_uniform) {
        (Storage::Preallocated, true) => format!("{} slots", lengths[0]),
        (Storage::Preallocated, false) => format!("slots {}", kv.cache_length),
        _ => "as many slots as tokens".to_owned(),
    };
    let words = [
        Some(kv.policy.to_string()),
        Some(slots),
        (kv.buffer != BufferKind::Plain).then(|| format!("in {}", kv.buffer)),
        (kv.storage != Storage::Preallocated).then(|| kv.storage.to_string()),
        kv.cpu_offload.then(|| "waiting on the host".to_owned()),
        Some(format!("chunks of {}", kv.wanted_chunk_size())),
        windows(config).map(|(layers, widest)| format!("{layers} layers with a window of {widest} instead")),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    (words.join(", "), (!is_uniform).then(|| lengths.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")))
}

/// The model, what of it is trained, its head and its cache.
fn table(recipe: &Recipe, config: &ModelConfig, trained: &str) -> Table {
    let classes = recipe.head.classes().map_or_else(String::new, |classes| format!(", {classes}"));
    let mut table = Table::new(&["what", "value"]);
    let (layers, width, attention) = (config.num_layers(), config.hidden_size, &config.layers[0].attention);
    let (heads, kv_heads, head_dim) = (attention.num_heads, attention.num_kv_heads, attention.head_dim);
    let shape = format!("{layers} layers × {width}, {heads} query heads, {kv_heads} KV heads of {head_dim}");
    table.row(&["model", &recipe.model.path.display().to_string()]);
    table.row(&["family", &architecture(config)]);
    table.row(&["shape", &shape]);
    if !config.dropouts.is_empty() {
        let known: Vec<String> = config.dropouts.iter().map(|(key, probability)| format!("{key} {probability}")).collect();
        table.row(&["model's dropout", &format!("{}: left out, what is trained has its own", known.join(", "))]);
    }
    let (trains, what) = match &recipe.lora {
        Some(lora) => ("adapter", format!("{} r {} alpha {}, {}", lora.kind(), lora.r, lora.alpha, lora.target_modules)),
        None => ("weights", format!("all {} are trained", config.num_parameters())),
    };
    table.row(&[trains, &what]);
    if !config.packed.forms.is_empty() {
        let forms: Vec<String> = config.packed.forms.iter().map(|(form, count)| format!("{count} in {form}")).collect();
        table.row(&["packed weights", &format!("{}: {}", config.packed.all().bytes, forms.join(", "))]);
    }
    table.row(&["trained parameters", trained]);
    table.row(&["numerics", &numerics(recipe)]);
    table.row(&["head", &format!("{}{classes}", recipe.head.kind())]);
    let (cache, by_layer) = cache(recipe, config);
    table.row(&["KV cache", &cache]);
    table.figure("slots by layer", by_layer);
    table
}

/// What kept graphs take of the peak, and how to have none.
fn kept_bytes(planned: &Alternative) -> String {
    let graphs = planned.forecast.device.parts.iter().find(|(name, _)| *name == GRAPHS);
    let words =
        |(_, bytes): &(_, Bytes)| format!(", {bytes} of it kept graphs; `grad.keep_graph = \"none\"` recomputes them instead");
    graphs.filter(|_| planned.kept > 0).map_or_else(String::new, words)
}

/// How many cells keep the graph of the forward phase.
fn kept(recipe: &Recipe, cells: usize) -> String {
    match recipe.grad.keep_graph.cells() {
        _ if cells == 0 => "none: nothing of the layers is trained".to_owned(),
        0 => "none: every cell is computed again".to_owned(),
        kept if kept >= cells => "all: nothing is computed again".to_owned(),
        kept => format!("{kept} of {cells} cells, as far as they are whole layer bands or the top one's last columns"),
    }
}

/// What a GPU may do with numbers; a CPU rounds no factor, and repeats itself in any case.
fn numerics(recipe: &Recipe) -> String {
    let tf32 = if recipe.model.allow_tf32 { "TF32 allowed on a GPU" } else { "no TF32" };
    let bits = if recipe.train.deterministic { "the same bits every time" } else { "the same bits every time on a CPU" };
    format!("{}, {tf32}, {bits}", recipe.model.dtype)
}

/// What of weights and optimiser waits on the host, where a GPU computes.
fn waiting_parts(recipe: &Recipe, settings: &Settings, config: &ModelConfig, first_trained: usize) -> String {
    let state = "the optimiser's state".to_owned();
    if recipe.train.offload != Offload::Weights {
        return state;
    }
    let bytes = |numbers: usize| Bytes((numbers * kind_of(recipe.model.dtype).elt_size_in_bytes()) as u64);
    let of_band = |band: Range<usize>| band.map(|layer| config.num_layer_parameters(layer)).sum();
    let of_bands: Vec<usize> = settings.layer_bands(first_trained).into_iter().map(of_band).collect();
    let all = bytes(of_bands.iter().sum());
    let Some(two) = of_bands.windows(2).map(|pair| bytes(pair[0] + pair[1])).max() else {
        return format!(
            "{state}; a single layer band holds all layers, whose weights stay ({all}): lower `grad.layers_per_cell`"
        );
    };
    format!("{state}, and the layers' weights ({all}), of which a GPU holds two layer bands at a time ({two})")
}

/// What the choices take on the host: of evictions, and of experts.
fn replay_log(settings: &Settings, config: &ModelConfig, plan: &ChunkPlan) -> String {
    let of_evictions = evictions(settings, config, plan);
    let per_token: u64 = experts(config).map(|spec| Routing::bytes_of_token(spec.top_k, spec.num_experts)).sum();
    if per_token == 0 {
        return of_evictions.unwrap_or_else(|| "empty: nothing is evicted".to_owned());
    }
    let whole = Bytes(per_token * plan.len() as u64);
    let of_experts = format!("{per_token} bytes per token for its experts, {whole} for the longest sample");
    match of_evictions {
        None => format!("nothing is evicted; {of_experts}"),
        Some(of_evictions) => format!("{of_evictions}; {of_experts}"),
    }
}

/// What the choices of evictions take, if there are any.
fn evictions(settings: &Settings, config: &ModelConfig, plan: &ChunkPlan) -> Option<String> {
    let (layers, heads) = (config.num_layers(), config.layers[0].attention.num_kv_heads);
    let of_layer = |(layer, spec): (usize, &LayerSpec)| settings.log_bytes(layer, plan, spec.attention.num_kv_heads);
    let (per_token, whole): (Vec<Bytes>, Vec<Bytes>) = config.layers.iter().enumerate().map(of_layer).unzip();
    let (Bytes(per_token), whole) = (per_token.into_iter().sum(), whole.into_iter().sum::<Bytes>());
    let (at_most, choices, agreed) = match settings.scope() {
        None if whole.0 == 0 => return None,
        // Of sliding windows, if not of the policy.
        None | Some(Scope::Batch) => ("", 1, " for all sequences and KV heads together"),
        Some(Scope::Sequence) => ("at most ", 1, " for all KV heads together"),
        Some(Scope::Head) => ("at most ", heads, ""),
    };
    let mean = per_token as f64 / (layers * choices) as f64;
    let heads = if choices == 1 { String::new() } else { format!(" × {heads} KV heads") };
    let product = format!("{layers} layers{heads} × {} B", (mean * 100.0).round() / 100.0);
    Some(format!("{at_most}{per_token} bytes per evicted token{agreed} ({product}), {whole} for the longest sample"))
}
