//! All ways of running a batch that must not change its gradient, or only as far as a store rounds: shapes of cells, where caches
//! wait and how they grow, stores.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::engine::{ChunkPlan, Settings};
use crate::recipe::{
    AttentionOutputs, BufferKind, CacheLength, CacheRecipe, GradRecipe, KeepGraph, Recipe, Storage, StoreForm, StorePlace,
    StoreRecipe,
};
use crate::units::distinct;

/// With cells of so many layers and chunks, stores that are plain and in memory, and neither graphs nor outputs that are kept.
fn shaped(own: &Recipe, layers: usize, chunks: usize) -> Recipe {
    let grad = GradRecipe {
        layers_per_cell: layers,
        chunks_per_cell: Some(chunks),
        layer_checkpoints: StoreRecipe::PLAIN,
        undo_log: StoreRecipe::PLAIN,
        attention_outputs: AttentionOutputs::Recompute,
        // As the recipe has it where it leaves it open: nobody plans here.
        keep_graph: if own.grad.keep_graph == KeepGraph::Auto { KeepGraph::Auto } else { KeepGraph::None },
        ..own.grad.clone()
    };
    Recipe { grad, ..own.clone() }
}

/// A recipe's own tiling in layers and chunks, as far as they say it: where all columns but those that end with a sequence are equally wide.
fn counted(own: &Recipe, num_layers: usize, plan: &ChunkPlan) -> Recipe {
    let has_same_sequences = |pair: &&[Range<usize>]| plan.sequences(&pair[0]) == plan.sequences(&pair[1]);
    let mut whole = plan.columns.windows(2).filter(has_same_sequences).map(|pair| pair[0].len());
    let width = whole.next().unwrap_or(plan.spans.len());
    let is_even = whole.all(|chunks| chunks == width) && plan.columns.iter().all(|column| column.len() <= width);
    let chunks_per_cell = if is_even { Some(width) } else { own.grad.chunks_per_cell };
    let layers_per_cell = own.grad.layers_per_cell.min(num_layers);
    let grad = GradRecipe { layers_per_cell, chunks_per_cell, ..own.grad.clone() };
    Recipe { grad, ..own.clone() }
}

fn with(mut recipe: Recipe, change: impl FnOnce(&mut GradRecipe)) -> Recipe {
    change(&mut recipe.grad);
    recipe
}

const fn store(form: StoreForm, place: StorePlace) -> StoreRecipe {
    StoreRecipe { form, place }
}

const PLAIN: StoreRecipe = StoreRecipe::PLAIN;
const FILE: StoreRecipe = store(StoreForm::Plain, StorePlace::File);
const INT8: StoreRecipe = store(StoreForm::Int8, StorePlace::Memory);
const INT4: StoreRecipe = store(StoreForm::Int4, StorePlace::Memory);
const INT8_FILE: StoreRecipe = store(StoreForm::Int8, StorePlace::File);
const INT4_FILE: StoreRecipe = store(StoreForm::Int4, StorePlace::File);

/// Layer checkpoints and undo log: each form in each place, each rounding store alone and both together.
const STORES: [[StoreRecipe; 2]; 7] =
    [[FILE, FILE], [INT8, PLAIN], [INT4, PLAIN], [PLAIN, INT8], [PLAIN, INT4], [INT8_FILE, INT8_FILE], [INT4_FILE, INT4_FILE]];
/// Stores of layer checkpoints and undo log where a single band begins with the embedding.
const STORES_OF_ONE_BAND: [[StoreRecipe; 2]; 2] = [[PLAIN, FILE], [PLAIN, INT8]];

/// All tilings that are worth a proof beside `own`, which comes first, of a model whose layers `trained` are differentiated: recipes that differ
/// in `grad` and in where their caches wait and how these grow; no two are the same. `settings` are those of `own`, `plan` is the batch's.
///
/// `docs/reference/verify.md` lists them. Beside a single band from the first layer an undo log that rounds moves the head's turn.
pub fn every_tiling(own: &Recipe, trained: &Range<usize>, settings: &Settings, plan: &ChunkPlan) -> Vec<Recipe> {
    let (num_chunks, num_layers) = (plan.spans.len(), trained.len().max(1));
    let several = (1, 2.min(num_chunks.div_ceil(2)));
    let one_band = (num_layers, several.1);
    let mut all = vec![counted(own, num_layers, plan)];
    for layers in sizes([1, 2, num_layers.saturating_sub(1), num_layers], num_layers) {
        all.extend(sizes([1, 2, 3, num_chunks], num_chunks).into_iter().map(|chunks| shaped(own, layers, chunks)));
    }
    let caches = caches(&own.kv_cache, settings, plan);
    for shape in [several, one_band] {
        all.extend(caches.iter().map(|kv_cache| Recipe { kv_cache: kv_cache.clone(), ..shaped(own, shape.0, shape.1) }));
    }
    let begins_above = trained.start > 0 && !trained.is_empty();
    // A single band of all layers has no border, and no undo entry is made where nothing is overwritten.
    let overwrites = settings.slots(plan).iter().any(|&slots| slots < plan.len());
    let waiting = |shape: (usize, usize), [layer_checkpoints, undo_log]: [StoreRecipe; 2]| {
        let has_borders = shape.0 < num_layers || begins_above;
        with(shaped(own, shape.0, shape.1), |grad| {
            grad.layer_checkpoints = if has_borders { layer_checkpoints } else { PLAIN };
            grad.undo_log = if overwrites { of_buffer(undo_log, settings.kv_cache().buffer) } else { PLAIN };
        })
    };
    all.extend(STORES.iter().map(|&stores| waiting(several, stores)));
    let of_one_band = if begins_above { &STORES[..] } else { &STORES_OF_ONE_BAND };
    all.extend(of_one_band.iter().map(|&stores| waiting(one_band, stores)));
    let num_columns = num_chunks.div_ceil(several.1);
    for shape in [several, one_band] {
        let all_cells = num_columns * trained.len().div_ceil(shape.0);
        let counts = sizes([1, num_columns - 1, num_columns + 1, all_cells], all_cells);
        let keeping = |cells| with(shaped(own, shape.0, shape.1), |grad| grad.keep_graph = KeepGraph::of(cells));
        all.extend(counts.into_iter().map(keeping));
        let outputs = |tiling| with(tiling, |grad| grad.attention_outputs = AttentionOutputs::Keep);
        all.extend([shaped(own, shape.0, shape.1), keeping(1)].map(outputs));
    }
    // What is exact comes before what rounds: the sort is stable.
    all[1..].sort_by_key(|tiling| tiling.grad.rounds());
    let mut all = distinct(all);
    all[0].clone_from(own);
    all
}

/// An undo log in a form that the buffer allows.
fn of_buffer(undo_log: StoreRecipe, buffer: BufferKind) -> StoreRecipe {
    let form = if buffer.undo_log_may_round() { undo_log.form } else { StoreForm::Plain };
    StoreRecipe { form, ..undo_log }
}

/// Caches that wait on the host and such that do not, in each storage that the policy leaves open. What is allocated at once is what
/// the batch needs where the recipe has another storage, beside which its length says nothing.
fn caches(own: &CacheRecipe, settings: &Settings, plan: &ChunkPlan) -> Vec<CacheRecipe> {
    let storages = if settings.scope().is_none() { Storage::ALL } else { &[own.storage] };
    let with = |(storage, cpu_offload): (Storage, bool)| {
        let is_own_length = storage == own.storage || storage != Storage::Preallocated;
        let cache_length = if is_own_length { own.cache_length.clone() } else { CacheLength::Uniform(plan.len()) };
        CacheRecipe { cache_length, storage, cpu_offload, ..own.clone() }
    };
    storages.iter().flat_map(|&storage| [false, true].map(|cpu_offload| with((storage, cpu_offload)))).collect()
}

/// The candidates from 1 to `most`, each once, ascending.
fn sizes<const N: usize>(candidates: [usize; N], most: usize) -> Vec<usize> {
    BTreeSet::from(candidates).into_iter().filter(|size| (1..=most).contains(size)).collect()
}
