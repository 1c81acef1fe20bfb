//! What a step holds at an event, counted from the live objects to the byte of their tensors.

use tch::Tensor;

use super::gradient_sums::GradientSums;
use super::step_run::StepRun;
use super::{Engine, Event, ForwardTrace, MemoryByPart, MemoryPart, MemoryPlace};
use crate::model::Model;
use crate::native::locked;
use crate::store::Waiting;
use crate::units::Fault;

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

impl StepRun<'_> {
    /// Tells the observer where the step is, and lets it ask what is held there; `Err` where it wants no more of it.
    pub(super) fn emit(&mut self, event: Event) -> Result<(), Fault> {
        self.observer.observe(event, &|| memory_of(self.engine, self.model, &self.trace, &self.sums));
        if self.observer.wants_to_stop() { Err(Fault::interrupted()) } else { Ok(()) }
    }
}

fn memory_of(engine: &Engine, model: &Model, trace: &ForwardTrace, sums: &GradientSums) -> MemoryByPart {
    let mut memory = engine.memory_at_rest();
    // What cells have left so far.
    let leaves = model.parameters().into_iter().map(|(_, leaf)| leaf.grad());
    memory.add_gradients(&leaves.filter(Tensor::defined).collect::<Vec<_>>());
    memory.add_gradients(trace.head.gradients.iter().chain(sums.here.values()));
    let away = sums.away.values().map(Waiting::bytes).sum();
    memory.add(MemoryPart::Gradients, MemoryPlace::Host, away);
    memory.add(MemoryPart::UndoLog, MemoryPlace::Host, trace.log.bytes());
    trace.session.layers.iter().for_each(|state| locked(state).measure(&mut memory));
    memory
}
