//! What a step holds at an event, counted from the live objects to the byte of their tensors.

use tch::Tensor;

use super::gradient_sums::GradientSums;
use super::step_run::StepRun;
use super::{Event, ForwardTrace, MemoryByPart, MemoryPart, MemoryPlace, Stores};
use crate::model::Model;
use crate::native::locked;
use crate::store::Waiting;
use crate::units::Fault;

/// What is held when no batch is under way: the room of the stores, and the gradients of what is trained.
pub(super) fn at_rest(stores: &Stores, model: &Model) -> MemoryByPart {
    let mut memory = MemoryByPart::default();
    memory.add_gradients(&leaf_gradients(model));
    memory.add_store(MemoryPart::LayerCheckpoints, &stores.layer_checkpoints);
    memory.add_store(MemoryPart::LayerCheckpoints, &stores.attention_outputs);
    memory.add_store(MemoryPart::UndoLog, &stores.undo_log);
    memory
}

impl StepRun<'_> {
    /// Tells the observer where the step is, and lets it ask what is held there; `Err` where it wants no more of it.
    pub(super) fn emit(&mut self, event: Event) -> Result<(), Fault> {
        self.observer.observe(event);
        if self.observer.wants_to_stop() {
            return Err(Fault::interrupted());
        }
        let memory = || memory_of(self.model, &self.trace, &self.sums);
        self.observer.measure(event, &memory);
        Ok(())
    }
}

fn memory_of(model: &Model, trace: &ForwardTrace, sums: &GradientSums) -> MemoryByPart {
    let mut memory = MemoryByPart::default();
    memory.add_gradients(trace.head.gradients.iter().chain(&leaf_gradients(model)).chain(sums.here.values()));
    let away = sums.away.values().map(Waiting::bytes).sum();
    memory.add(MemoryPart::Gradients, MemoryPlace::Host, away);
    memory.add(MemoryPart::UndoLog, MemoryPlace::Host, trace.log.bytes());
    memory.add_store(MemoryPart::LayerCheckpoints, trace.checkpoints.store());
    let layers = &trace.session.layers;
    for state in layers {
        locked(state).measure(&mut memory);
    }
    if let Some(state) = layers.first().map(|layer| locked(layer)) {
        // All layers share their stores.
        memory.add_store(MemoryPart::UndoLog, state.store());
        if let Some(kept) = &state.outputs {
            memory.add_store(MemoryPart::LayerCheckpoints, kept.store());
        }
    }
    memory
}

/// The leaves' own, which stay from step to step.
fn leaf_gradients(model: &Model) -> Vec<Tensor> {
    model.parameters().into_iter().map(|(_, leaf)| leaf.grad()).filter(Tensor::defined).collect()
}
