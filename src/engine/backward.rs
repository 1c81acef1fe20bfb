//! The backward phase: layer bands top-down, cells from right to left, the choices replayed, caches and gradients unwound.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Tensor, no_grad};

use super::ahead::Prepared;
use super::attend::{Column, ColumnAttention, Mode};
use super::cell_graph::{CellGraph, Choices};
use super::gradient_sums::GradientSums;
use super::head_run::HeadRun;
use super::layer_state::lock;
use super::held::{self, Held};
use super::router_balance::RouterTask;
use super::schedule::{BackwardStage, Schedule};
use super::session::Pass;
use super::setup::Setup;
use super::trace::ForwardTrace;
use super::weights_turn::{Way, WeightsTurn};
use super::{EngineError, Event, MicroBatchContext, MicroBatchGradients, Observer};
use crate::model::Model;
use crate::ops::attention::zero_sum_of;
use crate::store::{HostTensor, Prefetch, copies_are_async};

pub(super) fn run(
    setup: &Setup,
    model: &Model,
    mut trace: ForwardTrace,
    context: MicroBatchContext,
    observer: &mut dyn Observer,
) -> Result<MicroBatchGradients, EngineError> {
    trace.session.give_choices(&mut trace.log.layers);
    let schedule = Schedule::new(&setup.settings, &trace.session.plan).for_model(model);
    let (num_bands, num_columns) = schedule.size();
    let (turn, mut sums) = (WeightsTurn::new(&setup.settings, Way::Down), GradientSums::default());
    // The gradient that travels from band to band, by column; never quantised.
    let (mut travelling, mut head) = (std::mem::take(&mut trace.top), std::mem::take(&mut trace.head));
    // The very tensors that the head adds to.
    let head_gradients: Vec<Tensor> = head.gradients.iter().map(Tensor::shallow_clone).collect();
    let (observer, mut kept) = (RefCell::new(observer), std::mem::take(&mut trace.kept));
    let emit = |event, trace: &ForwardTrace, sums: &GradientSums| {
        let now = Held { model, trace, head: &head_gradients, sums };
        held::emit(&mut **observer.borrow_mut(), event, &now)
    };
    let mut next: Option<Prepared> = None;
    for stage in schedule.backward() {
        match stage {
            BackwardStage::Replay { band: b } => {
                emit(Event::Replay { band: (b, num_bands) }, &trace, &sums)?;
                let band = LayerBand { model, trace: &trace, layers: schedule.layers(b), context, turn: &turn };
                no_grad(|| band.replay(&|| observer.borrow().wants_to_stop()))?;
            }
            BackwardStage::Cell { band: b, column: c } => {
                let (at, column, graph) = ((b, num_bands), (c, num_columns), kept.remove(&(b, c)));
                let band = LayerBand { model, trace: &trace, layers: schedule.layers(b), context, turn: &turn };
                let begins = Event::Cell { band: at, column, is_kept: graph.is_some() };
                emit(begins, &trace, &sums)?;
                let mut prepared = match next.take() {
                    Some(prepared) => prepared,
                    None => band.prepare((c, graph.is_some()), &mut travelling)?,
                };
                if c > 0 && copies_are_async(model.device()) {
                    next = Some(band.prepare((c - 1, kept.contains_key(&(b, c - 1))), &mut travelling)?);
                }
                let graph = match graph {
                    Some(graph) => graph,
                    None => band.recompute(c, &mut prepared)?,
                };
                let above = if schedule.has_head_in_cells() { Above::Head(setup, &mut head) } else { Above::Band };
                travelling[c] = band.cell((c, graph), (prepared, above), &mut |phase| match phase {
                    CellPhase::Head => emit(Event::Head { column }, &trace, &sums),
                    CellPhase::Backward => emit(Event::CellBackward { band: at, column }, &trace, &sums),
                })?;
                sums.take(model, schedule.layers(b))?;
            }
            BackwardStage::BandDone { band } => end_band(model, &mut trace, schedule.layers(band), &mut sums),
        }
    }
    trace.log.layers = trace.session.take_choices();
    let ends = ends(model, &trace, std::mem::take(&mut head.gradients), travelling);
    model.release_layers();
    let gradients = collect(model, ends, sums);
    Ok(MicroBatchGradients { losses: head.finish()?, router_loss: trace.routers.loss(), gradients, log: trace.log })
}

/// Lets go of what a band needed, when all its cells are done.
fn end_band(model: &Model, trace: &mut ForwardTrace, layers: Range<usize>, sums: &mut GradientSums) {
    sums.end_band(model);
    trace.checkpoints.drop_border(layers.start);
    for state in &trace.session.layers[layers] {
        lock(state).reset(trace.session.plan.prefill);
    }
}

/// The gradients that no cell makes: of the head's parameters, and of the embedding or what is added to it, from the gradients that have
/// travelled through the lowest band. A tied matrix has both.
fn ends(model: &Model, trace: &ForwardTrace, head: Vec<Tensor>, travelled: Vec<Option<HostTensor>>) -> Vec<(String, Tensor)> {
    let head = model.head_parameters().into_iter().zip(head);
    let mut ends: Vec<_> = head.map(|((name, _), gradient)| (name, gradient)).collect();
    #[cfg(test)]
    if crate::sabotage::is_active(crate::sabotage::Sabotage::HeadGradientDropped) {
        ends.clear();
    }
    let embedding = model.embedding_parameters();
    if !embedding.is_empty() {
        let columns = travelled.into_iter().enumerate();
        let pieces = columns.filter_map(|(c, g)| Some((trace.ids(c), g?.prefetch(model.device()).wait())));
        ends.extend(embedding.into_iter().map(|(name, _)| name).zip(model.embed_backward(pieces)));
        #[cfg(test)]
        if crate::sabotage::is_active(crate::sabotage::Sabotage::EmbeddingGradientDropped) {
            ends.pop();
        }
    }
    ends
}

/// Where the gradient of a cell's output comes from.
enum Above<'a> {
    /// The band above: it was prepared; nothing where no later token has a target.
    Band,
    /// The head, from the output itself: the only band makes the last hidden states again.
    Head(&'a Setup, &'a mut HeadRun),
}

/// What follows within a cell whose graph is there.
enum CellPhase {
    Head,
    Backward,
}

/// A layer band: some consecutive layers.
struct LayerBand<'a> {
    model: &'a Model,
    trace: &'a ForwardTrace,
    layers: Range<usize>,
    context: MicroBatchContext,
    turn: &'a WeightsTurn,
}

impl LayerBand<'_> {
    /// The hidden states that enter the band at column `c`, where they wait.
    fn prefetch_input(&self, c: usize) -> Result<Option<Prefetch>, EngineError> {
        Ok(self.trace.checkpoints.prefetch(self.layers.start, c, self.model.device())?)
    }

    /// The same when they have come, or made from the tokens.
    fn input(&self, c: usize, waited: Option<Tensor>) -> Tensor {
        waited.unwrap_or_else(|| no_grad(|| self.model.embed(&self.trace.ids(c))))
    }

    /// Prefetches what the cell at column `c` needs from the host: where its graph was kept, the gradient of its output alone. Where nothing
    /// is gained by it undo entries, of which a cell may have many, and the input are fetched when they are used.
    fn prepare(&self, (c, is_kept): (usize, bool), travelling: &mut [Option<HostTensor>]) -> Result<Prepared, EngineError> {
        let (device, gradient) = (self.model.device(), travelling[c].take());
        if is_kept || !copies_are_async(device) {
            return Ok(Prepared::new(None, gradient.as_ref(), device));
        }
        for state in &self.trace.session.layers[self.layers.clone()] {
            let mut state = lock(state);
            for span in self.column(c).spans.iter().rev() {
                state.prefetch(span)?;
            }
        }
        Ok(Prepared::new(self.prefetch_input(c)?, gradient.as_ref(), device))
    }

    fn column(&self, c: usize) -> Column<'_> {
        let session = &self.trace.session;
        session.column(&session.plan.spans[session.plan.columns[c].clone()], self.layers.clone())
    }

    /// What carries a column through the band's layers.
    fn pass(&self) -> Pass<'_> {
        let tokens = &self.trace.tokens;
        let (frequencies, place) = (tokens.frequencies(), tokens.place(Some(self.context)));
        Pass { model: self.model, captured: None, frequencies, place, turn: self.turn.clone() }
    }

    /// Runs the band over all columns with the recorded choices, to make its undo log and its final caches.
    fn replay(&self, wants_to_stop: &dyn Fn() -> bool) -> Result<(), EngineError> {
        for state in &self.trace.session.layers[self.layers.clone()] {
            lock(state).reset(self.trace.session.plan.prefill);
        }
        let count = self.trace.session.plan.columns.len();
        let mut next = None;
        for c in 0..count {
            if wants_to_stop() {
                return Err(EngineError::GivenUp);
            }
            let prefetch = match next.take() {
                Some(prefetch) => prefetch,
                None => self.prefetch_input(c)?,
            };
            if c + 1 < count && copies_are_async(self.model.device()) {
                next = Some(self.prefetch_input(c + 1)?);
            }
            let input = self.input(c, prefetch.map(|ahead| ahead.wait().swap_remove(0)));
            let mode = Mode::Follow { keeps_undo: self.layers.clone() };
            let attend = &mut ColumnAttention { column: self.column(c), mode, routers: RouterTask::Leave };
            let _ = self.pass().run(input, attend, &mut |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// Unwinds to a cell's left border and computes it again with autograd.
    fn recompute(&self, c: usize, prepared: &mut Prepared) -> Result<CellGraph, EngineError> {
        let spans = self.column(c).spans;
        #[cfg(test)]
        crate::sabotage::run_out_of_memory(spans.len() * self.layers.len());
        // A one-chunk cell stands in the cache already and attends again.
        if spans.len() > 1 {
            for state in &self.trace.session.layers[self.layers.clone()] {
                let mut state = lock(state);
                for span in spans.iter().rev() {
                    state.unwind(span)?;
                }
                if self.column(c).takes_turns() {
                    state.cache.park();
                }
            }
        }
        let waited = match prepared.take_input() {
            Some(input) => Some(input),
            None => self.prefetch_input(c)?.map(|ahead| ahead.wait().swap_remove(0)),
        };
        let input = self.input(c, waited);
        let routers = RouterTask::recording(self.context.router_weight > 0.0, None);
        let input = (&input, self.has_input_gradient());
        CellGraph::record(&mut self.pass(), input, self.column(c), Choices::Recorded, routers)
    }

    /// One cell: runs backward from the gradient of its output, which unwinds to its left border, telling where it is. Returns the
    /// gradient of its input.
    fn cell(
        &self,
        (c, graph): (usize, CellGraph),
        (mut prepared, above): (Prepared, Above<'_>),
        emit: &mut dyn FnMut(CellPhase) -> Result<(), EngineError>,
    ) -> Result<Option<HostTensor>, EngineError> {
        let gradient = match above {
            Above::Band => prepared.take_gradient(),
            Above::Head(setup, head) => {
                emit(CellPhase::Head)?;
                head.column(setup, self.model, (self.trace.start(c), &graph.output.detach()), Some(self.context.weight))?
            }
        };
        emit(CellPhase::Backward)?;
        let below = graph.differentiate(gradient, self.trace.routers.gradient(self.context.router_weight).as_ref())?;
        self.check_left_border(self.column(c).spans[0].index)?;
        Ok(below.as_ref().map(HostTensor::send))
    }

    /// Whether anything below the band is trained.
    fn has_input_gradient(&self) -> bool {
        self.layers.start > 0 || !self.model.embedding_parameters().is_empty()
    }

    /// After a cell, each cache and its gradient must stand at the cell's left border.
    fn check_left_border(&self, expected: usize) -> Result<(), EngineError> {
        for layer in self.layers.clone() {
            let stands = lock(&self.trace.session.layers[layer]).cache.num_chunks();
            if stands != expected {
                return Err(EngineError::Misplaced { layer, stands, expected });
            }
        }
        Ok(())
    }
}

/// Takes the gradients out of the parameters, if they were not taken before, and adds those from the model's ends.
fn collect(model: &Model, ends: Vec<(String, Tensor)>, mut sums: GradientSums) -> BTreeMap<String, Tensor> {
    let mut gradients = BTreeMap::new();
    for (name, mut parameter) in model.parameters() {
        let grad = parameter.grad();
        let taken = match sums.remove(&name) {
            Some(sum) => sum,
            None if grad.defined() => grad.copy(),
            None => zero_sum_of(&parameter),
        };
        parameter.zero_grad();
        gradients.insert(name, taken.detach());
    }
    for (name, gradient) in ends {
        gradients.entry(name).and_modify(|total| drop(total.g_add_(&gradient)));
    }
    gradients
}
