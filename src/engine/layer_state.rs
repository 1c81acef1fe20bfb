//! One layer's cache during a step, with the logs that belong to it: a chunk is chosen for, written and attended to, again by the recorded
//! choice, and unwound with its gradients.

use std::sync::{Arc, Mutex};

use tch::Tensor;

use super::attended_chunk::{AttendedChunk, ChunkSaved, PartialChunk};
use super::importance::LayerImportance;
use super::kept_outputs::KeptOutputs;
use super::undo_log::{KeepUndo, UndoLog};
use super::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::cache::{CacheGrads, CacheSnapshot, ChunkSpan, LayerCache, LayerLog, Placement, Policy, Undo};
use crate::ops::attention::{self, KvBlock, Qkv, ScoreRule, accumulation_kind, sink_logit_backward};
use crate::recipe::StoreForm;
use crate::store::Store;
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct LayerState {
    pub(super) cache: LayerCache,
    pub(super) log: LayerLog,
    undo: UndoLog,
    pub(super) outputs: Option<KeptOutputs>,
    /// What the backward phase learns of the entries beside their gradient, where somebody wants to know.
    pub(super) importance: Option<LayerImportance>,
    grads: Option<CacheGrads>,
    pub(super) partial: PartialChunk,
}

/// The gradients of what a chunk was given: queries, its own entries, and the sink logits, where they are trained.
pub(super) struct ChunkGrads {
    pub(super) q: Tensor,
    pub(super) own: KvBlock,
    pub(super) sink_logit: Option<Tensor>,
}

/// A layer's state, shared with the autograd nodes that unwind it.
pub(super) type SharedLayer = Arc<Mutex<LayerState>>;

impl LayerState {
    /// A layer whose undo entries wait in `store`.
    pub(super) fn new(cache: LayerCache, store: Store) -> Self {
        Self {
            cache,
            log: LayerLog::default(),
            undo: UndoLog::new(store),
            outputs: None,
            importance: None,
            grads: None,
            partial: PartialChunk::default(),
        }
    }

    /// A copy that goes on by itself from here; only for a layer without an undo log.
    pub(super) fn fork(&self) -> Result<SharedLayer, Fault> {
        let (log, partial) = (self.log.clone(), self.partial.clone());
        Ok(Arc::new(Mutex::new(Self { log, partial, ..Self::new(self.cache.fork()?, self.undo.store.clone()) })))
    }

    /// Fills the cache with what another one holds; the choices that led there are not known.
    pub(super) fn fill(&mut self, snapshot: &CacheSnapshot) -> Result<(), Fault> {
        self.cache.fill(snapshot)?;
        self.log.stand_behind(self.cache.num_chunks());
        Ok(())
    }

    /// Adds what the layer holds, but for what waits in its store.
    pub(super) fn measure(&self, memory: &mut MemoryByPart) {
        let (device, host) = self.cache.bytes();
        let gradients = self.grads.iter().map(CacheGrads::bytes).sum();
        memory.add(MemoryPart::KvCache, MemoryPlace::Device, device);
        memory.add(MemoryPart::KvCache, MemoryPlace::Device, gradients);
        memory.add(MemoryPart::KvCache, MemoryPlace::Host, host);
        memory.add(MemoryPart::UndoLog, MemoryPlace::Host, self.log.bytes());
        self.undo.measure(memory);
        self.outputs.iter().for_each(|outputs| outputs.measure(memory));
    }

    /// Begins again at the first chunk; the replay log stays, and so do attention's outputs, which a second forward uses.
    pub(super) fn reset(&mut self, prefill: usize) {
        self.cache.reset(prefill);
        self.cache.offload();
        self.undo = UndoLog::new(self.undo.store.clone());
        self.grads = None;
        self.importance.iter_mut().for_each(LayerImportance::forget_entries);
    }

    /// Forward phase: chooses the victims, writes, attends, lets the policy keep its statistics. Also returns what the chunk's backward needs.
    pub(super) fn forward_chunk(
        &mut self,
        policy: &dyn Policy,
        span: &ChunkSpan,
        tokens: &Qkv,
        keep: KeepUndo,
    ) -> Result<(Tensor, ChunkSaved), Fault> {
        self.choose_victims(policy, span);
        // Pads must not count: in a ragged chunk the mass is summed only when a policy asks for it.
        let asked = policy.traits().required_queries(span.is_prefill()).filter(|_| !span.is_ragged());
        let (own, placement) = self.write(span, tokens, keep)?;
        let (mut chunk, past) = self.sides(span, tokens, own, &placement);
        let (attended, mass) = attention::attend_and_sum(&chunk, &past, asked);
        // A view of the cache, which later chunks overwrite.
        chunk.joined = None;
        let saved = ChunkSaved { chunk, attended, placement };
        if let Some(outputs) = self.outputs.as_mut().filter(|_| keep != KeepUndo::Resident) {
            outputs.put(span.index, &saved.attended)?;
        }
        self.log.finish_chunk();
        let mass = asked.zip(mass);
        self.cache.note(policy, span, &saved.chunk.own, &AttendedChunk { saved: &saved, past: &past, mass });
        Ok((saved.placement.unplace(&saved.attended.out_bhnd), saved))
    }

    pub(super) fn choose_victims(&mut self, policy: &dyn Policy, span: &ChunkSpan) {
        self.cache.enter(span);
        if let Some(budgets) = self.cache.allocate(policy, span) {
            self.log.budgets = Some(budgets);
        }
        self.apply_budgets(span);
        let victims = self.cache.choose_victims(policy, span);
        self.log.record(victims);
    }

    /// Follows the recorded choice: writes, and attends where somebody `wants_output`; else what comes out is empty.
    pub(super) fn replay(&mut self, span: &ChunkSpan, tokens: &Qkv, keep: KeepUndo, wants_output: bool) -> Result<Tensor, Fault> {
        let (own, placement) = self.write(span, tokens, keep)?;
        if !wants_output {
            return Ok(tokens.q_bhnd.narrow(2, 0, 0));
        }
        let saved = self.attend_unless_kept(span, tokens, own, placement, false)?;
        Ok(saved.placement.unplace(&saved.attended.out_bhnd))
    }

    /// Recomputation of a cell: replays the choice, or attends again where the chunk stands in the cache already.
    pub(super) fn recompute(&mut self, span: &ChunkSpan, tokens: &Qkv) -> Result<(Tensor, ChunkSaved), Fault> {
        self.cache.enter(span);
        let (own, placement) = if self.cache.num_chunks() == span.index + 1 {
            let undo = self.fetch_undo(span)?;
            let placement = self.cache.placement(span, &undo);
            let own = self.cache.recompose(&placement, &undo, &tokens.own);
            self.undo.put(span.index, undo, KeepUndo::Resident)?;
            (own, placement)
        } else {
            self.write(span, tokens, KeepUndo::Resident)?
        };
        let saved = self.attend_unless_kept(span, tokens, own, placement, true)?;
        Ok((saved.placement.unplace(&saved.attended.out_bhnd), saved))
    }

    /// Backward of one chunk's attention: adds to the cache's gradient, unwinds it and the cache; returns the gradients of what the chunk was given.
    pub(super) fn backward(
        &mut self,
        span: &ChunkSpan,
        saved: &ChunkSaved,
        dout: Option<&Tensor>,
        trains_sinks: bool,
    ) -> Result<ChunkGrads, Fault> {
        self.cache.enter(span);
        let ChunkSaved { chunk, attended, placement } = saved;
        let kind = accumulation_kind(chunk.q_bhnd.kind());
        let (past, joined) = self.past(span, self.visible_until(span, placement, chunk.rule).as_ref());
        let grads = self.grads.get_or_insert_with(|| self.cache.zero_gradients(kind));
        let mut sink_logit = None;
        // What learns of entries counts all queries, also those that nothing asks for.
        let zeros =
            self.importance.as_ref().filter(|_| dout.is_none()).map(|_| placement.unplace(&attended.out_bhnd.zeros_like()));
        let q = dout.or(zeros.as_ref()).map(|dout| {
            let dout = placement.place(dout);
            let chunk = Qkv { joined, ..chunk.clone() };
            let part = attention::attend_backward(&dout, &chunk, &past, attended);
            if let Some(importance) = &mut self.importance {
                let given = past.iter().map(|past| attention::squared_score_gradients(&dout, &chunk, past, attended));
                importance.add(&self.cache, span, given);
            }
            grads.add(&part.own, &part.past);
            let sink_logit_h = chunk.sink_logit_h.as_ref().filter(|_| trains_sinks);
            sink_logit =
                sink_logit_h.map(|sink_logit_h| sink_logit_backward(&dout, attended, sink_logit_h).to_kind(sink_logit_h.kind()));
            placement.unplace(&part.dq_bhnd)
        });
        let undo = self.undo.take(span.index).ok_or_else(|| self.cache.out_of_order("unwind", span))?;
        let own = grads.unwind(&undo);
        if let Some(importance) = &mut self.importance {
            importance.unwind(span, &undo, placement);
        }
        self.cache.unwind(span, &undo)?;
        let kinds = chunk.own.planes().map(Tensor::kind);
        let own = KvBlock::of_planes(own.planes().zip(kinds).map(|(d, kind)| placement.unplace(d).to_kind(kind)));
        let q = q.unwrap_or_else(|| placement.unplace(&chunk.q_bhnd.zeros_like()));
        Ok(ChunkGrads { q, own, sink_logit })
    }

    /// Restores the cache to what it was before `span`: the cell that follows makes the undo entry again when it writes.
    pub(super) fn unwind(&mut self, span: &ChunkSpan) -> Result<(), Fault> {
        let undo = self.fetch_undo(span)?;
        self.cache.unwind(span, &undo)
    }

    /// Begins to copy the undo entry of a chunk to the device, and its attention's output, where that waits.
    pub(super) fn prefetch(&mut self, span: &ChunkSpan) -> Result<(), Fault> {
        let device = self.cache.shape().device;
        self.undo.prefetch(span.index, device).ok_or_else(|| self.cache.out_of_order("unwind", span))??;
        self.outputs.as_mut().map_or(Ok(()), |outputs| outputs.prefetch(span.index, device))
    }

    fn fetch_undo(&mut self, span: &ChunkSpan) -> Result<Undo, Fault> {
        let device = self.cache.shape().device;
        self.undo.fetch(span.index, device).ok_or_else(|| self.cache.out_of_order("unwind", span))?
    }

    /// Brings the layer's budgets into force where its chunk has come.
    fn apply_budgets(&mut self, span: &ChunkSpan) {
        if let Some(budgets) = self.log.budgets.as_ref().filter(|budgets| budgets.index == span.index) {
            self.cache.apply_budgets(budgets);
        }
    }

    fn write(&mut self, span: &ChunkSpan, tokens: &Qkv, keep: KeepUndo) -> Result<(KvBlock, Placement), Fault> {
        self.cache.enter(span);
        self.apply_budgets(span);
        let victims = self.cache.recall(&self.log, span)?;
        let written = self.cache.write(span, victims, &tokens.own)?;
        self.undo.put(span.index, written.undo, keep)?;
        Ok((written.own, written.placement))
    }

    /// Past and chunk side by side. An undo log that rounds brings the chunk's own entries back rounded, which it must see as they were.
    pub(super) fn joined(&self) -> Option<KvBlock> {
        if self.undo.store.form() == StoreForm::Plain { self.cache.joined() } else { None }
    }

    /// How many of the region's queries see each filled slot, where the layer has a window.
    pub(super) fn visible_until(&self, span: &ChunkSpan, placement: &Placement, rule: ScoreRule) -> Option<Tensor> {
        rule.window.map(|window| placement.visible_until(span, &self.cache.positions(), window))
    }

    /// What the chunk written last sees in addition to itself, by page, and joined with it.
    fn past(&self, span: &ChunkSpan, visible_until: Option<&Tensor>) -> (Vec<KvBlock>, Option<KvBlock>) {
        // Kernels that see all at once know no window.
        let joined = if visible_until.is_none() { self.joined() } else { None };
        (self.pages(self.cache.region(span), visible_until), joined)
    }

    /// The first `count` slots by page.
    pub(super) fn pages(&self, count: i64, visible_until: Option<&Tensor>) -> Vec<KvBlock> {
        let (valid, mut start) = (self.cache.valid_slots(count), 0);
        let page = |block: KvBlock| {
            let (first, slots) = (start, block.slots());
            start += slots;
            let of_page = |all: &Tensor| all.narrow(2, first, slots);
            KvBlock { valid: valid.as_ref().map(of_page), visible_until: visible_until.map(of_page), ..block }
        };
        self.cache.past(count).into_iter().map(page).collect()
    }

    /// What a chunk's backward needs. Attention's output is the one that has waited, where it has; the chunk's cell uses it last.
    fn attend_unless_kept(
        &mut self,
        span: &ChunkSpan,
        tokens: &Qkv,
        own: KvBlock,
        placement: Placement,
        is_last: bool,
    ) -> Result<ChunkSaved, Fault> {
        let (device, outputs) = (self.cache.shape().device, self.outputs.as_mut());
        let kept = outputs.map(|outputs| outputs.find(span.index, device, is_last)).transpose()?;
        let visible_until = self.visible_until(span, &placement, tokens.rule);
        let chunk = self.in_region(span, tokens, own, &placement, visible_until.as_ref());
        if let Some(attended) = kept.flatten() {
            return Ok(ChunkSaved { chunk, attended, placement });
        }
        let (past, joined) = self.past(span, visible_until.as_ref());
        let attended = attention::attend(&Qkv { joined, ..chunk.clone() }, &past);
        if let Some(outputs) = self.outputs.as_mut().filter(|_| !is_last) {
            outputs.put(span.index, &attended)?;
        }
        Ok(ChunkSaved { chunk, attended, placement })
    }

    /// The chunk written last, whose own queries see the region's entries as `own`, and what it sees in addition.
    pub(super) fn sides(&self, span: &ChunkSpan, tokens: &Qkv, own: KvBlock, placement: &Placement) -> (Qkv, Vec<KvBlock>) {
        let visible_until = self.visible_until(span, placement, tokens.rule);
        let chunk = self.in_region(span, tokens, own, placement, visible_until.as_ref());
        let (past, joined) = self.past(span, visible_until.as_ref());
        (Qkv { joined, ..chunk }, past)
    }

    fn in_region(
        &self,
        span: &ChunkSpan,
        tokens: &Qkv,
        own: KvBlock,
        placement: &Placement,
        visible_until: Option<&Tensor>,
    ) -> Qkv {
        // A chunk that is no longer than the window sees itself, where no older entry stands among its own.
        let sees_itself = tokens.rule.window.is_none_or(|window| window >= span.len) && !span.is_ragged();
        // A copy, as a part would keep the whole.
        let of_region = |all: &Tensor| all.narrow(2, self.cache.region(span), span.len as i64).copy();
        let visible_until = visible_until.filter(|_| !sees_itself).map(of_region);
        Qkv {
            q_bhnd: placement.place(&tokens.q_bhnd),
            own: KvBlock { valid: self.cache.valid_in_region(span), visible_until, ..own },
            rule: tokens.rule,
            sink_logit_h: tokens.sink_logit_h.as_ref().map(Tensor::shallow_clone),
            joined: None,
        }
    }
}

/// A one-element tensor that carries the order of a layer's operators.
pub(super) fn link(like: &Tensor) -> Tensor {
    Tensor::zeros([1], (like.kind(), like.device()))
}
