//! The forward phase: column by column through all layers, without autograd but where a cell's graph is kept; choices, undo entries and
//! layer checkpoints are written down. The [`Schedule`](super::Schedule) says whether the head belongs here, or waits for the cells of the backward phase.

use std::collections::HashMap;

use tch::{Tensor, no_grad};

use super::attend::{Column, ColumnAttention, Mode};
use super::cell_graph::CellGraph;
use super::head_run::HeadRun;
use super::kept_outputs::KeptOutputs;
use super::router_balance::{RouterSums, RouterTask};
use super::session::{Pass, PassOrder, Session, SessionSpec};
use super::step_run::StepRun;
use super::{Engine, Event, ForwardTrace, MicroBatchContext, Observer};
use crate::data::Batch;
use crate::model::{DropoutContext, Model};
use crate::native::locked;
use crate::ops::attention;
use crate::store::Waiting;
use crate::units::Fault;

/// Receives a column's first position and its hidden states `(B, n, E)` before the final norm, of the sequences under way in it.
pub type HiddenSink<'a> = &'a mut dyn FnMut(usize, &Tensor);

impl<'a> StepRun<'a> {
    /// A step over a batch, of which nothing has been run.
    pub(super) fn begin(
        engine: &'a Engine,
        model: &'a Model,
        batch: &Batch,
        context: Option<MicroBatchContext>,
        observer: &'a mut dyn Observer,
    ) -> Result<Self, Fault> {
        let settings = &engine.settings;
        let plan = settings.plan(batch, context.and_then(|c| c.chunk_sizes))?;
        // The kernels that attend on the device are tried, where they have not been.
        for layer in &model.config().layers {
            for why in attention::try_kernels(model.device(), model.kind(), layer.attention.head_dim as i64) {
                observer.note(&why);
            }
        }
        let size = [batch.sequences.len(), plan.len()].map(|n| n as i64);
        let ids_bt = Tensor::from_slice(&batch.padded_inputs(plan.len())).view(size);
        // A rotation that depends on the length of its sequence does so without pads.
        let lengths: Vec<usize> = batch.sequences.iter().map(|sequence| sequence.inputs.len()).collect();
        #[cfg(test)]
        let lengths = if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::LengthOfTheBatch) {
            vec![plan.len(); lengths.len()]
        } else {
            lengths
        };
        let shapes = settings.cache_shapes(model.config(), &plan, model.kind(), model.device());
        let initial = batch.sequences.iter().map(|sequence| sequence.initial.unwrap_or((0, 0))).collect();
        let spec = SessionSpec { initial, ..SessionSpec::new(plan.num_sequences(), plan.len()) };
        let session = Session::empty(engine, model, plan, shapes, spec, model.frequencies(&lengths))?;
        if let Some(given) = &engine.log {
            given.check_fits(&session.plan.spans, &session.cache_lengths(), &model.config().num_kv_heads())?;
            session.layers.iter().zip(&given.layers).for_each(|(layer, log)| locked(layer).log = log.clone());
        }
        let trace = ForwardTrace {
            context,
            ids_bt,
            samples: batch.sequences.iter().map(|sequence| sequence.sample).collect(),
            checkpoints: HashMap::new(),
            head: HeadRun::new(engine, model, batch, context)?,
            kept: HashMap::new(),
            routers: RouterSums::default(),
            top: session.plan.columns.iter().map(|_| None).collect(),
            session,
        };
        Ok(Self::new(engine, model, trace, observer))
    }

    /// The forward phase; `sink`, where there is one, is handed every column's last hidden states.
    pub(super) fn forward(mut self, mut sink: Option<HiddenSink<'_>>) -> Result<ForwardTrace, Fault> {
        if self.engine.settings.keeps_attention_outputs() {
            let store = &self.engine.stores.attention_outputs;
            let layers = self.trace.session.layers.iter().skip(self.schedule.first_layer());
            layers.for_each(|layer| locked(layer).outputs = Some(KeptOutputs::new(store.clone())));
        }
        let (num_bands, num_columns) = self.schedule.size();
        for c in 0..num_columns {
            self.emit(Event::ForwardColumn { column: c, num_columns })?;
            let hidden = self.run_column(c, sink.is_some())?;
            if let Some(sink) = &mut sink {
                sink(self.trace.start(c), &hidden);
            }
            if !self.schedule.has_head_in_cells() {
                self.emit(Event::Head { column: c, num_columns })?;
                let gradient = self.head(c, &hidden)?;
                // Where nothing of the layers is trained nobody waits for it.
                self.trace.top[c] = gradient.filter(|_| num_bands > 0).as_ref().map(Waiting::send);
            }
        }
        Ok(self.trace)
    }

    /// One column through all layers; the inputs of layer bands are kept, or the bands' graphs. Where nobody wants the last hidden states,
    /// what is returned means nothing.
    fn run_column(&mut self, c: usize, wants_hidden: bool) -> Result<Tensor, Fault> {
        let has_router_loss = self.router_weight() > 0.0;
        let has_output = wants_hidden || self.has_output(c, self.trace.session.layers.len());
        let mut hidden = no_grad(|| self.model.embed(&self.trace.ids(c, self.model.device())));
        let Self { engine, model, schedule, .. } = self;
        let ForwardTrace { context, session, samples, checkpoints, routers, kept, .. } = &mut self.trace;
        let (keeps_undo, num_layers) = (schedule.layers_with_undo(c), session.layers.len());
        // Policies choose, unless there are choices to follow.
        let policies = engine.log.is_none().then_some(&engine.settings.policies[..]);
        let spans = &session.plan.spans[session.plan.columns[c].clone()];
        let is_last = c + 1 == session.plan.columns.len();
        let mut pass = Pass {
            model,
            captured: None,
            frequencies: &session.frequencies,
            dropout: DropoutContext { dropout: context.and_then(|c| c.dropout), samples },
            settings: &engine.settings,
            order: if is_last && context.is_some() { PassOrder::UpAndBack } else { PassOrder::Up },
        };
        let below = schedule.first_kept_layer(c).min(num_layers);
        let continues = below < num_layers;
        if below > 0 {
            let mode = policies.map_or(Mode::Follow, |policies| Mode::Choose { policies, part: None });
            let routers = has_router_loss.then(|| RouterTask { sums: Some(&mut *routers), roots: Vec::new() });
            let column = Column { continues, has_output: continues || has_output, ..session.column(spans, 0..below) };
            hidden = no_grad(|| {
                pass.run(hidden, &mut ColumnAttention { column, mode, keeps_undo, routers }, &mut |layer, input| {
                    if schedule.is_border(layer, c) {
                        checkpoints.insert((layer, c), engine.stores.layer_checkpoints.offload(input)?);
                    }
                    Ok(())
                })
            })?;
        }
        for band in schedule.kept_bands(c).rev() {
            let layers = schedule.layers(band);
            #[cfg(test)]
            crate::units::sabotage::run_out_of_memory((1 + kept.len()) * spans.len() * layers.len());
            let has_output = has_output || layers.end < num_layers;
            let column = Column { continues, has_output, ..session.column(spans, layers) };
            let task = has_router_loss.then(|| RouterTask { sums: Some(&mut *routers), roots: Vec::new() });
            let graph = CellGraph::record(&mut pass, &hidden, column, policies, task, schedule.first_layer())?;
            hidden = graph.output.detach();
            kept.insert((band, c), graph);
        }
        Ok(hidden)
    }
}
