//! A session that is extended as tokens come: a prompt as a whole, a generated token alone.

use tch::{Tensor, no_grad};

use super::attend::{Column, ColumnAttention, Mode};
use super::attended_chunk::ChunkPart;
use super::forward::HiddenSink;
use super::layer_state::SharedLayer;
use super::session::{Pass, PassOrder, Session, SessionSpec};
use super::slots::Extent;
use super::{ChunkPlan, ColumnWidth, Cuts, Engine, Settings, guarded};
use crate::cache::{ChunkSpan, LayerLog};
use crate::model::{CapturedLayers, DropoutContext, Model};
use crate::native::locked;
use crate::units::Fault;

impl Settings {
    pub(super) fn cuts_of(&self, spec: &SessionSpec) -> Cuts {
        let cuts = self.cuts_as_they_come();
        Cuts { span: cuts.span.min(spec.prompt.unwrap_or(usize::MAX)), ..cuts }
    }
}

impl Session {
    /// A session with empty caches, whose policies choose. Its log serves to compare choices; the engine does not follow it, as caches
    /// that depend on the length of a sequence have that of `max_tokens`.
    pub fn new(engine: &Engine, model: &Model, spec: &SessionSpec) -> Result<Self, Fault> {
        guarded(|| {
            let settings = &engine.settings;
            settings.check_fits(spec.max_tokens)?;
            let plan = ChunkPlan::arriving(settings.cuts_of(spec));
            // The last block may be begun for one token.
            let tokens = spec.max_tokens.saturating_add(settings.decode_block() - 1);
            let tokens = if settings.static_width().is_some() { usize::MAX } else { tokens };
            let extent = Extent { sequences: spec.num_sequences, tokens, longest_chunk: settings.longest_chunk() };
            let shapes = settings.shapes_of(model.config(), extent, model.kind(), model.device());
            let frequencies = model.frequencies(&vec![spec.rope_length; spec.num_sequences]);
            let session = Self::empty(engine, model, plan, shapes, spec.clone(), frequencies)?;
            for layer in session.layers.iter().filter(|_| !spec.keeps_log) {
                locked(layer).log = LayerLog::forgetting();
            }
            Ok(session)
        })
    }

    /// An independent copy of this session: the caches are copied, and nothing is computed again.
    pub fn fork(&self) -> Result<Self, Fault> {
        guarded(|| {
            Ok(Self {
                layers: self.layers.iter().map(|layer| locked(layer).fork()).collect::<Result<_, _>>()?,
                plan: self.plan.clone(),
                spec: self.spec.clone(),
                frequencies: self.frequencies.clone(),
                missing: self.missing,
            })
        })
    }

    /// Whether [`Self::crop`] can go back, or stands there already. A session that keeps its choices does not go back.
    pub fn can_crop(&self, tokens: usize) -> bool {
        let may_go_back = self.missing == 0 && tokens < self.num_tokens() && !self.spec.keeps_log;
        let can_go_back = || may_go_back && self.layers.iter().all(|layer| locked(layer).cache.can_crop(tokens));
        tokens > 0 && (tokens == self.num_tokens() || can_go_back())
    }

    /// Goes back to where it had read so many tokens, at least one. False, and as it was, where it would not stand as if no others had come.
    pub fn crop(&mut self, tokens: usize) -> bool {
        let can_crop = self.can_crop(tokens);
        if can_crop && tokens < self.num_tokens() {
            self.layers.iter().for_each(|layer| locked(layer).cache.crop(tokens));
            self.plan.forget();
            if let Some(last) = self.plan.spans.last_mut() {
                *last = ChunkSpan { start: tokens - 1, len: 1, real: vec![1; last.num_sequences()], ..*last };
            }
        }
        can_crop
    }

    pub(super) fn num_sequences(&self) -> i64 {
        self.spec.num_sequences as i64
    }

    /// Fails where so many further tokens are too many.
    pub(super) fn check_room(&self, further: usize) -> Result<(), Fault> {
        let tokens = self.num_tokens() + further;
        if tokens > self.spec.max_tokens {
            let message = format!("a session of at most {} tokens can not be extended to {tokens}", self.spec.max_tokens);
            return Err(Fault::failed(message).with_hint("begin a session for more tokens"));
        }
        Ok(())
    }

    /// Runs the next tokens of every sequence, in chunks as long as the settings allow and columns as wide. `sink`, if there is one, gets the
    /// last layer's hidden states, column by column. Nothing is kept for a backward phase.
    ///
    /// # Shapes
    /// `(B, n)` int64 in.
    pub fn extend(
        &mut self,
        engine: &Engine,
        model: &Model,
        ids_bn: &Tensor,
        mut sink: Option<HiddenSink<'_>>,
    ) -> Result<(), Fault> {
        let (_, num_tokens) = ids_bn.size2().map_err(|_| other_ids(self.num_sequences(), &ids_bn.size()))?;
        let (mut done, mut layers) = (0, CapturedLayers::default());
        loop {
            let (rest_bn, sink) =
                (ids_bn.narrow(1, done, num_tokens - done), sink.as_mut().map(|sink| &mut **sink as HiddenSink<'_>));
            done += self.extend_by_column(engine, model, &mut layers, &rest_bn, sink)? as i64;
            if done == num_tokens {
                return Ok(());
            }
        }
    }

    /// Extends the session by the first column of [`Self::extend`] alone; returns how many tokens it had. `layers` are those of
    /// [`Settings::session_layers`], or none that are captured.
    ///
    /// # Shapes
    /// `(B, n)` int64 in.
    pub fn extend_by_column(
        &mut self,
        engine: &Engine,
        model: &Model,
        layers: &mut CapturedLayers,
        ids_bn: &Tensor,
        sink: Option<HiddenSink<'_>>,
    ) -> Result<usize, Fault> {
        guarded(|| {
            let (num_sequences, num_tokens) = ids_bn.size2().unwrap_or_default();
            let num_own = self.num_sequences();
            if num_tokens == 0 || num_sequences != num_own {
                return Err(other_ids(num_own, &ids_bn.size()));
            }
            self.check_room(num_tokens as usize)?;
            let (spans, part) = self.next_spans(engine, num_tokens as usize);
            let (start, len) = (spans[0].start, spans.iter().map(|span| span.len).sum::<usize>());
            let mode = Mode::Choose { policies: &engine.settings.policies, part: part.as_ref() };
            let mut pass = Pass {
                model,
                captured: Some(layers),
                frequencies: &self.frequencies,
                dropout: DropoutContext::default(),
                settings: &engine.settings,
                order: PassOrder::Up,
            };
            let has_output = sink.is_some() || model.config().ends_in_experts();
            let column = Column { has_output, ..self.column(&spans, 0..self.layers.len()) };
            let mut attend = ColumnAttention { column, mode, keeps_undo: 0..0, routers: None };
            let pads = engine.settings.static_width().map_or(0, |width| width - len);
            let ids_bn = ids_bn.narrow(1, 0, len as i64).constant_pad_nd([0, pads as i64]);
            let hidden = no_grad(|| pass.run(model.embed(&ids_bn), &mut attend, &mut |_, _| Ok(())))?;
            if let Some(sink) = sink {
                sink(start, &hidden.narrow(1, 0, len as i64));
            }
            if !self.spec.keeps_log {
                self.plan.forget();
            }
            Ok(len)
        })
    }

    /// The chunks of the next column of the `tokens` that come; or what comes of a chunk that is still coming, as a chunk and as a part.
    fn next_spans(&mut self, engine: &Engine, tokens: usize) -> (Vec<ChunkSpan>, Option<ChunkPart>) {
        if self.missing > 0
            && let Some(part) = self.next_part()
        {
            let len = self.missing.min(tokens);
            self.missing -= len;
            let span = &part.span;
            let own = ChunkSpan { start: span.start + part.from, len, real: vec![len; span.real.len()], ..span.clone() };
            return (vec![own], Some(part));
        }
        let settings = &engine.settings;
        let width =
            settings.static_width().map_or_else(|| settings.column_width(self.spec.max_tokens), |_| ColumnWidth::Chunks(1));
        let column = self.plan.extend(self.num_sequences() as usize, tokens, width);
        (self.plan.spans[column].to_vec(), None)
    }

    /// Entries that the caches of all layers hold, by KV head, and those that have been evicted.
    pub fn entries(&self) -> (usize, usize) {
        let of_layer = |state: &SharedLayer| locked(state).cache.num_entries();
        let (taken, layers) = (self.layers.iter().map(of_layer).sum::<usize>(), self.layers.len());
        // Slots that wait for tokens hold nothing.
        (taken.saturating_sub(self.missing * layers), (self.plan.len() * layers).saturating_sub(taken))
    }

    pub fn spec(&self) -> &SessionSpec {
        &self.spec
    }
}

/// A session is extended by no tokens, by those of another number of sequences, or by a tensor that is not `(B, n)`.
pub(super) fn other_ids(expected: i64, found: &[i64]) -> Fault {
    let message = format!("a session of {expected} sequences can not be extended by tokens of size {found:?}");
    Fault::failed(message).with_hint("give every sequence of the session its next tokens")
}
