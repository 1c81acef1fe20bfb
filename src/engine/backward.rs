//! The backward phase: layer bands top-down, cells from right to left, the choices replayed, caches and gradients unwound.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Tensor, no_grad};

use super::attend::{Column, ColumnAttention, Mode};
use super::cell_graph::CellGraph;
use super::router_balance::RouterTask;
use super::session::{Pass, PassOrder};
use super::step_run::{GradientSums, StepRun};
use super::{Event, ForwardTrace, MicroBatchGradients};
use crate::model::{DropoutContext, Model};
use crate::native::{locked, or_panic, take_gradient};
use crate::ops::attention::zero_sum_of;
use crate::store::{Waiting, copies_are_async};
use crate::units::Fault;

impl StepRun<'_> {
    pub(super) fn backward(mut self) -> Result<MicroBatchGradients, Fault> {
        let (num_bands, num_columns) = self.schedule.size();
        for band in 0..num_bands {
            let layers = self.schedule.layers(band);
            if self.schedule.is_replayed(band) {
                self.emit(Event::Replay { band, num_bands })?;
                no_grad(|| self.replay(&layers))?;
            }
            (0..num_columns).rev().try_for_each(|c| self.cell(band, c))?;
            self.end_band(layers);
        }
        self.finish()
    }

    /// Runs a band over all columns with the recorded choices, to make its undo log and its final caches.
    fn replay(&mut self, layers: &Range<usize>) -> Result<(), Fault> {
        self.reset(layers);
        let (count, device) = (self.trace.session.plan.columns.len(), self.model.device());
        for c in 0..count {
            if self.observer.wants_to_stop() {
                return Err(Fault::interrupted());
            }
            if copies_are_async(device) {
                for ahead in c..count.min(c + 2) {
                    self.prefetch_checkpoint(layers.start, ahead)?;
                }
            }
            let input = self.input(c, layers.start)?;
            // Undo log and final caches are wanted, and nothing behind the uppermost layer's keys and values.
            let column = Column { has_output: false, ..self.column(c, layers) };
            let attend = &mut ColumnAttention { column, mode: Mode::Follow, keeps_undo: layers.clone(), routers: None };
            let _ = self.pass().run(input, attend, &mut |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// One cell: computes its graph again, unless it was kept, and runs backward from the gradient of its output, which unwinds to the
    /// cell's left border. The gradient of its input takes the place of the one that it began with.
    fn cell(&mut self, band: usize, c: usize) -> Result<(), Fault> {
        let layers = &self.schedule.layers(band);
        let (num_bands, num_columns) = self.schedule.size();
        let is_kept = self.trace.kept.contains_key(&(band, c));
        self.emit(Event::Cell { band, num_bands, column: c, num_columns, is_kept })?;
        if copies_are_async(self.model.device()) {
            for column in (c.saturating_sub(1)..=c).rev() {
                self.prefetch(band, column)?;
            }
        }
        let graph = match self.trace.kept.remove(&(band, c)) {
            Some(graph) => graph,
            None => self.recompute(c, layers)?,
        };
        let gradient = if self.schedule.has_head_in_cells() {
            // The only band makes the last hidden states again.
            self.emit(Event::Head { column: c, num_columns })?;
            self.head(c, &graph.output.detach())?
        } else {
            self.trace.top[c].take().map(|mut gradient| gradient.wait(self.model.device())).transpose()?
        };
        self.emit(Event::CellBackward { band, num_bands, column: c, num_columns })?;
        let below = graph.differentiate(gradient.as_ref(), self.trace.routers.gradient(self.router_weight()).as_ref())?;
        self.check_left_border(c, layers)?;
        self.trace.top[c] = below.as_ref().map(Waiting::send);
        self.sums.take(self.model, layers.clone())?;
        Ok(())
    }

    /// Sets out what a cell needs from the host, unless it is under way: where its graph was kept, the gradient of its output alone.
    fn prefetch(&mut self, band: usize, c: usize) -> Result<(), Fault> {
        let (device, layers) = (self.model.device(), self.schedule.layers(band));
        if let Some(gradient) = &mut self.trace.top[c] {
            gradient.leave(device)?;
        }
        if self.trace.kept.contains_key(&(band, c)) {
            return Ok(());
        }
        for state in &self.trace.session.layers[layers.clone()] {
            let mut state = locked(state);
            for span in self.column(c, &layers).spans.iter().rev() {
                state.prefetch(span)?;
            }
        }
        self.prefetch_checkpoint(layers.start, c)
    }

    /// Begins to copy the hidden states that enter a band to the device, where they wait.
    fn prefetch_checkpoint(&mut self, first_layer: usize, c: usize) -> Result<(), Fault> {
        let device = self.model.device();
        self.trace.checkpoints.get_mut(&(first_layer, c)).map_or(Ok(()), |waiting| waiting.prefetch(device))
    }

    /// Unwinds to a cell's left border and computes it again with autograd.
    fn recompute(&mut self, c: usize, layers: &Range<usize>) -> Result<CellGraph, Fault> {
        let column = self.column(c, layers);
        #[cfg(test)]
        crate::units::sabotage::run_out_of_memory(column.spans.len() * layers.len());
        // A one-chunk cell stands in the cache already and attends again.
        if column.spans.len() > 1 {
            for state in &column.states[layers.clone()] {
                let mut state = locked(state);
                for span in column.spans.iter().rev() {
                    state.unwind(span)?;
                }
                if column.has_waiting_layers() {
                    state.cache.offload();
                }
            }
        }
        let input = self.input(c, layers.start)?;
        let routers = (self.router_weight() > 0.0).then(RouterTask::default);
        CellGraph::record(&mut self.pass(), &input, self.column(c, layers), None, routers, self.schedule.first_layer())
    }

    /// The hidden states that enter a band at column `c`: those that wait, or made from the tokens.
    fn input(&mut self, c: usize, first_layer: usize) -> Result<Tensor, Fault> {
        let device = self.model.device();
        let waited = self.trace.checkpoints.get_mut(&(first_layer, c)).map(|waiting| waiting.wait(device)).transpose()?;
        Ok(waited.unwrap_or_else(|| no_grad(|| self.model.embed(&self.trace.ids(c, device)))))
    }

    fn column(&self, c: usize, layers: &Range<usize>) -> Column<'_> {
        let session = &self.trace.session;
        let column = session.column(&session.plan.spans[session.plan.columns[c].clone()], layers.clone());
        Column { has_output: self.has_output(c, layers.end), ..column }
    }

    /// What carries a column through a band's layers.
    fn pass(&self) -> Pass<'_> {
        let ForwardTrace { context, session, samples, .. } = &self.trace;
        let dropout = DropoutContext { dropout: context.and_then(|c| c.dropout), samples };
        let (frequencies, settings) = (&session.frequencies[..], &self.engine.settings);
        Pass { model: self.model, captured: None, frequencies, dropout, settings, order: PassOrder::Down }
    }

    /// After a cell, each cache and its gradient must stand at the cell's left border.
    fn check_left_border(&self, c: usize, layers: &Range<usize>) -> Result<(), Fault> {
        let expected = self.column(c, layers).spans[0].index;
        for layer in layers.clone() {
            let stands = locked(&self.trace.session.layers[layer]).cache.num_chunks();
            if stands != expected {
                let text = format!("layer {layer}: after its cell the cache stands after {stands} chunks, expected {expected}");
                return Err(Fault::defect(text));
            }
        }
        Ok(())
    }

    fn reset(&self, layers: &Range<usize>) {
        let session = &self.trace.session;
        session.layers[layers.clone()].iter().for_each(|state| locked(state).reset(session.plan.prefill));
    }

    /// Lets go of what a band needed, when all its cells are done.
    fn end_band(&mut self, layers: Range<usize>) {
        self.sums.end_band(self.model);
        // Their room is the next step's.
        self.trace.checkpoints.retain(|(border, _), _| *border != layers.start);
        self.reset(&layers);
    }

    /// Losses and gradients, when all cells are done.
    fn finish(mut self) -> Result<MicroBatchGradients, Fault> {
        let outer = self.outer_gradients();
        self.model.release_layers();
        let gradients = collect(self.model, outer, self.sums)?;
        let (log, trace) = (self.trace.log(), self.trace);
        Ok(MicroBatchGradients { losses: trace.head.finish()?.0, router_loss: trace.routers.loss(), gradients, log })
    }

    /// The gradients that no cell makes: of the head's parameters, and of the embedding or what is added to it, from the gradients that
    /// have travelled through the lowest band. A tied matrix has both.
    fn outer_gradients(&mut self) -> Vec<(String, Tensor)> {
        let head = self.model.head_parameters().into_iter().zip(std::mem::take(&mut self.trace.head.gradients));
        let mut outer: Vec<_> = head.map(|((name, _), gradient)| (name, gradient)).collect();
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::HeadGradientDropped) {
            outer.clear();
        }
        let embedding = self.model.embedding_parameters();
        if !embedding.is_empty() {
            let columns = std::mem::take(&mut self.trace.top).into_iter().enumerate();
            let device = self.model.device();
            let pieces = columns.filter_map(|(c, g)| Some((self.trace.ids(c, device), or_panic(g?.wait(device)))));
            outer.extend(embedding.into_iter().map(|(name, _)| name).zip(self.model.embed_backward(pieces)));
            #[cfg(test)]
            if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::EmbeddingGradientDropped) {
                outer.pop();
            }
        }
        outer
    }
}

/// Takes the gradients out of the parameters and sums, and adds those that no cell makes; zero for what nothing has reached.
fn collect(model: &Model, outer: Vec<(String, Tensor)>, mut sums: GradientSums) -> Result<BTreeMap<String, Tensor>, Fault> {
    let (mut gradients, parameters) = (BTreeMap::new(), model.parameters());
    for (name, parameter) in &parameters {
        let taken = sums.remove(name).map_or_else(|| take_gradient(parameter), |sum| Ok(Some(sum)))?;
        gradients.extend(taken.map(|taken| (name.clone(), taken.detach())));
    }
    for (name, gradient) in outer {
        match gradients.get_mut(&name) {
            Some(total) => drop(total.g_add_(&gradient)),
            None => drop(gradients.insert(name, gradient)),
        }
    }
    for (name, parameter) in parameters {
        gradients.entry(name).or_insert_with(|| zero_sum_of(&parameter));
    }
    Ok(gradients)
}
