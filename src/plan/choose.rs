//! The tiling of a step: what is left open in a recipe. Of what fits and computes nearly the least, it is that with the largest cells.
//! Exact stores come before those that round, and memory before files. Neither a clock nor the machine's load has a say.

use std::cmp::{Ordering, Reverse};

use super::ladder::{self, ladder, smallest};
use super::{Flops, Forecast, Limits, Machine, StepSpec, TrainedPart};
use crate::data::Batch;
use crate::engine::{RandomSizes, Schedule, Settings};
use crate::model::ModelConfig;
use crate::recipe::{AttentionOutputs, CacheRecipe, GradRecipe, KeepGraph, Offload, OpenKey, Recipe, StoreRecipe};
use crate::units::{Bytes, Exit, Fault};

/// What is planned: a batch through a model, on a machine.
#[derive(Debug)]
pub struct Planner<'a> {
    pub recipe: &'a Recipe,
    pub config: &'a ModelConfig,
    /// The recipe's cache, with chunks of a size.
    pub kv: &'a CacheRecipe,
    pub trained: &'a TrainedPart,
    /// The heaviest batch that will come.
    pub batch: &'a Batch,
    pub machine: Machine,
}

/// A way to tile a step, and what it would take.
#[derive(Clone, Debug)]
pub struct Alternative {
    /// The tiling; nothing in it is open.
    pub grad: GradRecipe,
    pub num_bands: usize,
    pub num_columns: usize,
    /// Cells whose graphs are kept.
    pub kept: usize,
    pub forecast: Forecast,
    /// Peak memory of a device with a memory of its own.
    pub device: Option<Bytes>,
    pub host: Bytes,
    pub operations: f64,
    /// Estimated seconds by part, in the order of [`super::StepPart::ALL`], where the machine's rate is known.
    pub seconds: Option<[f64; 6]>,
    /// Whether it stays within the limits.
    pub fits: bool,
}

impl Alternative {
    /// `575 MiB of memory`, or that of device and host.
    pub fn words(&self) -> String {
        let (host, files) = (self.host, self.forecast.files);
        let memory = self.device.map_or_else(
            || format!("{host} of memory"),
            |device| format!("{device} of the device's memory and {host} of the host's"),
        );
        if files > Bytes(0) { format!("{memory}, with {files} in files") } else { memory }
    }

    /// What is told of as one, by its best.
    fn group(&self) -> (usize, StoreRecipe, StoreRecipe) {
        (self.grad.layers_per_cell, self.grad.layer_checkpoints, self.grad.undo_log)
    }

    /// Fewer operations first, then larger cells, then less memory.
    fn compare(&self, other: &Self) -> Ordering {
        self.operations.total_cmp(&other.operations).then_with(|| self.compare_sizes(other))
    }

    /// Larger cells first, then fewer operations, then less memory.
    fn compare_sizes(&self, other: &Self) -> Ordering {
        let cells = |a: &Self| (Reverse(a.grad.layers_per_cell), a.num_bands, a.num_columns);
        let by_operations = || self.operations.total_cmp(&other.operations);
        cells(self)
            .cmp(&cells(other))
            .then_with(by_operations)
            .then_with(|| (self.device, self.host).cmp(&(other.device, other.host)))
    }
}

/// A decision, with what was looked at on the way.
#[derive(Clone, Debug)]
pub struct Decision {
    pub chosen: Alternative,
    /// The best with each number of layers and each pair of stores that was looked at; fewest operations first.
    pub alternatives: Vec<Alternative>,
}

/// A forecast may be too low by so many percent: of twenty drawn recipes the worst was by 8.1.
const MARGIN: u64 = 10;

/// Operations above the fewest, by so many times, that larger cells are worth: each cell has costs of its own.
const OPERATIONS_SLACK: f64 = 1.04;

/// Chunks of a cell that is looked at, at most: products of matrices gain nothing from more rows than that.
const MAX_CHUNKS_PER_CELL: usize = 16;

impl Planner<'_> {
    /// Decides what `grad` leaves open; what it says stays. Fails where nothing fits, with what would.
    pub fn decide(&self, grad: &GradRecipe) -> Result<Decision, Fault> {
        match self.find(grad)? {
            (Some(chosen), seen) => Ok(Decision { chosen, alternatives: by_layers(&seen) }),
            (None, seen) => Err(self.refusal(grad, seen)?),
        }
    }

    /// Shapes of cells with the stores that `grad` names, whether they fit or not; with each number of layers the best, fewest operations first.
    pub fn alternatives(&self, grad: &GradRecipe) -> Result<Vec<Alternative>, Fault> {
        let open = vec![OpenKey::LayersPerCell, OpenKey::ChunksPerCell];
        let open = GradRecipe { open, keep_graph: KeepGraph::Auto, ..grad.clone() };
        Ok(by_layers(&self.with_stores(&open, [grad.layer_checkpoints, grad.undo_log])?))
    }

    /// The best of the first stores with which anything fits, and all that was looked at.
    fn find(&self, grad: &GradRecipe) -> Result<(Option<Alternative>, Vec<Alternative>), Fault> {
        let mut seen: Vec<Alternative> = Vec::new();
        for (i, stores) in ladder(grad, self.kv.buffer).into_iter().enumerate() {
            if i == 1 {
                let least = self.with_least(grad)?;
                // With the stores that take least nothing fits: so nothing does at all.
                if !least.iter().any(|alternative| alternative.fits) {
                    seen.extend(least);
                    break;
                }
            }
            let made = self.with_stores(grad, stores)?;
            let chosen = self.best(&made, grad.keep_graph)?;
            seen.extend(made);
            if let Some(chosen) = chosen {
                // It stands for its group, also where another one computes a little less.
                seen.retain(|alternative| alternative.group() != chosen.group());
                seen.push(chosen.clone());
                return Ok((Some(chosen), seen));
            }
        }
        Ok((None, seen))
    }

    /// The best of those tilings that fit, each with as many kept graphs as fit, where their number is open: the largest cells of those that
    /// compute [nearly](OPERATIONS_SLACK) the least.
    fn best(&self, made: &[Alternative], keep_graph: KeepGraph) -> Result<Option<Alternative>, Fault> {
        let mut fitting: Vec<_> = made.iter().filter(|alternative| alternative.fits).cloned().collect();
        fitting.sort_by(Alternative::compare);
        let (mut kept, mut enough): (Vec<Alternative>, f64) = (Vec::new(), f64::INFINITY);
        for tiling in fitting {
            let tiling = self.with_graphs(tiling, keep_graph, enough)?;
            enough = enough.min(OPERATIONS_SLACK * tiling.operations);
            kept.push(tiling);
        }
        Ok(kept.into_iter().filter(|tiling| tiling.operations <= enough).min_by(Alternative::compare_sizes))
    }

    /// All shapes of cells, with those stores that may take the least memory.
    fn with_least(&self, grad: &GradRecipe) -> Result<Vec<Alternative>, Fault> {
        let stores = smallest(&ladder(grad, self.kv.buffer), self.machine.limits.files.is_some());
        let made = stores.into_iter().map(|stores| self.with_stores(grad, stores)).collect::<Result<Vec<_>, _>>()?;
        Ok(made.concat())
    }

    /// All shapes of cells with given stores.
    fn with_stores(&self, grad: &GradRecipe, stores: [StoreRecipe; 2]) -> Result<Vec<Alternative>, Fault> {
        self.tilings(grad, stores).into_iter().map(|tiling| self.keeping_all_or_none(tiling)).collect()
    }

    /// A tiling in which nothing is open but how many graphs are kept: with all where they fit, else with none.
    fn keeping_all_or_none(&self, grad: GradRecipe) -> Result<Alternative, Fault> {
        if grad.keep_graph != KeepGraph::Auto {
            return self.consider(grad);
        }
        let none = self.consider(grad.closed())?;
        // As the recipe's rule is: on all devices, also where no weights wait.
        if !none.fits || self.recipe.train.offload == Offload::Weights {
            return Ok(none);
        }
        let all = self.consider(GradRecipe { keep_graph: KeepGraph::All, ..grad })?;
        Ok(if all.fits && self.leaves_room(&none, &all) { all } else { none })
    }

    /// Whether the graphs kept `with` take at most half of the host's memory that a step leaves `without`: nobody has asked for them, and
    /// others may share the machine. A device's own memory is for them alone.
    fn leaves_room(&self, without: &Alternative, with: &Alternative) -> bool {
        let free = self.machine.limits.host.map(|limit| limit.0.saturating_sub(without.host.0));
        free.is_none_or(|free| 2 * with.host.0.saturating_sub(without.host.0) <= free)
    }

    /// Considers `grad` with as many kept graphs as fit, where their number is open.
    pub fn keeping(&self, grad: &GradRecipe) -> Result<Alternative, Fault> {
        self.with_graphs(self.keeping_all_or_none(grad.clone())?, grad.keep_graph, f64::INFINITY)
    }

    /// A tiling that keeps all graphs or none, with as many as fit, where their number is open. Looks no further where it would compute more
    /// than `enough` operations.
    fn with_graphs(&self, mut most: Alternative, keep_graph: KeepGraph, enough: f64) -> Result<Alternative, Fault> {
        let is_closed = keep_graph != KeepGraph::Auto || self.recipe.train.offload == Offload::Weights;
        if is_closed || most.num_bands == 0 || most.kept > 0 || !most.fits {
            return Ok(most);
        }
        let none = most.clone();
        // The columns of the top band, then whole bands; not all.
        let (bands, columns) = (most.num_bands, most.num_columns);
        let cells = |index: usize| if index <= columns { index } else { (index - columns + 1) * columns };
        let (mut fitting, mut too_many) = (0, columns + bands - 1);
        while fitting + 1 < too_many {
            let tried = usize::midpoint(fitting, too_many);
            let more = self.consider(GradRecipe { keep_graph: KeepGraph::of(cells(tried)), ..none.grad.clone() })?;
            if more.fits && self.leaves_room(&none, &more) {
                (fitting, most) = (tried, more);
            } else if more.operations > enough {
                break;
            } else {
                too_many = tried;
            }
        }
        Ok(most)
    }

    /// What the recipe would take as it stands, but for what is open.
    pub fn consider(&self, grad: GradRecipe) -> Result<Alternative, Fault> {
        if !self.kv.randomize_chunk_sizes {
            return self.consider_chunks(self.kv, grad);
        }
        let span = self.kv.cache_length.by_layer(self.config.num_layers()).into_iter().min().unwrap_or(usize::MAX);
        let (least, most) = RandomSizes::range(self.kv.wanted_chunk_size(), span).into_inner();
        let with_chunks_of = |chunk_size: usize| {
            let kv = CacheRecipe { chunk_size: Some(chunk_size), randomize_chunk_sizes: false, ..self.kv.clone() };
            self.consider_chunks(&kv, grad.clone())
        };
        let longest = with_chunks_of(most)?;
        if grad.keep_graph != KeepGraph::All {
            return Ok(longest);
        }
        // All graphs of experts take more in more columns: each has its own copy of the matrices B.
        let shortest = with_chunks_of(least)?;
        let memory = |a: &Alternative| (!a.fits, a.host.0 + a.device.map_or(0, |device| device.0));
        Ok(if memory(&shortest) > memory(&longest) { shortest } else { longest })
    }

    fn consider_chunks(&self, kv: &CacheRecipe, grad: GradRecipe) -> Result<Alternative, Fault> {
        let settings = Settings::new(self.config, kv, &grad)?;
        let Machine { device, threads, ranks, .. } = self.machine;
        let spec = StepSpec::of(self.recipe, self.config, &settings, self.trained, device);
        let spec = StepSpec { threads, ranks, ..spec };
        let plan = settings.plan(self.batch, None)?;
        let forecast = Forecast::of(&spec, &plan, self.batch);
        let (host, device) = match &forecast.host {
            Some(host) => (self.machine.baseline.with(host.bytes()), Some(forecast.device.bytes())),
            None => (self.machine.baseline.with(forecast.device.bytes()), None),
        };
        let with_margin = |bytes: Bytes| bytes.0 as f64 * (1.0 + MARGIN as f64 / 100.0);
        let within = |bytes: Bytes, limit: Option<Bytes>| limit.is_none_or(|limit| with_margin(bytes) <= limit.0 as f64);
        let limits = self.machine.limits;
        let schedule = Schedule::new(&settings, &plan, self.trained.first_layer, spec.layers_wait());
        let (num_bands, num_columns) = schedule.size();
        let operations = Flops::by_part(&spec, &plan, self.batch.num_tokens(), self.batch.num_targets());
        Ok(Alternative {
            num_bands,
            num_columns,
            kept: schedule.num_kept(),
            device,
            host,
            operations: operations.iter().sum(),
            seconds: self.machine.rate.map(|rate| operations.map(|of_part| of_part / rate)),
            fits: within(host, limits.host)
                && device.is_none_or(|bytes| within(bytes, limits.device))
                && within(forecast.files, limits.files),
            forecast,
            grad,
        })
    }

    /// Shapes of cells, as far as they are open, with given stores.
    fn tilings(&self, grad: &GradRecipe, [layer_checkpoints, undo_log]: [StoreRecipe; 2]) -> Vec<GradRecipe> {
        let trained = self.config.num_layers() - self.trained.first_layer;
        let layers = if grad.is_open(OpenKey::LayersPerCell) { even(trained.max(1)) } else { vec![grad.layers_per_cell] };
        let chunks = self.batch.max_len().div_ceil(self.kv.wanted_chunk_size());
        let widths: Vec<_> = if grad.is_open(OpenKey::ChunksPerCell) {
            doubling(chunks.clamp(1, MAX_CHUNKS_PER_CELL)).into_iter().map(Some).collect()
        } else {
            vec![grad.chunks_per_cell]
        };
        let outputs = ladder::outputs(grad, [layer_checkpoints, undo_log]);
        let of =
            |((layers_per_cell, chunks_per_cell), attention_outputs): ((usize, Option<usize>), AttentionOutputs)| GradRecipe {
                layers_per_cell,
                chunks_per_cell,
                layer_checkpoints,
                undo_log,
                attention_outputs,
                open: Vec::new(),
                ..grad.clone()
            };
        let shapes = layers.into_iter().flat_map(|layers| widths.iter().map(move |width| (layers, *width)));
        shapes.flat_map(|shape| outputs.iter().map(move |&outputs| (shape, outputs))).map(of).collect()
    }

    /// Why nothing fits, and what would: the same with other stores and cells, fewer tokens, or more memory.
    fn refusal(&self, grad: &GradRecipe, seen: Vec<Alternative>) -> Result<Fault, Fault> {
        let over = |a: &Alternative| {
            let of = |bytes: Bytes, limit: Option<Bytes>| limit.map_or(0.0, |limit| bytes.0 as f64 / limit.0.max(1) as f64);
            let limits = self.machine.limits;
            let on_device = a.device.map_or(0.0, |bytes| of(bytes, limits.device));
            of(a.host, limits.host).max(on_device).max(of(a.forecast.files, limits.files))
        };
        // Beginning with the defaults for what is open.
        let nearer = |a: Alternative, b: Alternative| if over(&b) < over(&a) { b } else { a };
        let least = seen.into_iter().fold(self.consider(grad.closed())?, nearer);
        let shortage = shortage(&least, self.machine.limits, self.batch.max_len());
        Ok(Fault::new(Exit::Memory, shortage).with_hint(self.advice(grad)))
    }

    fn advice(&self, grad: &GradRecipe) -> String {
        let all_open = GradRecipe { open: OpenKey::ALL.to_vec(), keep_graph: KeepGraph::Auto, ..grad.clone() };
        if (grad.open.len() < OpenKey::ALL.len() || grad.keep_graph.cells() > 0)
            && let Ok((Some(chosen), _)) = self.find(&all_open)
        {
            return format!("this would: {}", chosen.grad.tiling());
        }
        let (mut fits, mut fails) = (0, self.batch.max_len());
        while fails - fits > (fails / 16).max(1) {
            let tokens = usize::midpoint(fits, fails);
            let batch = shortened(self.batch, tokens);
            let planner = Planner { batch: &batch, ..*self };
            let is_fine = planner.with_least(&all_open).is_ok_and(|all| all.iter().any(|alternative| alternative.fits));
            *(if is_fine { &mut fits } else { &mut fails }) = tokens;
        }
        if fits > 0 {
            return format!(
                "set every key of `[grad]` that allows it to `\"auto\"`: then sequences of up to {fits} tokens fit; or lower \
                 `kv_cache.cache_length` or `train.micro_batch_size`"
            );
        }
        "no sequence would fit: the model and what is trained need all of it; use a smaller model, `model.dtype = \"bf16\"`, `model.quantize` or more memory".to_owned()
    }
}

fn by_layers(seen: &[Alternative]) -> Vec<Alternative> {
    let mut groups: Vec<_> = seen.iter().map(Alternative::group).collect();
    groups.dedup();
    let of_group = |key: &_| {
        seen.iter().filter(|a| a.group() == *key).min_by(|a, b| b.fits.cmp(&a.fits).then_with(|| a.compare(b))).cloned()
    };
    let mut alternatives: Vec<Alternative> = groups.iter().filter_map(of_group).collect();
    alternatives.sort_by(Alternative::compare);
    alternatives
}

/// The largest bands of `layers` layers cut into one band, two, three and so on, ascending. Example: 28 give 1, 2, 3, 4, 5, 6, 7, 10, 14, 28.
fn even(layers: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=layers).rev().map(|bands| layers.div_ceil(bands)).collect();
    sizes.dedup();
    sizes
}

/// 1, 2, 4, … and `most`.
fn doubling(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1usize), |n| n.checked_mul(2)).take_while(|n| *n < most);
    powers.chain([most]).collect()
}

/// The batch's sequences cut to so many tokens.
fn shortened(batch: &Batch, tokens: usize) -> Batch {
    let mut batch = batch.clone();
    for sequence in &mut batch.sequences {
        sequence.inputs.truncate(tokens.max(1));
        if let crate::data::Targets::NextToken(labels) = &mut sequence.targets {
            labels.truncate(tokens.max(1));
        }
        sequence.initial = None;
    }
    batch
}

/// What the tiling that comes nearest would take of what there is.
fn shortage(least: &Alternative, limits: Limits, tokens: usize) -> String {
    let of = |name: &str, bytes: Bytes, limit: Option<Bytes>| {
        let there = limit.map_or_else(String::new, |limit| format!(", of which there are {limit}"));
        format!("{bytes} of {name} memory{there}")
    };
    let device = least.device.map(|bytes| format!("{} and ", of("device", bytes, limits.device))).unwrap_or_default();
    let (host, files) = (of("host", least.host, limits.host), least.forecast.files);
    let there = limits.files.map_or(String::new(), |limit| format!(", for which {limit} are free"));
    let files = if files > Bytes(0) { format!(" and {files} of scratch files{there}") } else { String::new() };
    format!("a step of {tokens} tokens does not fit with a margin of {MARGIN} %: it takes at least {device}{host}{files}")
}
