//! What a step holds at an event, counted from the live objects to the byte of their tensors.

use tch::Tensor;

use super::gradient_sums::GradientSums;
use super::layer_state::lock;
use super::trace::ForwardTrace;
use super::{EngineError, Event, MemoryByPart, MemoryPart, MemoryPlace, Observer, Stores};
use crate::model::Model;
use crate::store::HostTensor;

/// What a phase holds at an event.
pub(super) struct Held<'a> {
    pub(super) model: &'a Model,
    pub(super) trace: &'a ForwardTrace,
    /// Gradients of the head's parameters.
    pub(super) head: &'a [Tensor],
    /// Gradients of the layers' weights that are summed apart.
    pub(super) sums: &'a GradientSums,
}

/// Tells the observer where the step is, and lets it ask what is held there; `Err` where it wants no more of it.
pub(super) fn emit(observer: &mut dyn Observer, event: Event, held: &Held<'_>) -> Result<(), EngineError> {
    observer.observe(event);
    if observer.wants_to_stop() {
        return Err(EngineError::GivenUp);
    }
    observer.measure(event, &|| held.memory());
    Ok(())
}

/// What is held when no batch is under way: the room of the stores, and the gradients of what is trained.
pub(super) fn at_rest(stores: &Stores, model: &Model) -> MemoryByPart {
    let mut memory = MemoryByPart::default();
    memory.add_gradients(&leaf_gradients(model));
    memory.add_store(MemoryPart::LayerCheckpoints, &stores.layer_checkpoints);
    memory.add_store(MemoryPart::LayerCheckpoints, &stores.attention_outputs);
    memory.add_store(MemoryPart::UndoLog, &stores.undo_log);
    memory
}

impl Held<'_> {
    fn memory(&self) -> MemoryByPart {
        let mut memory = MemoryByPart::default();
        memory.add_gradients(self.head.iter().chain(&leaf_gradients(self.model)).chain(self.sums.here.values()));
        let away = self.sums.away.values().map(HostTensor::bytes).sum();
        memory.add(MemoryPart::Gradients, MemoryPlace::Host, away);
        memory.add(MemoryPart::UndoLog, MemoryPlace::Host, self.trace.log.bytes());
        memory.add_store(MemoryPart::LayerCheckpoints, self.trace.checkpoints.store());
        let layers = &self.trace.session.layers;
        layers.iter().for_each(|state| lock(state).measure(&mut memory));
        if let Some(state) = layers.first().map(lock) {
            // All layers share their stores.
            memory.add_store(MemoryPart::UndoLog, state.store());
            state.outputs.iter().for_each(|kept| memory.add_store(MemoryPart::LayerCheckpoints, kept.store()));
        }
        memory
    }
}

/// The leaves' own, which stay from step to step.
fn leaf_gradients(model: &Model) -> Vec<Tensor> {
    model.parameters().into_iter().map(|(_, leaf)| leaf.grad()).filter(Tensor::defined).collect()
}
