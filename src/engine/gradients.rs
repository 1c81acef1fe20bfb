//! The engine: loss and gradients of one batch. The story of a step is [`Engine::gradients`].

use super::forward::HiddenSink;
use super::guard::{guarded, guarded_step};
use super::step_run::StepRun;
use super::{Calibration, Engine, ForwardTrace, MicroBatchContext, MicroBatchGradients, NoObserver, Observer, Settings, Stores};
use crate::cache::ReplayLog;
use crate::data::Batch;
use crate::head::{Head, SequenceLoss};
use crate::model::Model;
use crate::units::Fault;

impl Engine {
    pub fn new(settings: Settings, head: Head) -> Self {
        Self { stores: Stores::new(&settings), settings, head, log: None }
    }

    pub fn gradients(
        &self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, Fault> {
        let trace = self.forward(model, batch, context, observer)?;
        self.backward(model, trace, observer)
    }

    /// Losses and gradients of a batch, of whose entries `calibration` learns. After an error it knows a part of the batch.
    pub fn calibrate(
        &self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        calibration: &mut Calibration,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, Fault> {
        let trace = guarded_step(|| StepRun::begin(self, model, batch, Some(context), observer))?.trace;
        let layers = trace.session.layers.clone();
        calibration.attach(&layers, trace.session.plan.len());
        let made = guarded_step(|| StepRun::new(self, model, trace, observer).forward(None));
        let made = made.and_then(|trace| self.backward(model, trace, observer));
        calibration.detach(&layers);
        made
    }

    /// The forward phase alone, with what the backward phase needs.
    pub fn forward(
        &self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<ForwardTrace, Fault> {
        guarded_step(|| StepRun::begin(self, model, batch, Some(context), observer)?.forward(None))
    }

    /// The backward phase, which consumes the trace: its caches are unwound.
    pub fn backward(
        &self,
        model: &Model,
        trace: ForwardTrace,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, Fault> {
        guarded_step(|| StepRun::new(self, model, trace, observer).backward())
    }

    pub fn losses(&self, model: &Model, batch: &Batch, observer: &mut dyn Observer) -> Result<Vec<SequenceLoss>, Fault> {
        Ok(self.target_losses(model, batch, observer)?.0)
    }

    /// The loss of every sequence, and of each of its targets in ascending order of position.
    pub fn target_losses(
        &self,
        model: &Model,
        batch: &Batch,
        observer: &mut dyn Observer,
    ) -> Result<(Vec<SequenceLoss>, Vec<Vec<f32>>), Fault> {
        guarded(|| StepRun::begin(self, model, batch, None, observer)?.forward(None)?.head.finish())
    }

    /// Losses and choices, with every column's last hidden states handed to `sink`; with a `context`, as they are in its step.
    pub fn inspect(
        &self,
        model: &Model,
        batch: &Batch,
        context: Option<MicroBatchContext>,
        sink: HiddenSink<'_>,
    ) -> Result<(Vec<SequenceLoss>, ReplayLog), Fault> {
        guarded(|| {
            let trace = StepRun::begin(self, model, batch, context, &mut NoObserver)?.forward(Some(sink))?;
            let log = trace.log();
            Ok((trace.head.finish()?.0, log))
        })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Where what the backward phase needs waits for it, and what it takes there.
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// The engine with choices to follow instead of its policies'; it refuses every batch but the one that they were made for.
    pub fn following(self, log: ReplayLog) -> Self {
        Self { log: Some(log), ..self }
    }

    /// Choices to follow from now on, or `None` to choose.
    pub fn follow(&mut self, log: Option<ReplayLog>) {
        self.log = log;
    }

    /// Replaces the tiling. The memory of the stores before is freed.
    pub fn retile(&mut self, settings: Settings) {
        self.stores = Stores::new(&settings);
        self.settings = settings;
    }
}
