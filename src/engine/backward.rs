//! The backward phase: layer bands top-down, cells from right to left, the choices replayed, caches and gradients unwound.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Tensor, no_grad, with_grad};

use super::ahead::Prepared;
use super::attend::{Column, Differentiating, Replaying, chain_leaf};
use super::forward::{ForwardTrace, captured, hand_back_log};
use super::head_run::HeadRun;
use super::layer_state::{link, lock};
use super::memory::{self, Transient};
use super::{Engine, EngineError, Event, MicroBatchContext, MicroBatchGradients, Observer};
use crate::cache::LayerLog;
use crate::model::{Attend, CapturedLayers, Model};
use crate::native::run_backward;
use crate::store::{HostTensor, Prefetch, copies_are_async};
use crate::units::LayerIdx;

/// Runs the backward phase.
pub(super) fn run(
    engine: &Engine,
    model: &Model,
    mut trace: ForwardTrace,
    context: MicroBatchContext,
    observer: &mut dyn Observer,
) -> Result<MicroBatchGradients, EngineError> {
    hand_back_log(&mut trace);
    let bands = engine.settings.layer_bands();
    // The gradient that travels from band to band, by column; never quantised.
    let (top, mut head) = (trace.top.take(), std::mem::take(&mut trace.head));
    let head_waits = top.is_none();
    let mut travelling = top.unwrap_or_else(|| trace.plan.columns.iter().map(|_| None).collect());
    // The very tensors that the head adds to.
    let head_gradients: Vec<Tensor> = head.gradients.iter().map(Tensor::shallow_clone).collect();
    let mut emit = |event, trace: &ForwardTrace, travelling: &[Option<HostTensor>], ahead: Option<&Prepared>| {
        let ahead = ahead.map(Prepared::bytes).unwrap_or_default();
        memory::emit(observer, event, (model, trace), &Transient { travelling, ahead, head: &head_gradients });
    };
    for (depth, layers) in bands.iter().rev().enumerate() {
        let band = LayerBand { model, trace: &trace, layers: layers.clone(), context };
        if depth > 0 {
            emit(Event::Replay { band: (depth, bands.len()) }, &trace, &travelling, None);
            let captured = captured(engine, model, &trace.plan)?;
            no_grad(|| band.replay(captured))?;
        }
        let mut next: Option<Prepared> = None;
        for c in (0..trace.plan.columns.len()).rev() {
            let (band_of, column) = ((depth, bands.len()), (c, trace.plan.columns.len()));
            emit(Event::Cell { band: band_of, column }, &trace, &travelling, next.as_ref());
            let prepared = match next.take() {
                Some(prepared) => prepared,
                None => band.prepare(c, &mut travelling)?,
            };
            if c > 0 && copies_are_async(model.device()) {
                next = Some(band.prepare(c - 1, &mut travelling)?);
            }
            let above = if head_waits { Above::Head(engine, &mut head) } else { Above::LayerBand };
            travelling[c] = band.cell(c, (prepared, above), &mut |turn| match turn {
                CellPhase::Head => emit(Event::Head { column }, &trace, &travelling, next.as_ref()),
                CellPhase::Backward => emit(Event::CellBackward { band: band_of, column }, &trace, &travelling, next.as_ref()),
            })?;
        }
        trace.checkpoints.drop_border(layers.start);
        for run in &trace.runs[layers.clone()] {
            lock(run).reset(trace.plan.prefill);
        }
    }
    let layers = trace.runs.iter().map(|r| std::mem::take::<LayerLog>(&mut lock(r).log)).collect();
    trace.log.layers = layers;
    let ends = ends(model, &trace, std::mem::take(&mut head.gradients), travelling);
    let gradients = collect(model, ends);
    Ok(MicroBatchGradients { losses: head.finish()?, gradients, log: trace.log })
}

/// The gradients that no cell makes, where all weights are trained: of the head's parameters, and of the embedding, from the
/// gradients that have travelled through the lowest band. A tied matrix has both.
fn ends(model: &Model, trace: &ForwardTrace, head: Vec<Tensor>, travelled: Vec<Option<HostTensor>>) -> Vec<(String, Tensor)> {
    let head = model.head_parameters().into_iter().zip(head);
    let mut ends: Vec<_> = head.map(|((name, _), gradient)| (name, gradient)).collect();
    #[cfg(test)]
    if crate::sabotage::is_active(crate::sabotage::Sabotage::HeadGradientDropped) {
        ends.clear();
    }
    if let Some((name, _)) = model.embedding_parameter() {
        let columns = trace.plan.columns.iter().zip(travelled);
        let pieces =
            columns.filter_map(|(c, g)| Some((trace.tokens.ids(trace.plan.tokens(c)), g?.prefetch(model.device()).wait())));
        ends.push((name, model.embed_backward(pieces)));
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
    LayerBand,
    /// The head, from the output itself: the only band makes the last hidden states again.
    Head(&'a Engine, &'a mut HeadRun),
}

/// Whose turn it is within a cell that has been computed again.
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
}

impl LayerBand<'_> {
    /// The hidden states that enter the band at column `c`, where they wait.
    fn prefetch_input(&self, c: usize) -> Result<Option<Prefetch>, EngineError> {
        Ok(self.trace.checkpoints.prefetch(self.layers.start, c, self.model.device())?)
    }

    /// The same when they have come, or made from the tokens.
    fn input(&self, c: usize, waited: Option<Tensor>) -> Tensor {
        let at = self.trace.plan.tokens(&self.trace.plan.columns[c]);
        waited.unwrap_or_else(|| no_grad(|| self.trace.tokens.embed(self.model, at)))
    }

    /// Sets out what the cell at column `c` needs from the host. Where nothing is gained by it undo entries, of which a cell may have
    /// many, and the input are fetched when they are used.
    fn prepare(&self, c: usize, travelling: &mut [Option<HostTensor>]) -> Result<Prepared, EngineError> {
        let (device, gradient) = (self.model.device(), travelling[c].take());
        if !copies_are_async(device) {
            return Ok(Prepared::new(None, gradient.as_ref(), device));
        }
        for run in &self.trace.runs[self.layers.clone()] {
            let mut run = lock(run);
            for span in self.column(c).spans.iter().rev() {
                run.prefetch(span)?;
            }
        }
        Ok(Prepared::new(self.prefetch_input(c)?, gradient.as_ref(), device))
    }

    fn column(&self, c: usize) -> Column<'_> {
        Column {
            spans: &self.trace.plan.spans[self.trace.plan.columns[c].clone()],
            runs: &self.trace.runs,
            layers: (self.layers.start, self.layers.end),
        }
    }

    /// All layers of the band over a column; some of it may be captured.
    fn layers(
        &self,
        c: usize,
        mut hidden: Tensor,
        attend: &mut dyn Attend,
        captured: &mut CapturedLayers,
    ) -> Result<Tensor, EngineError> {
        let at = self.trace.plan.tokens(&self.trace.plan.columns[c]);
        let (positions, place) = (self.trace.tokens.positions(self.model, at), self.trace.tokens.place(Some(self.context)));
        let mut layers = captured.column((self.model, &place), &positions, (self.trace.plan.num_sequences(), at.1));
        for layer in self.layers.clone() {
            hidden = layers.layer(LayerIdx(layer), &hidden, attend)?;
        }
        Ok(hidden)
    }

    /// Runs the band over all columns with the recorded choices, to make its undo log and its final caches.
    fn replay(&self, mut captured: CapturedLayers) -> Result<(), EngineError> {
        for run in &self.trace.runs[self.layers.clone()] {
            lock(run).reset(self.trace.plan.prefill);
        }
        let count = self.trace.plan.columns.len();
        let mut next = None;
        for c in 0..count {
            let prefetch = match next.take() {
                Some(prefetch) => prefetch,
                None => self.prefetch_input(c)?,
            };
            if c + 1 < count && copies_are_async(self.model.device()) {
                next = Some(self.prefetch_input(c + 1)?);
            }
            let input = self.input(c, prefetch.map(|ahead| ahead.wait().swap_remove(0)));
            let attend = &mut Replaying { column: self.column(c), keep_undo_from: 0 };
            let _ = self.layers(c, input, attend, &mut captured)?;
        }
        Ok(())
    }

    /// One cell: unwinds to its left border, recomputes it with autograd and runs backward from the gradient of its output, telling
    /// where it is. Returns the gradient of its input.
    fn cell(
        &self,
        c: usize,
        (mut prepared, above): (Prepared, Above<'_>),
        emit: &mut dyn FnMut(CellPhase),
    ) -> Result<Option<HostTensor>, EngineError> {
        let spans = self.column(c).spans;
        #[cfg(test)]
        crate::sabotage::run_out_of_memory(spans.len() * self.layers.len());
        // A one-chunk cell stands in the cache already and attends again.
        if spans.len() > 1 {
            for run in &self.trace.runs[self.layers.clone()] {
                let mut run = lock(run);
                for span in spans.iter().rev() {
                    run.unwind(span)?;
                }
                if self.column(c).takes_turns() {
                    run.cache.park();
                }
            }
        }
        let has_input_gradient = self.layers.start > 0 || self.model.embedding_parameter().is_some();
        let waited = match prepared.take_input() {
            Some(input) => Some(input),
            None => self.prefetch_input(c)?.map(|ahead| ahead.wait().swap_remove(0)),
        };
        let input = self.input(c, waited).detach().set_requires_grad(has_input_gradient);
        let chain = chain_leaf(input.kind(), input.device());
        let mut attend = Differentiating::new(self.column(c), &chain);
        let output = with_grad(|| self.layers(c, input.shallow_clone(), &mut attend, &mut CapturedLayers::default()))?;
        let gradient = match above {
            Above::LayerBand => prepared.take_gradient(),
            Above::Head(engine, head) => {
                emit(CellPhase::Head);
                let (start, _) = self.trace.plan.tokens(&self.trace.plan.columns[c]);
                head.column(engine, self.model, (start, &output.detach()), Some(self.context.weight))?
            }
        };
        let gradient = gradient.unwrap_or_else(|| output.zeros_like());
        let end = link(&chain);
        let (mut roots, mut seeds): (Vec<&Tensor>, Vec<&Tensor>) = attend.chain_ends.iter().map(|t| (t, &end)).unzip();
        // Without any trained parameter below, and no gradient wanted, the output has no history.
        if output.requires_grad() {
            roots.push(&output);
            seeds.push(&gradient);
        }
        emit(CellPhase::Backward);
        run_backward(&roots, &seeds)?;
        self.check_left_border(spans[0].index)?;
        let below = input.grad();
        Ok((has_input_gradient && below.defined()).then(|| HostTensor::send(&below)))
    }

    /// After a cell, each cache and its gradient must stand at the cell's left border.
    fn check_left_border(&self, expected: usize) -> Result<(), EngineError> {
        for layer in self.layers.clone() {
            let stands = lock(&self.trace.runs[layer]).cache.num_chunks();
            if stands != expected {
                return Err(EngineError::Misplaced { layer, stands, expected });
            }
        }
        Ok(())
    }
}

/// Takes the gradients out of the parameters, and adds those from the model's ends.
fn collect(model: &Model, ends: Vec<(String, Tensor)>) -> BTreeMap<String, Tensor> {
    let mut gradients = BTreeMap::new();
    for (name, mut parameter) in model.parameters() {
        let grad = parameter.grad();
        let taken = if grad.defined() { grad.copy() } else { parameter.zeros_like() };
        parameter.zero_grad();
        gradients.insert(name, taken.detach());
    }
    for (name, gradient) in ends {
        gradients.entry(name).and_modify(|total| drop(total.g_add_(&gradient)));
    }
    gradients
}
