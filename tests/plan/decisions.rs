//! What is chosen of what is open.

use kvtune::data::{Batch, Sequence, Targets};
use kvtune::model::ModelConfig;
use kvtune::plan::{Decision, Limits, Machine, Planner, ProcessBaseline, TrainedPart};
use kvtune::recipe::{CacheRecipe, GradRecipe, KeepGraph, OpenKey, Recipe, StoreForm, StorePlace, StoreRecipe};
use kvtune::units::{Bytes, Exit, Fault};
use proptest::prelude::*;
use serde_json::json;
use tch::Device;

const MIB: u64 = 1 << 20;

fn config() -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 688, "vocab_size": 2048, "max_position_embeddings": 1 << 20,
    });
    ModelConfig::from_object(config.as_object().unwrap()).unwrap()
}

fn recipe(kv: &str) -> Recipe {
    let text = format!("model.path = '.'\ndata = {{ format = 'tokens', train = 'none' }}\nkv_cache = {kv}");
    Recipe::parse(text, std::path::Path::new("recipe.toml"), &[]).unwrap().recipe
}

fn batch(tokens: usize) -> Batch {
    let sequence = Sequence { sample: 0, inputs: vec![0; tokens], targets: Targets::NextToken(vec![0; tokens]), initial: None };
    Batch { sequences: vec![sequence] }
}

fn machine(host: u64) -> Machine {
    let limits = Limits { host: Some(Bytes(host * MIB)), ..Limits::default() };
    Machine {
        device: Device::Cpu,
        threads: 2,
        baseline: ProcessBaseline { resident: Bytes(150 * MIB), kernels: Bytes(0), freed: Bytes(10 * MIB) },
        limits,
        ranks: 1,
        rate: None,
        processes: 1,
    }
}

fn planner<'a>(
    recipe: &'a Recipe,
    config: &'a ModelConfig,
    kv: &'a CacheRecipe,
    trained: &'a TrainedPart,
    batch: &'a Batch,
    machine: Machine,
) -> Planner<'a> {
    Planner { recipe, config, kv, trained, batch, machine }
}

/// What is decided for so many tokens, with so many MiB of memory.
fn decide(kv: &CacheRecipe, grad: &GradRecipe, tokens: usize, machine: Machine) -> Result<Decision, Fault> {
    let recipe = recipe("{}");
    let (config, trained, batch) = (config(), TrainedPart::of(&config(), recipe.lora.as_ref()).unwrap(), batch(tokens));
    planner(&recipe, &config, kv, &trained, &batch, machine).decide(grad)
}

fn open(grad: &GradRecipe) -> GradRecipe {
    GradRecipe { open: OpenKey::ALL.to_vec(), ..grad.clone() }
}

#[test]
fn with_memory_enough_everything_is_exact_in_memory_and_one_layer_band() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 1024, chunk_size = 512 }");
    let chosen = decide(&recipe.kv_cache, &open(&recipe.grad), 32768, machine(64 << 10)).unwrap().chosen;
    assert_eq!((chosen.grad.layers_per_cell, chosen.grad.keep_graph, chosen.num_bands), (6, KeepGraph::All, 1));
    assert_eq!((chosen.grad.undo_log.form, chosen.grad.undo_log.place), (StoreForm::Plain, StorePlace::Memory));
    assert!(chosen.fits && chosen.grad.open.is_empty() && chosen.forecast.files == Bytes(0));
}

#[test]
fn without_trained_layers_there_is_no_graph_to_keep() {
    let text = "model.path = '.'\nlora = { r = 4, target_modules = ['lm_head'] }\ndata = { format = 'tokens', train = 'none' }\n\
                kv_cache = { policy = 'h2o', cache_length = 1024, chunk_size = 512 }";
    let recipe = Recipe::parse(text.to_owned(), std::path::Path::new("recipe.toml"), &[]).unwrap().recipe;
    let (trained, batch) = (TrainedPart::of(&config(), recipe.lora.as_ref()).unwrap(), batch(32768));
    let chosen =
        planner(&recipe, &config(), &recipe.kv_cache, &trained, &batch, machine(300)).decide(&open(&recipe.grad)).unwrap().chosen;
    assert_eq!((chosen.num_bands, chosen.kept), (0, 0));
    assert!(!matches!(chosen.grad.keep_graph, KeepGraph::Cells(_)), "{:?}", chosen.grad);
}

/// Some parts are larger in long chunks, others in many: where all graphs are kept, either may be drawn.
#[test]
fn with_all_graphs_random_sizes_take_what_the_longest_or_the_shortest_do() {
    let taken = |chunk_size: usize, randomize: bool| {
        let recipe = recipe(&format!(
            "{{ policy = 'h2o', cache_length = 1024, chunk_size = {chunk_size}, randomize_chunk_sizes = {randomize} }}"
        ));
        let grad = GradRecipe { keep_graph: KeepGraph::All, chunks_per_cell: Some(1), ..recipe.grad.clone() };
        let (trained, batch) = (TrainedPart::of(&config(), recipe.lora.as_ref()).unwrap(), batch(8192));
        planner(&recipe, &config(), &recipe.kv_cache, &trained, &batch, machine(64 << 10)).consider(grad).unwrap().host
    };
    assert_eq!(taken(512, true), taken(256, false).max(taken(768, false)));
}

#[test]
fn what_is_not_open_stays_and_what_is_short_goes_to_files_before_it_is_rounded() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 1024, chunk_size = 512 }");
    let chosen = decide(&recipe.kv_cache, &open(&recipe.grad), 32768, machine(260)).unwrap().chosen;
    assert_eq!((chosen.grad.undo_log.form, chosen.grad.undo_log.place), (StoreForm::Plain, StorePlace::File));
    let stays = GradRecipe { open: vec![OpenKey::UndoLog, OpenKey::LayersPerCell], ..recipe.grad.clone() };
    let chosen = decide(&recipe.kv_cache, &stays, 32768, machine(330)).unwrap().chosen;
    assert_eq!((chosen.grad.undo_log.place, chosen.grad.chunks_per_cell), (StorePlace::Memory, None));
    assert_ne!(chosen.grad.undo_log.form, StoreForm::Plain, "in memory it fits only rounded");
}

#[test]
fn a_quantised_cache_keeps_its_undo_log_to_the_bit() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 1024, chunk_size = 512, buffer = 'int8' }");
    let chosen = decide(&recipe.kv_cache, &open(&recipe.grad), 32768, machine(262)).unwrap().chosen;
    assert_eq!(chosen.grad.undo_log.form, StoreForm::Plain);
}

#[test]
fn what_can_not_fit_is_refused_with_what_would() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 1024, chunk_size = 512 }");
    let refused = |grad: &GradRecipe, host| {
        let error = decide(&recipe.kv_cache, grad, 32768, machine(host)).unwrap_err();
        (error.to_string(), error.hint().unwrap())
    };
    let (message, hint) = refused(&recipe.grad, 300);
    assert!(message.starts_with("a step of 32768 tokens does not fit with a margin of 10 %: it takes at least "), "{message}");
    assert!(hint.starts_with("this would: grad = { layers_per_cell = 6, "), "{hint}");
    let (_, hint) = refused(&open(&recipe.grad), 205);
    let tokens: usize = hint.split_once("sequences of up to ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    assert!((1..32768).contains(&tokens));
    assert!(decide(&recipe.kv_cache, &open(&recipe.grad), tokens, machine(205)).is_ok(), "{hint}");
    assert!(decide(&recipe.kv_cache, &open(&recipe.grad), tokens * 5 / 4, machine(205)).is_err(), "{hint}");
    assert!(refused(&open(&recipe.grad), 100).1.starts_with("no sequence would"));
}

#[test]
fn a_device_has_a_limit_of_its_own() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 4096, chunk_size = 512 }");
    let mut machine = machine(64 << 10);
    machine.device = Device::Cuda(0);
    let mut widths = Vec::new();
    for device in [75, 120, 4000] {
        machine.limits.device = Some(Bytes(device * MIB));
        let chosen = decide(&recipe.kv_cache, &open(&recipe.grad), 32768, machine).unwrap().chosen;
        let taken = chosen.device.unwrap();
        assert!(taken.0 * 110 / 100 <= device * MIB, "{taken} of {device} MiB");
        widths.push(taken);
    }
    assert!(widths[0] < widths[1] && widths[1] <= widths[2], "{widths:?}");
}

#[test]
fn files_go_no_further_than_the_disk() {
    let recipe = recipe("{ policy = 'h2o', cache_length = 1024, chunk_size = 512 }");
    let of = |grad: &GradRecipe, files: u64| {
        let mut machine = machine(340);
        machine.limits.files = Some(Bytes(files * MIB));
        decide(&recipe.kv_cache, grad, 32768, machine)
    };
    let roomy = of(&open(&recipe.grad), 1 << 20).unwrap().chosen;
    let needed = roomy.forecast.files.0.div_ceil(MIB);
    assert_eq!((roomy.grad.undo_log.form, roomy.grad.undo_log.place), (StoreForm::Plain, StorePlace::File));
    // The margin holds for files, too.
    assert_ne!(of(&open(&recipe.grad), needed).unwrap().chosen.grad, roomy.grad);
    let short = of(&open(&recipe.grad), 20).unwrap().chosen;
    assert!(short.fits && short.forecast.files.0 * 110 / 100 <= 20 * MIB, "{}", short.grad.tiling());
    assert_ne!(short.grad.undo_log.form, StoreForm::Plain, "{}", short.grad.tiling());

    let written = GradRecipe { undo_log: roomy.grad.undo_log, ..recipe.grad.clone() };
    let error = of(&written, 20).unwrap_err();
    assert!(error.to_string().ends_with(" of scratch files, for which 20.0 MiB are free"), "{error}");
    assert!(error.hint().unwrap().starts_with("this would: grad = { "), "{:?}", error.hint());
    // Nothing open would do: fewer tokens.
    let all_in_files = [OpenKey::LayersPerCell, OpenKey::ChunksPerCell];
    let only_files = GradRecipe { layer_checkpoints: roomy.grad.undo_log, open: all_in_files.to_vec(), ..written };
    assert!(
        of(&only_files, 0).is_err_and(|error| error.exit() == Exit::Memory && error.to_string().contains(" of scratch files"))
    );
}

/// Whether any tiling with any stores fits.
fn anything_fits(recipe: &Recipe, tokens: usize, machine: Machine) -> bool {
    let (config, trained, batch) = (config(), TrainedPart::of(&config(), recipe.lora.as_ref()).unwrap(), batch(tokens));
    let kv = &recipe.kv_cache;
    let planner = planner(recipe, &config, kv, &trained, &batch, machine);
    let forms = [StoreForm::Plain, StoreForm::Int8, StoreForm::Int4];
    let stores: Vec<StoreRecipe> = forms
        .into_iter()
        .flat_map(|form| [StorePlace::Memory, StorePlace::File].map(|place| StoreRecipe { form, place }))
        .collect();
    let pairs = stores.iter().flat_map(|c| stores.iter().map(move |u| (*c, *u)));
    pairs.into_iter().any(|(layer_checkpoints, undo_log)| {
        let grad = GradRecipe { layer_checkpoints, undo_log, ..recipe.grad.clone() };
        planner.alternatives(&grad).unwrap().iter().any(|alternative| alternative.fits)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn what_is_refused_fits_in_no_way(tokens in 6000usize..12000, host in 212u64..250, files in 0u64..12) {
        let recipe = recipe("{ policy = 'lastrec', cache_length = 1024, chunk_size = 512 }");
        let mut machine = machine(host);
        machine.limits.files = Some(Bytes(files * MIB));
        let is_decided = decide(&recipe.kv_cache, &open(&recipe.grad), tokens, machine).is_ok();
        prop_assert_eq!(is_decided, anything_fits(&recipe, tokens, machine));
    }
}

/// What is chosen within `host` MiB fits, and with `more` the same stores compute no more, but for what larger cells are worth.
fn chosen_with_more_memory(tokens: usize, host: u64, more: u64, kv: &str) {
    let recipe = recipe(kv);
    let of = |host| decide(&recipe.kv_cache, &open(&recipe.grad), tokens, machine(host));
    let Ok(Decision { chosen, alternatives }) = of(host) else { return };
    assert!(chosen.fits && chosen.host.0 as f64 * 1.1 <= (host * MIB) as f64);
    // Of what was weighed, with as many graphs as fit besides.
    let with_graphs_of = |other: &GradRecipe| GradRecipe { keep_graph: chosen.grad.keep_graph, ..other.clone() };
    assert!(alternatives.iter().any(|other| with_graphs_of(&other.grad) == chosen.grad));
    let larger = of(host + more).unwrap().chosen;
    let is_exact = |grad: &GradRecipe| grad.undo_log.form == StoreForm::Plain && grad.layer_checkpoints.form == StoreForm::Plain;
    assert!(!is_exact(&chosen.grad) || is_exact(&larger.grad));
    // Memory comes before files, even where a file would leave room for fewer layer bands.
    let stores = |grad: &GradRecipe| (grad.layer_checkpoints, grad.undo_log);
    let is_another_way = stores(&chosen.grad) != stores(&larger.grad);
    let (less, more) = (chosen.operations, larger.operations);
    assert!(is_another_way || more <= 1.04 * less, "{} computes {more}, {} {less}", larger.grad.tiling(), chosen.grad.tiling());
}

const LASTREC: &str = "{ policy = 'lastrec', cache_length = 1024, chunk_size = 512 }";
const GROWING: &str = "{ policy = 'dense', storage = 'growing', chunk_size = 512 }";

/// Here the tiling that computes least without kept graphs is not the one that computes least with as many as fit.
#[test]
fn tilings_are_compared_with_the_graphs_that_they_keep() {
    chosen_with_more_memory(4623, 436, 43, LASTREC);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn what_is_chosen_fits_and_more_memory_never_makes_the_same_stores_compute_more(
        tokens in 2000usize..60000, host in 200u64..800, more in 0u64..400, is_growing: bool,
    ) {
        chosen_with_more_memory(tokens, host, more, if is_growing { GROWING } else { LASTREC });
    }
}
