//! The forward phase: column by column through all layers, without autograd; choices, undo entries and layer checkpoints are
//! written down. Where all layers are one band and nothing is rounded, the head waits for the backward phase, which makes the very last
//! hidden states again; else it has its turn here: between bands a gradient of all tokens must travel anyway.

use std::ops::Range;

use tch::{Device, Kind, Tensor, no_grad};

use super::attend::{Column, Deciding, Replaying};
use super::head_run::HeadRun;
use super::layer_checkpoints::LayerCheckpoints;
use super::layer_state::{SharedLayer, lock, new_layer_states};
use super::memory::{self, Transient};
use super::{ChunkPlan, Engine, EngineError, Event, MicroBatchContext, Observer};
use crate::cache::{CacheShape, LayerCache, LayerLog, ReplayLog};
use crate::data::Batch;
use crate::model::{Attend, CapturedLayers, DropoutContext, Model, Positions};
use crate::native::cuda::upload;
use crate::ops::attention;
use crate::store::HostTensor;
use crate::units::{Bytes, LayerIdx};

/// Receives the position of a column's first token and its hidden states `(B, n, E)` before the final norm.
pub type HiddenSink<'a> = &'a mut dyn FnMut(usize, &Tensor);

/// Everything the backward phase needs of the forward phase.
pub struct ForwardTrace {
    /// The choices.
    pub log: ReplayLog,
    pub(super) plan: ChunkPlan,
    pub(super) tokens: BatchIds,
    pub(super) runs: Vec<SharedLayer>,
    pub(super) checkpoints: LayerCheckpoints,
    pub(super) head: HeadRun,
    /// Gradient of the hidden states above the last layer, by column, `None` where no token has a target; nothing at all where
    /// the head waits for the backward phase.
    pub(super) top: Option<Vec<Option<HostTensor>>>,
}

/// The ids of a batch, padded on the right.
pub(super) struct BatchIds {
    ids_bt: Tensor,
    samples: Vec<u64>,
    device: Device,
}

impl BatchIds {
    fn new(batch: &Batch, device: Device) -> Self {
        let total = batch.max_len();
        let padded = |sequence: &crate::data::Sequence| {
            let ids = sequence.inputs.iter().map(|&id| i64::from(id));
            ids.chain(std::iter::repeat(0)).take(total).collect::<Vec<i64>>()
        };
        let ids: Vec<i64> = batch.sequences.iter().flat_map(padded).collect();
        let ids_bt = Tensor::from_slice(&ids).view([batch.sequences.len() as i64, total as i64]);
        Self { ids_bt, samples: batch.sequences.iter().map(|r| r.sample).collect(), device }
    }

    /// The ids of all columns `(B, T)`, on the host.
    pub(super) fn all(&self) -> &Tensor {
        &self.ids_bt
    }

    /// The ids of a column `(B, n)`.
    pub(super) fn ids(&self, (start, len): (usize, usize)) -> Tensor {
        upload(&self.ids_bt.narrow(1, start as i64, len as i64), self.device)
    }

    /// The embeddings of a column `(B, n, E)`.
    pub(super) fn embed(&self, model: &Model, at: (usize, usize)) -> Tensor {
        model.embed(&self.ids(at))
    }

    /// Positions of a column, `(1, n)`: pads count on, so that all sequences share them.
    pub(super) fn positions(&self, model: &Model, (start, len): (usize, usize)) -> Positions {
        model.positions(Tensor::arange_start(start as i64, (start + len) as i64, (Kind::Int64, self.device)).view([1, -1]))
    }

    /// What makes randomness independent of the chunking.
    pub(super) fn place(&self, context: Option<MicroBatchContext>) -> DropoutContext<'_> {
        DropoutContext { dropout: context.and_then(|c| c.dropout), samples: &self.samples }
    }
}

impl Engine {
    /// The engine with choices to follow instead of its policies'; it refuses every batch but the one that they were made for.
    pub fn following(mut self, log: ReplayLog) -> Self {
        self.follow(Some(log));
        self
    }

    /// Choices to follow from now on, or `None` to choose.
    pub fn follow(&mut self, log: Option<ReplayLog>) {
        self.log = log;
    }
}

/// Runs the forward phase; without a context, losses only.
pub(super) fn run(
    engine: &Engine,
    model: &Model,
    batch: &Batch,
    context: Option<MicroBatchContext>,
    (observer, mut sink): (&mut dyn Observer, Option<HiddenSink<'_>>),
) -> Result<ForwardTrace, EngineError> {
    let plan = engine.settings().plan(batch, context.and_then(|c| c.chunk_sizes))?;
    measure_attention(engine, model, &plan, observer);
    let tokens = BatchIds::new(batch, model.device());
    let runs = new_layer_states(caches(engine, model, &plan, batch), &engine.stores.undo_log);
    let bands = engine.settings.layer_bands();
    let mut trace = ForwardTrace {
        log: empty_log(&plan, &runs),
        head: HeadRun::new(engine, model, batch)?,
        top: (context.is_none() || !engine.settings.makes_last_hidden_states_again()).then(Vec::new),
        checkpoints: LayerCheckpoints::new(engine.stores.layer_checkpoints.clone()),
        plan,
        tokens,
        runs,
    };
    if let Some(log) = &engine.log {
        log.check_fits(&trace.plan.spans, &trace.log.cache_lengths, &model.config().num_kv_heads())?;
        trace.log.layers.clone_from(&log.layers);
        hand_back_log(&mut trace);
    }
    let mut captured = captured(engine, model, &trace.plan)?;
    for (c, column) in trace.plan.columns.clone().into_iter().enumerate() {
        let at = (c, trace.plan.columns.len());
        emit(observer, Event::ForwardColumn { column: at }, model, &trace);
        let borders = context.is_some().then_some(&bands[..]);
        let hidden = no_grad(|| run_column(engine, (model, &mut captured), &mut trace, (c, &column), context, borders))?;
        let (start, _) = trace.plan.tokens(&column);
        if let Some(sink) = &mut sink {
            sink(start, &hidden);
        }
        if trace.top.is_some() {
            emit(observer, Event::Head { column: at }, model, &trace);
            let gradient = trace.head.column(engine, model, (start, &hidden), context.map(|x| x.weight))?;
            trace.top.iter_mut().for_each(|top| top.push(gradient.as_ref().map(HostTensor::send)));
        }
    }
    collect_log(&mut trace);
    Ok(trace)
}

fn emit(observer: &mut dyn Observer, event: Event, model: &Model, trace: &ForwardTrace) {
    let travelling = trace.top.as_deref().unwrap_or_default();
    let beside = Transient { travelling, ahead: Bytes(0), head: &trace.head.gradients };
    memory::emit(observer, event, (model, trace), &beside);
}

/// One column through all layers. `borders` are the layer bands whose inputs are to be kept.
fn run_column(
    engine: &Engine,
    (model, captured): (&Model, &mut CapturedLayers),
    trace: &mut ForwardTrace,
    (c, column): (usize, &Range<usize>),
    context: Option<MicroBatchContext>,
    borders: Option<&[Range<usize>]>,
) -> Result<Tensor, EngineError> {
    let at = trace.plan.tokens(column);
    let mut hidden = trace.tokens.embed(model, at);
    let (positions, place) = (trace.tokens.positions(model, at), trace.tokens.place(context));
    let mut layers = captured.column((model, &place), &positions, (trace.plan.num_sequences(), at.1));
    let keep_undo_from = borders.and_then(<[_]>::last).map_or(usize::MAX, |top| top.start);
    let column = Column { spans: &trace.plan.spans[column.clone()], runs: &trace.runs, layers: (0, trace.runs.len()) };
    let mut deciding = Deciding { column, policies: &engine.settings.policies, keep_undo_from };
    let mut replaying = Replaying { column, keep_undo_from };
    let attend: &mut dyn Attend = if engine.log.is_some() { &mut replaying } else { &mut deciding };
    for layer in 0..model.config().num_layers() {
        // The input of the lowest band is the embedding, which is cheaper to look up again than to keep.
        if layer > 0 && borders.is_some_and(|bands| bands.iter().any(|r| r.start == layer)) {
            trace.checkpoints.put(layer, c, &hidden)?;
        }
        hidden = layers.layer(LayerIdx(layer), &hidden, attend)?;
    }
    Ok(hidden)
}

/// The layers for a pass over all columns of a plan.
pub(super) fn captured(engine: &Engine, model: &Model, plan: &ChunkPlan) -> Result<CapturedLayers, EngineError> {
    Ok(CapturedLayers::new(model.device(), engine.settings.captured_shapes(plan, model.device()))?)
}

/// Lets the device find its fastest way to attend for the chunks that meet full caches, where it has not yet.
fn measure_attention(engine: &Engine, model: &Model, plan: &ChunkPlan, observer: &mut dyn Observer) {
    let tokens = plan.longest_chunk() as i64;
    let kind = model.kind();
    let caches = engine.settings.cache_shapes(model.config(), plan, (kind, model.device()));
    for (cache, layer) in caches.into_iter().zip(&model.config().layers) {
        let heads = layer.attention.num_heads as i64;
        let past = (cache.cache_length as i64 - tokens).max(0);
        let (batch, groups, head_dim) = (cache.batch, cache.groups, cache.head_dim);
        let shape = attention::AttendShape { kind, batch, heads, groups, head_dim, tokens, past };
        if let Some(found) = attention::calibrate(shape, model.device()) {
            observer.measured(&found);
        }
    }
}

/// An empty cache for each layer.
fn caches(engine: &Engine, model: &Model, plan: &ChunkPlan, batch: &Batch) -> Vec<LayerCache> {
    let settings = &engine.settings;
    let shapes = settings.cache_shapes(model.config(), plan, (model.kind(), model.device()));
    let cache = |(layer, shape): (usize, CacheShape)| {
        let policy = settings.policy(layer);
        let protected =
            batch.sequences.iter().map(|sequence| sequence.initial.map_or((0, 0), |initial| policy.protects(initial)));
        LayerCache::new(LayerIdx(layer), shape, plan.prefill).protecting(protected.collect())
    };
    shapes.into_iter().enumerate().map(cache).collect()
}

fn empty_log(plan: &ChunkPlan, runs: &[SharedLayer]) -> ReplayLog {
    let cache_lengths = runs.iter().map(|r| lock(r).cache.shape().cache_length).collect();
    ReplayLog { spans: plan.spans.clone(), cache_lengths, layers: Vec::new() }
}

/// Hands the choices over from the layers to the trace.
fn collect_log(trace: &mut ForwardTrace) {
    let take = |run: &SharedLayer| std::mem::take::<LayerLog>(&mut lock(run).log);
    trace.log.layers = trace.runs.iter().map(take).collect();
}

/// Hands the choices back to the layers, for replaying.
pub(super) fn hand_back_log(trace: &mut ForwardTrace) {
    for (run, log) in trace.runs.iter().zip(trace.log.layers.drain(..)) {
        lock(run).log = log;
    }
}
