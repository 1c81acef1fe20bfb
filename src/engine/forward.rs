//! The forward phase: column by column through all layers, without autograd but where a cell's graph is kept; choices, undo entries and
//! layer checkpoints are written down. The [`Schedule`] says whether the head belongs here, or waits for the cells of the backward phase.

use std::collections::HashMap;

use tch::{Tensor, no_grad};

use super::attend::{Column, ColumnAttention, Mode};
use super::cell_graph::{CellGraph, Choices};
use super::gradient_sums::GradientSums;
use super::head_run::HeadRun;
use super::kept_outputs::KeptOutputs;
use super::layer_checkpoints::LayerCheckpoints;
use super::layer_state::{lock, new_layer_states};
use super::held::{self, Held};
use super::router_balance::{RouterSums, RouterTask};
use super::schedule::{ForwardStage, Schedule};
use super::session::{Pass, Session};
use super::setup::Setup;
use super::trace::{BatchIds, ForwardTrace};
use super::weights_turn::{Way, WeightsTurn};
use super::{ChunkPlan, EngineError, Event, MicroBatchContext, Observer};
use crate::cache::{CacheShape, LayerCache, ReplayLog};
use crate::data::Batch;
use crate::model::Model;
use crate::ops::attention;
use crate::store::HostTensor;
use crate::units::{Bytes, LayerIdx};

/// Receives the position of a column's first token and its hidden states `(B, n, E)` before the final norm, of the sequences that are
/// under way in it.
pub type HiddenSink<'a> = &'a mut dyn FnMut(usize, &Tensor);

/// What a forward phase is run for.
pub(super) enum Purpose<'a> {
    /// A backward phase, for which all that it needs is kept.
    Gradients(MicroBatchContext),
    Losses,
    /// Losses, with every column's last hidden states handed out.
    Inspection(HiddenSink<'a>),
}

impl Purpose<'_> {
    fn context(&self) -> Option<MicroBatchContext> {
        if let Self::Gradients(context) = self { Some(*context) } else { None }
    }
}

pub(super) fn run(
    setup: &Setup,
    model: &Model,
    batch: &Batch,
    mut purpose: Purpose<'_>,
    observer: &mut dyn Observer,
) -> Result<ForwardTrace, EngineError> {
    let context = purpose.context();
    let plan = setup.settings.plan(batch, context.and_then(|c| c.chunk_sizes))?;
    measure_attention(setup, model, &plan, observer);
    let schedule = match context {
        Some(_) => Schedule::new(&setup.settings, &plan).for_model(model),
        None => Schedule::of_losses(&plan),
    };
    let mut trace = begin(setup, model, batch, plan)?;
    if setup.settings.keeps_attention_outputs() && context.is_some() {
        let store = &setup.stores.attention_outputs;
        trace.session.layers.iter().for_each(|layer| lock(layer).outputs = Some(KeptOutputs::new(store.clone())));
    }
    let mut hidden = Tensor::new();
    for stage in schedule.forward() {
        match stage {
            ForwardStage::Column(c) => {
                let column = trace.column(c);
                emit(observer, Event::ForwardColumn { column }, model, &trace)?;
                hidden = run_column(setup, model, &mut trace, (c, context), &schedule)?;
                if let Purpose::Inspection(sink) = &mut purpose {
                    sink(trace.start(c), &hidden);
                }
            }
            ForwardStage::Head(c) => {
                let column = trace.column(c);
                emit(observer, Event::Head { column }, model, &trace)?;
                let at = (trace.start(c), &hidden);
                let gradient = trace.head.column(setup, model, at, context.map(|x| x.weight))?;
                trace.top[c] = gradient.as_ref().map(HostTensor::send);
            }
        }
    }
    trace.log.layers = trace.session.take_choices();
    Ok(trace)
}

/// A trace of which nothing has been run.
fn begin(setup: &Setup, model: &Model, batch: &Batch, plan: ChunkPlan) -> Result<ForwardTrace, EngineError> {
    let layers = new_layer_states(caches(setup, model, &plan, batch), &setup.stores.undo_log);
    let session = Session::planned(layers, plan);
    let (spans, cache_lengths) = (session.plan.spans.clone(), session.cache_lengths());
    let mut log = ReplayLog { spans, cache_lengths, layers: Vec::new() };
    if let Some(given) = &setup.log {
        given.check_fits(&log.spans, &log.cache_lengths, &model.config().num_kv_heads())?;
        log.layers.clone_from(&given.layers);
        session.give_choices(&mut log.layers);
    }
    Ok(ForwardTrace {
        log,
        tokens: BatchIds::new(batch, session.plan.len(), model),
        checkpoints: LayerCheckpoints::new(setup.stores.layer_checkpoints.clone()),
        head: HeadRun::new(setup, model, batch)?,
        kept: HashMap::new(),
        routers: RouterSums::default(),
        top: session.plan.columns.iter().map(|_| None).collect(),
        session,
    })
}

fn emit(observer: &mut dyn Observer, event: Event, model: &Model, trace: &ForwardTrace) -> Result<(), EngineError> {
    let now = Held { model, trace, head: &trace.head.gradients, sums: &GradientSums::default() };
    held::emit(observer, event, &now)
}

/// One column through all layers; the inputs of layer bands are kept, or the bands' graphs.
fn run_column(
    setup: &Setup,
    model: &Model,
    trace: &mut ForwardTrace,
    (c, context): (usize, Option<MicroBatchContext>),
    schedule: &Schedule,
) -> Result<Tensor, EngineError> {
    let ForwardTrace { session, tokens, checkpoints, routers, kept, .. } = trace;
    let (keeps_undo, num_layers) = (schedule.layers_with_undo(c), session.layers.len());
    let mode = match setup.log {
        Some(_) => Mode::Follow { keeps_undo },
        None => Mode::Choose { policies: &setup.settings.policies, keeps_undo, part: None },
    };
    let mut hidden = no_grad(|| model.embed(&tokens.ids(&session.plan, c)));
    let spans = &session.plan.spans[session.plan.columns[c].clone()];
    let is_last = c + 1 == session.plan.columns.len();
    let turn = WeightsTurn::new(&setup.settings, if is_last && context.is_some() { Way::UpAndBack } else { Way::Up });
    let mut pass = Pass { model, captured: None, frequencies: tokens.frequencies(), place: tokens.place(context), turn };
    let has_router_loss = context.is_some_and(|context| context.router_weight > 0.0);
    let below = schedule.first_kept_layer(c).min(num_layers);
    let goes_on = below < num_layers;
    if below > 0 {
        let routers = if has_router_loss { RouterTask::Sum(routers) } else { RouterTask::Leave };
        let column = Column { goes_on, ..session.column(spans, 0..below) };
        hidden = no_grad(|| {
            pass.run(hidden, &mut ColumnAttention { column, mode, routers }, &mut |layer, input| {
                if schedule.is_border(layer, c) {
                    checkpoints.put(layer, c, input)?;
                }
                Ok(())
            })
        })?;
    }
    for band in schedule.kept_bands(c).rev() {
        let layers = schedule.layers(band);
        #[cfg(test)]
        crate::sabotage::run_out_of_memory((1 + kept.len()) * spans.len() * layers.len());
        let choices = if setup.log.is_some() { Choices::Recorded } else { Choices::Made(&setup.settings.policies) };
        let input = (&hidden, layers.start > 0 || !model.embedding_parameters().is_empty());
        let column = Column { goes_on, ..session.column(spans, layers) };
        let task = RouterTask::recording(has_router_loss, Some(&mut *routers));
        let graph = CellGraph::record(&mut pass, input, column, choices, task)?;
        hidden = graph.output.detach();
        kept.insert((band, c), graph);
    }
    Ok(hidden)
}

/// Lets the device find its fastest attention backend for the chunks that meet full caches, where it has not yet.
fn measure_attention(setup: &Setup, model: &Model, plan: &ChunkPlan, observer: &mut dyn Observer) {
    let tokens = plan.longest_chunk() as i64;
    let kind = model.kind();
    let caches = setup.settings.cache_shapes(model.config(), plan, (kind, model.device()));
    // Layers with a window attend in blocks.
    let layers = caches.into_iter().zip(&model.config().layers).filter(|(_, layer)| layer.attention.rule.window.is_none());
    for (cache, layer) in layers {
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
fn caches(setup: &Setup, model: &Model, plan: &ChunkPlan, batch: &Batch) -> Vec<LayerCache> {
    let settings = &setup.settings;
    let shapes = settings.cache_shapes(model.config(), plan, (model.kind(), model.device()));
    let cache = |(layer, shape): (usize, CacheShape)| {
        let traits = settings.policy(layer).traits();
        let protected =
            batch.sequences.iter().map(|sequence| sequence.initial.map_or((0, 0), |initial| traits.protects(initial)));
        LayerCache::new(LayerIdx(layer), shape, plan.prefill).protecting(protected.collect())
    };
    shapes.into_iter().enumerate().map(cache).collect()
}
