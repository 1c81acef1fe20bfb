//! A step under way: what its two phases share, the gradients that are summed outside of leaves, and what is held at an event.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::Tensor;

use super::schedule::Schedule;
use super::trace::ForwardTrace;
use super::{Engine, Event, MemoryByPart, MemoryPart, MemoryPlace, Observer};
use crate::model::Model;
use crate::native::{locked, take_gradient};
use crate::ops::attention::accumulation_kind;
use crate::store::Waiting;
use crate::units::Fault;

/// A step over one batch, or its forward phase alone.
pub(super) struct StepRun<'a> {
    pub(super) engine: &'a Engine,
    pub(super) model: &'a Model,
    pub(super) schedule: Schedule,
    pub(super) observer: &'a mut dyn Observer,
    pub(super) trace: ForwardTrace,
    pub(super) sums: GradientSums,
}

impl<'a> StepRun<'a> {
    pub(super) fn new(engine: &'a Engine, model: &'a Model, trace: ForwardTrace, observer: &'a mut dyn Observer) -> Self {
        let plan = &trace.session.plan;
        // What learns of entries learns from the gradients of all layers.
        let is_calibrating = trace.session.layers.iter().any(|layer| locked(layer).importance.is_some());
        let first = if is_calibrating { 0 } else { model.first_trained_layer() };
        let schedule = match trace.context {
            Some(_) => Schedule::new(&engine.settings, plan, first, model.has_waiting_layers()),
            None => Schedule::of_losses(plan),
        };
        Self { engine, model, schedule, observer, trace, sums: GradientSums::default() }
    }

    pub(super) fn router_weight(&self) -> f64 {
        self.trace.context.map_or(0.0, |context| context.router_weight)
    }

    /// Whether anything follows a column's attention in the layer before `end`: layers, targets of the head, or experts, whose choices are recorded.
    pub(super) fn has_output(&self, c: usize, end: usize) -> bool {
        let (plan, config) = (&self.trace.session.plan, self.model.config());
        let (start, tokens) = plan.tokens(&plan.columns[c]);
        end < config.num_layers() || config.ends_in_experts() || !self.trace.head.targets(start, tokens).is_empty()
    }

    /// Adds the losses of a column to the head's; returns the gradient of its last hidden states, where one is wanted.
    pub(super) fn head(&mut self, column: usize, hidden_bne: &Tensor) -> Result<Option<Tensor>, Fault> {
        let (start, weight) = (self.trace.start(column), self.trace.context.map(|context| context.weight));
        self.trace.head.column(self.engine, self.model, start, hidden_bne, weight)
    }

    /// Tells the observer where the step is, and lets it ask what is held there; `Err` where it wants no more of it.
    pub(super) fn emit(&mut self, event: Event) -> Result<(), Fault> {
        self.observer.observe(event, &|| memory_of(self.engine, self.model, &self.trace, &self.sums));
        if self.observer.wants_to_stop() { Err(Fault::interrupted()) } else { Ok(()) }
    }
}

impl Engine {
    /// What is held when no batch is under way: the room of the stores.
    pub fn memory_at_rest(&self) -> MemoryByPart {
        let (stores, mut memory) = (&self.stores, MemoryByPart::default());
        memory.add_store(MemoryPart::LayerCheckpoints, &stores.layer_checkpoints);
        memory.add_store(MemoryPart::LayerCheckpoints, &stores.attention_outputs);
        memory.add_store(MemoryPart::UndoLog, &stores.undo_log);
        memory
    }
}

/// What a step holds at an event, counted from the live objects to the byte of their tensors.
fn memory_of(engine: &Engine, model: &Model, trace: &ForwardTrace, sums: &GradientSums) -> MemoryByPart {
    let mut memory = engine.memory_at_rest();
    // What cells have left so far.
    let leaves = model.parameters().into_iter().map(|(_, leaf)| leaf.grad());
    memory.add_gradients(&leaves.filter(Tensor::defined).collect::<Vec<_>>());
    memory.add_gradients(trace.head.gradients.iter().chain(sums.here.values()));
    let away = sums.away.values().map(Waiting::bytes).sum();
    memory.add(MemoryPart::Gradients, MemoryPlace::Host, away);
    trace.session.layers.iter().for_each(|state| locked(state).measure(&mut memory));
    memory
}

/// Gradients that are summed outside of their leaves: in f32 where weights are in fewer bits, and on the host where weights wait there.
#[derive(Debug, Default)]
pub(super) struct GradientSums {
    /// Sums of the band that is differentiated, or of all bands where no weights wait on the host.
    pub(super) here: BTreeMap<String, Tensor>,
    /// Sums of bands that are done and wait on the host.
    pub(super) away: BTreeMap<String, Waiting<Tensor>>,
}

impl GradientSums {
    /// A cell is done: what it has left in the leaves of its layers is added.
    pub(super) fn take(&mut self, model: &Model, layers: Range<usize>) -> Result<(), Fault> {
        for (name, leaf) in model.parameters_summed_apart(layers) {
            let Some(part) = take_gradient(&leaf)? else { continue };
            match self.here.get_mut(&name) {
                Some(sum) => drop(sum.g_add_(&part)),
                None => drop(self.here.insert(name, part.to_kind(accumulation_kind(part.kind())))),
            }
        }
        Ok(())
    }

    /// A band is done: where its weights wait on the host, its gradients follow them.
    pub(super) fn end_band(&mut self, model: &Model) {
        if model.has_waiting_layers() {
            let done = std::mem::take(&mut self.here).into_iter();
            self.away.extend(done.map(|(name, sum)| (name, Waiting::send(&sum))));
        }
    }

    /// A parameter's gradient, if it was summed here.
    pub(super) fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.here.remove(name).or_else(|| self.away.remove(name).map(|sum| sum.on_host()))
    }
}
