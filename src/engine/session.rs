//! A batch on its way through the model: the caches and logs of all layers, and how far it has come.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};

use super::attend::{Column, ColumnAttention};
use super::attended_chunk::ChunkPart;
use super::layer_state::{LayerState, SharedLayer};
use super::{ChunkPlan, Engine, Settings};
use crate::cache::{CacheShape, ChunkSpan, LayerCache, ReplayLog};
use crate::model::{CapturedLayers, ColumnLayers, DropoutContext, Model};
use crate::native::locked;
use crate::ops::frequencies::Frequencies;
use crate::units::{Fault, LayerIdx};

/// Caches and logs of a batch, and the chunks that they have seen.
///
/// The engine's phases run one over a batch that is planned as a whole; [`Session::extend`] cuts what comes.
pub struct Session {
    pub(super) layers: Vec<SharedLayer>,
    /// The chunks that it is to see, or those that have come.
    pub(super) plan: ChunkPlan,
    pub(super) spec: SessionSpec,
    /// Rotary frequencies for the lengths of its sequences, by rotation.
    pub(super) frequencies: Vec<Frequencies>,
    /// Tokens of the last chunk that are still to come.
    pub(super) missing: usize,
}

/// What a session is made for.
#[derive(Clone, Debug)]
pub struct SessionSpec {
    /// Sequences, which get their tokens together.
    pub num_sequences: usize,
    pub max_tokens: usize,
    /// The prefill span ends with so many tokens at the latest, as before the first target of a sample whose targets are run one by one;
    /// `None` where it ends with the smallest cache.
    pub prompt: Option<usize>,
    /// The sequence length for rotary embeddings that depend on it.
    pub rope_length: usize,
    /// The first position of each sequence's initial part, and the one behind it; empty where there is none.
    pub initial: Vec<(usize, usize)>,
    /// Whether the choices are kept, to be compared.
    pub keeps_log: bool,
}

impl SessionSpec {
    /// Describes a session of sequences of at most `max_tokens` tokens each, whose choices are kept.
    pub fn new(num_sequences: usize, max_tokens: usize) -> Self {
        Self { num_sequences, max_tokens, prompt: None, rope_length: max_tokens, initial: Vec::new(), keeps_log: true }
    }
}

/// What carries a column through layers: the model with what of it is captured, and what rotations and dropout depend on.
pub(super) struct Pass<'a> {
    pub(super) model: &'a Model,
    /// Captured layers, where tokens come without end at fixed widths.
    pub(super) captured: Option<&'a mut CapturedLayers>,
    pub(super) frequencies: &'a [Frequencies],
    pub(super) dropout: DropoutContext<'a>,
    pub(super) settings: &'a Settings,
    pub(super) order: PassOrder,
}

/// Which layers' weights come next, where a model's layers wait on the host: those of the band that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassOrder {
    /// The band above, and after the top the lowest, for another column.
    Up,
    /// The band above, and after the top the one below it: the backward phase follows.
    UpAndBack,
    Down,
}

impl PassOrder {
    /// A layer is about to run: its band's weights are brought, and those of the next set out.
    pub(super) fn enter(self, settings: &Settings, model: &Model, layer: usize) {
        if !model.has_waiting_layers() {
            return;
        }
        let first_trained = model.first_trained_layer();
        let bands = settings.layer_bands(first_trained);
        let Some(at) = bands.iter().position(|band| band.contains(&layer)) else { return };
        let is_top = at + 1 == bands.len();
        let next = match self {
            Self::Up if is_top => Some(0),
            Self::Up | Self::UpAndBack if !is_top => Some(at + 1),
            // The backward phase ends at the lowest trained layer.
            _ => at.checked_sub(1).filter(|below| bands[*below].start >= first_trained),
        };
        model.bring_layers(bands[at].clone(), next.map(|next| bands[next].clone()));
    }
}

impl Session {
    /// A session with empty caches of these shapes; `frequencies` are those of the model's rotations.
    ///
    /// # Errors
    /// Where a policy needs statistics of queries, and the model has none.
    pub(super) fn empty(
        engine: &Engine,
        model: &Model,
        plan: ChunkPlan,
        shapes: Vec<CacheShape>,
        spec: SessionSpec,
        frequencies: Vec<Frequencies>,
    ) -> Result<Self, Fault> {
        let layer = |(layer, shape): (usize, CacheShape)| {
            let traits = engine.settings.policy(layer).traits();
            let mut cache = LayerCache::new(LayerIdx(layer), shape, plan.prefill);
            cache.initial_parts = spec.initial.iter().map(|&(start, end)| traits.kept_of(start..end)).collect();
            if traits.needs_query_statistics {
                cache.query_statistics = Some(model.query_statistics(LayerIdx(layer), &frequencies)?);
            }
            Ok(Arc::new(Mutex::new(LayerState::new(cache, engine.stores.undo_log.clone()))))
        };
        let layers = shapes.into_iter().enumerate().map(layer).collect::<Result<_, Fault>>()?;
        Ok(Self { layers, plan, spec, frequencies, missing: 0 })
    }

    /// Tokens of each sequence so far.
    pub fn num_tokens(&self) -> usize {
        self.plan.len() - self.missing
    }

    pub fn log(&self) -> ReplayLog {
        let layers = self.layers.iter().map(|layer| locked(layer).log.clone()).collect();
        ReplayLog { spans: self.plan.spans.clone(), cache_lengths: self.cache_lengths(), layers }
    }

    pub(super) fn cache_lengths(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| locked(layer).cache.shape().cache_length).collect()
    }

    /// The next token of all, where they come one by one.
    pub(super) fn next_part(&mut self) -> Option<ChunkPart> {
        if self.missing == 0 {
            let sequences = self.num_sequences();
            self.plan.extend_by_block(sequences as usize);
            self.missing = self.plan.spans.last().map_or(0, |span| span.len);
            if !self.spec.keeps_log {
                self.plan.forget();
            }
        }
        let span = self.plan.spans.last()?.clone();
        let from = span.len - self.missing;
        Some(ChunkPart { span, from })
    }

    pub(super) fn column<'a>(&'a self, spans: &'a [ChunkSpan], layers: Range<usize>) -> Column<'a> {
        Column { spans, states: &self.layers, first: layers.start, end: layers.end, continues: false, has_output: true }
    }
}

impl Pass<'_> {
    /// Carries a column's hidden states `(B, n, E)` through the layers that `attend` is for; `before` is shown the input of each.
    pub(super) fn run(
        &mut self,
        mut hidden: Tensor,
        attend: &mut ColumnAttention<'_>,
        before: &mut dyn FnMut(usize, &Tensor) -> Result<(), Fault>,
    ) -> Result<Tensor, Fault> {
        let (num_sequences, num_tokens, _) = hidden.size3().unwrap_or_default();
        attend.allocate_budgets();
        let start = attend.column.spans[0].start as i64;
        // Pads count on, so that all sequences share their positions.
        let position = Tensor::arange_start(start, start + num_tokens, (Kind::Int64, self.model.device()));
        // Only sequences that have not ended are computed.
        let frequencies: Vec<Frequencies> = self.frequencies.iter().map(|all| all.of_first(num_sequences)).collect();
        let positions = self.model.positions(position.view([1, -1]), &frequencies);
        let shape = (num_sequences as usize, num_tokens as usize);
        // Without dropout there may be no samples.
        let samples = &self.dropout.samples[..self.dropout.samples.len().min(shape.0)];
        let dropout = DropoutContext { samples, ..self.dropout };
        let mut layers = match &mut self.captured {
            Some(captured) => captured.column(self.model, &dropout, &positions, shape.0, shape.1),
            None => ColumnLayers::plain(self.model, &dropout, &positions),
        };
        for layer in attend.column.first..attend.column.end {
            before(layer, &hidden)?;
            self.order.enter(self.settings, self.model, layer);
            hidden = layers.layer(LayerIdx(layer), &hidden, attend)?;
        }
        Ok(hidden)
    }
}
