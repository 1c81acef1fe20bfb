//! Loss and gradients of one batch: forward phase, backward phase. The story of a step is [`Engine::gradients`].

mod ahead;
mod attend;
mod backward;
mod chunk_sizes;
mod chunks;
mod error;
mod events;
mod forward;
mod guard;
mod head_run;
mod layer_checkpoints;
mod layer_state;
mod memory;
mod schedule;
mod session;
mod settings;
mod slots;
mod step;
mod stores;

pub use chunk_sizes::{ChunkKey, RandomSizes};
pub use chunks::{ChunkPlan, ColumnWidth, Cuts};
pub use error::EngineError;
pub use events::{Event, Observer, Silent};
pub use forward::{ForwardTrace, HiddenSink};
pub use guard::{error_of_panic, guarded};
pub use memory::{MemoryByPart, MemoryEntry, MemoryPlace};
pub use schedule::{BackwardStage, ForwardStage, Schedule};
pub use session::Session;
pub use settings::Settings;
pub use step::{MicroBatchContext, MicroBatchGradients};
pub use stores::Stores;

use forward::Purpose;

use crate::cache::ReplayLog;
use crate::data::Batch;
use crate::head::{Head, SequenceLoss};
use crate::model::Model;

type LossesAndLog = (Vec<SequenceLoss>, ReplayLog);

/// Runs batches through one model's shape, cache and head.
pub struct Engine {
    settings: Settings,
    head: Box<dyn Head>,
    stores: Stores,
    /// What the forward phase follows instead of choosing.
    log: Option<ReplayLog>,
}

impl Engine {
    /// An engine for `settings` and `head`.
    pub fn new(settings: Settings, head: Box<dyn Head>) -> Self {
        Self { stores: Stores::new(&settings), settings, head, log: None }
    }

    /// Loss and gradients of a batch: forward phase, then backward phase.
    pub fn gradients(
        &self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, EngineError> {
        let trace = self.forward(model, batch, context, observer)?;
        self.backward(model, trace, context, observer)
    }

    /// The forward phase alone, with what the backward phase needs.
    pub fn forward(
        &self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<ForwardTrace, EngineError> {
        guarded(|| forward::run(self, model, batch, Purpose::Gradients(context), observer))
    }

    /// The backward phase, which consumes the trace: its caches are unwound.
    pub fn backward(
        &self,
        model: &Model,
        trace: ForwardTrace,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, EngineError> {
        guarded(|| backward::run(self, model, trace, context, observer))
    }

    /// Losses alone, by sequence.
    pub fn losses(&self, model: &Model, batch: &Batch, observer: &mut dyn Observer) -> Result<Vec<SequenceLoss>, EngineError> {
        guarded(|| forward::run(self, model, batch, Purpose::Losses, observer)?.head.finish())
    }

    /// Losses and choices, with every column's last hidden states handed to `sink`.
    pub fn inspect(&self, model: &Model, batch: &Batch, sink: HiddenSink<'_>) -> Result<LossesAndLog, EngineError> {
        guarded(|| {
            let trace = forward::run(self, model, batch, Purpose::Inspection(sink), &mut Silent)?;
            Ok((trace.head.finish()?, trace.log))
        })
    }
}
