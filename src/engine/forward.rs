//! The forward phase: column by column through all layers, without autograd; choices, undo entries and layer checkpoints are
//! written down. The [`Schedule`] says whether the head belongs here, or waits for the cells of the backward phase.

use tch::{Device, Tensor, no_grad};

use super::attend::{ColumnAttention, Mode};
use super::head_run::HeadRun;
use super::layer_checkpoints::LayerCheckpoints;
use super::layer_state::new_layer_states;
use super::memory::{self, Transient};
use super::schedule::{ForwardStage, Schedule};
use super::session::{Pass, Session};
use super::{ChunkPlan, Engine, EngineError, Event, MicroBatchContext, Observer};
use crate::cache::{CacheShape, LayerCache, ReplayLog};
use crate::data::Batch;
use crate::model::{CapturedLayers, DropoutContext, Model};
use crate::native::cuda::upload;
use crate::ops::attention;
use crate::store::HostTensor;
use crate::units::{Bytes, LayerIdx};

/// Receives the position of a column's first token and its hidden states `(B, n, E)` before the final norm.
pub type HiddenSink<'a> = &'a mut dyn FnMut(usize, &Tensor);

/// What a forward phase is run for.
pub(super) enum Purpose<'a> {
    /// A backward phase, for which all that it needs is kept.
    Gradients(MicroBatchContext),
    /// Losses alone.
    Losses,
    /// Losses, with every column's last hidden states handed out.
    Inspection(HiddenSink<'a>),
}

impl Purpose<'_> {
    fn context(&self) -> Option<MicroBatchContext> {
        if let Self::Gradients(context) = self { Some(*context) } else { None }
    }
}

/// Everything the backward phase needs of the forward phase.
pub struct ForwardTrace {
    /// The choices.
    pub log: ReplayLog,
    pub(super) session: Session,
    pub(super) tokens: BatchIds,
    pub(super) checkpoints: LayerCheckpoints,
    pub(super) head: HeadRun,
    /// Gradient of the hidden states above the last layer, by column; `None` where no token has a target, and where cells make it.
    pub(super) top: Vec<Option<HostTensor>>,
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

/// Runs the forward phase.
pub(super) fn run(
    engine: &Engine,
    model: &Model,
    batch: &Batch,
    mut purpose: Purpose<'_>,
    observer: &mut dyn Observer,
) -> Result<ForwardTrace, EngineError> {
    let context = purpose.context();
    let plan = engine.settings().plan(batch, context.and_then(|c| c.chunk_sizes))?;
    measure_attention(engine, model, &plan, observer);
    let schedule = context.map_or_else(|| Schedule::of_losses(&plan), |_| Schedule::new(&engine.settings, &plan));
    let mut captured = captured(engine, model, &plan)?;
    let mut trace = begin(engine, model, batch, plan)?;
    let mut hidden = Tensor::new();
    for stage in schedule.forward() {
        match stage {
            ForwardStage::Column(c) => {
                let column = trace.column(c);
                emit(observer, Event::ForwardColumn { column }, model, &trace);
                hidden = no_grad(|| run_column(engine, (model, &mut captured), &mut trace, (c, context), &schedule))?;
                if let Purpose::Inspection(sink) = &mut purpose {
                    sink(trace.at(c).0, &hidden);
                }
            }
            ForwardStage::Head(c) => {
                let column = trace.column(c);
                emit(observer, Event::Head { column }, model, &trace);
                let at = (trace.at(c).0, &hidden);
                let gradient = trace.head.column(engine, model, at, context.map(|x| x.weight))?;
                trace.top[c] = gradient.as_ref().map(HostTensor::send);
            }
        }
    }
    trace.log.layers = trace.session.take_choices();
    Ok(trace)
}

/// A trace of which nothing has been run.
fn begin(engine: &Engine, model: &Model, batch: &Batch, plan: ChunkPlan) -> Result<ForwardTrace, EngineError> {
    let layers = new_layer_states(caches(engine, model, &plan, batch), &engine.stores.undo_log);
    let session = Session::planned(layers, plan);
    let (spans, cache_lengths) = (session.plan.spans.clone(), session.cache_lengths());
    let mut log = ReplayLog { spans, cache_lengths, layers: Vec::new() };
    if let Some(given) = &engine.log {
        given.check_fits(&log.spans, &log.cache_lengths, &model.config().num_kv_heads())?;
        log.layers.clone_from(&given.layers);
        session.give_choices(&mut log.layers);
    }
    Ok(ForwardTrace {
        log,
        tokens: BatchIds::new(batch, model.device()),
        checkpoints: LayerCheckpoints::new(engine.stores.layer_checkpoints.clone()),
        head: HeadRun::new(engine, model, batch)?,
        top: session.plan.columns.iter().map(|_| None).collect(),
        session,
    })
}

impl ForwardTrace {
    /// First position and number of the tokens of a column.
    pub(super) fn at(&self, c: usize) -> (usize, usize) {
        self.session.plan.tokens(&self.session.plan.columns[c])
    }

    /// Index and number of columns.
    fn column(&self, c: usize) -> (usize, usize) {
        (c, self.session.plan.columns.len())
    }
}

fn emit(observer: &mut dyn Observer, event: Event, model: &Model, trace: &ForwardTrace) {
    let held = Transient { travelling: &trace.top, ahead: Bytes(0), head: &trace.head.gradients };
    memory::emit(observer, event, (model, trace), &held);
}

/// One column through all layers; the inputs of layer bands are kept.
fn run_column(
    engine: &Engine,
    (model, captured): (&Model, &mut CapturedLayers),
    trace: &mut ForwardTrace,
    (c, context): (usize, Option<MicroBatchContext>),
    schedule: &Schedule,
) -> Result<Tensor, EngineError> {
    let ForwardTrace { session, tokens, checkpoints, .. } = trace;
    let keeps_undo = schedule.layers_with_undo();
    let mode = match engine.log {
        Some(_) => Mode::Follow { keeps_undo },
        None => Mode::Choose { policies: &engine.settings.policies, keeps_undo },
    };
    let column = &session.plan.columns[c];
    let hidden = tokens.embed(model, session.plan.tokens(column));
    let column = session.column(&session.plan.spans[column.clone()], 0..session.layers.len());
    let mut pass = Pass { model, captured, place: tokens.place(context) };
    pass.run(hidden, &mut ColumnAttention { column, mode }, &mut |layer, input| {
        if schedule.is_border(layer) {
            checkpoints.put(layer, c, input)?;
        }
        Ok(())
    })
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
        let traits = settings.policy(layer).traits();
        let protected =
            batch.sequences.iter().map(|sequence| sequence.initial.map_or((0, 0), |initial| traits.protects(initial)));
        LayerCache::new(LayerIdx(layer), shape, plan.prefill).protecting(protected.collect())
    };
    shapes.into_iter().enumerate().map(cache).collect()
}
