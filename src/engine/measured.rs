//! What a step holds at some point, counted from the live objects, to the byte of their tensors.

use tch::Tensor;

use super::gradient_sums::GradientSums;
use super::layer_state::lock;
use super::trace::ForwardTrace;
use super::{EngineError, Event, MemoryByPart, Observer, Stores};
use crate::model::Model;
use crate::store::{Store, Waiting, bytes_of};
use crate::units::Bytes;

/// Who holds what at some point of a step.
pub(super) struct Held<'a> {
    pub(super) model: &'a Model,
    pub(super) trace: &'a ForwardTrace,
    /// Gradients of the layers' weights that are summed apart.
    pub(super) sums: &'a GradientSums,
    /// Cells whose graphs are kept.
    pub(super) kept: usize,
}

/// Tells the observer where the step is, and lets it ask what is held there; `Err` where it wants no more of it.
pub(super) fn emit(observer: &mut dyn Observer, event: Event, held: &Held<'_>) -> Result<(), EngineError> {
    observer.observe(event);
    if observer.wants_to_stop() {
        return Err(EngineError::GivenUp);
    }
    observer.measure(event, &|| memory_of(held));
    Ok(())
}

/// What is held when no batch is under way: the room of the stores, and the gradients of what is trained.
pub(super) fn at_rest(stores: &Stores, model: &Model) -> MemoryByPart {
    let mut memory = MemoryByPart { parameter_gradients: bytes_of(&gradients_of(model)), ..MemoryByPart::default() };
    memory.layer_checkpoints = take_in(&mut memory, &stores.layer_checkpoints);
    memory.undo_log = take_in(&mut memory, &stores.undo_log);
    memory.attention_outputs = take_in(&mut memory, &stores.attention_outputs);
    memory
}

fn memory_of(&Held { model, trace, sums, kept }: &Held<'_>) -> MemoryByPart {
    let travelling = trace.top.iter().flatten();
    let mut memory = MemoryByPart {
        replay_log: trace.log.bytes(),
        travelling_gradients: travelling.clone().map(Waiting::bytes).sum(),
        ahead: travelling.map(Waiting::bytes_ahead).chain([trace.checkpoints.bytes_ahead()]).sum(),
        parameter_gradients: bytes_of(trace.head.gradients.iter().chain(&gradients_of(model)).chain(sums.here.values())),
        waiting_gradients: sums.away.values().map(Waiting::bytes).sum(),
        tokens: bytes_of([trace.tokens.all()]),
        kept_cells: kept,
        ..MemoryByPart::default()
    };
    trace.session.layers.iter().for_each(|state| lock(state).measure(&mut memory));
    let checkpoints = take_in(&mut memory, trace.checkpoints.store());
    let undo_log = trace.session.layers.first().map(|state| take_in(&mut memory, lock(state).store()));
    memory.layer_checkpoints += checkpoints;
    memory.undo_log += undo_log.unwrap_or_default();
    let outputs = trace.session.layers.first().and_then(|state| lock(state).outputs.as_ref().map(|kept| kept.store().clone()));
    let outputs = outputs.map(|store| take_in(&mut memory, &store));
    memory.attention_outputs += outputs.unwrap_or_default();
    memory
}

/// What waits in a store's memory; the rest of that memory is added.
fn take_in(memory: &mut MemoryByPart, store: &Store) -> Bytes {
    let taken = store.bytes();
    // In a file nothing waits in memory.
    let in_use = taken.in_use.min(taken.touched);
    memory.free_room += Bytes(taken.touched.0 - in_use.0);
    memory.untouched += Bytes(taken.memory.0 - taken.touched.0);
    in_use
}

/// The leaves' own, which stay from step to step.
fn gradients_of(model: &Model) -> Vec<Tensor> {
    model.parameters().into_iter().map(|(_, leaf)| leaf.grad()).filter(Tensor::defined).collect()
}
