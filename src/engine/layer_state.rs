//! One layer's cache during a step, with the logs that belong to it: what the three kinds of attention below share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::kept_outputs::KeptOutputs;
use super::open_block::OpenBlock;
use super::sight::{AttendedChunk, ChunkSaved, OwnKeys, PastPage, PastPages};
use super::undo_log::{KeepUndo, UndoLog};
use super::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::cache::{CacheError, CacheGrads, CacheSnapshot, ChunkSpan, LayerCache, LayerLog, Placement, Policy, Queries, Undo};
use crate::ops::attention::{self, Qkv, ScoreRule, accumulation_kind, drain_backward};
use crate::store::{Form, Store};

/// The state of one layer.
#[derive(Debug)]
pub(super) struct LayerState {
    pub(super) cache: LayerCache,
    pub(super) log: LayerLog,
    undo: UndoLog,
    pub(super) outputs: Option<KeptOutputs>,
    grads: Option<CacheGrads>,
    /// Whether the choices are forgotten as soon as they are carried out.
    pub(super) forgets: bool,
    /// The chunk whose tokens are still coming.
    pub(super) open: OpenBlock,
}

/// Keys and values of a region's columns as the chunk sees them, and how its tokens stand there.
type InRegion = (Tensor, Tensor, Placement);

/// A layer's state, shared with the autograd nodes that unwind it.
pub(super) type SharedLayer = Arc<Mutex<LayerState>>;

/// Locks a layer; a poisoned lock means that a panic is on its way up already.
pub(super) fn lock(run: &SharedLayer) -> MutexGuard<'_, LayerState> {
    run.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LayerState {
    fn new(cache: LayerCache, store: Store) -> Self {
        Self {
            cache,
            log: LayerLog::default(),
            undo: UndoLog::new(store),
            outputs: None,
            grads: None,
            forgets: false,
            open: OpenBlock::default(),
        }
    }

    /// Another one that stands where this one does, and goes on by itself; for one that keeps no undo log.
    pub(super) fn fork(&self) -> Result<Self, CacheError> {
        let log = self.log.clone();
        let (forgets, open) = (self.forgets, self.open.clone());
        Ok(Self { log, forgets, open, ..Self::new(self.cache.fork()?, self.undo.store.clone()) })
    }

    /// Fills the cache with what another one holds; the choices that led there are not known.
    pub(super) fn fill(&mut self, snapshot: &CacheSnapshot) -> Result<(), CacheError> {
        self.cache.fill(snapshot)?;
        self.log.stand_behind(self.cache.num_chunks());
        Ok(())
    }

    /// Where undo entries wait; the same for all layers.
    pub(super) fn store(&self) -> &Store {
        &self.undo.store
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
        self.cache.park();
        self.undo.clear();
        self.grads = None;
    }

    /// Forward phase: chooses the victims, writes, attends, lets the policy take notes.
    pub(super) fn decide(
        &mut self,
        policy: &dyn Policy,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        keep_undo: bool,
    ) -> Result<Tensor, CacheError> {
        Ok(self.decide_and_keep(policy, span, tokens, KeepUndo::of(keep_undo))?.0)
    }

    /// The same, with what the chunk's backward needs.
    pub(super) fn decide_for_backward(
        &mut self,
        policy: &dyn Policy,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
    ) -> Result<(Tensor, ChunkSaved), CacheError> {
        self.decide_and_keep(policy, span, tokens, KeepUndo::Resident)
    }

    fn decide_and_keep(
        &mut self,
        policy: &dyn Policy,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        keep: KeepUndo,
    ) -> Result<(Tensor, ChunkSaved), CacheError> {
        self.choose(policy, span);
        // Pads must not pay: in a ragged chunk the sums wait until a policy asks.
        let asked = policy.traits().required_queries(span.chunk.0 == 0).filter(|_| !span.is_ragged());
        let written = self.write(span, tokens, keep)?;
        let (saved, past, mass) = self.attend(span, tokens, written, asked);
        if let Some(outputs) = self.outputs.as_mut().filter(|_| keep != KeepUndo::Resident) {
            outputs.put(span.index, &saved.attended);
        }
        self.log.settle();
        let mass = asked.zip(mass);
        self.cache.note(policy, span, (&saved.own.k, &saved.own.v), &AttendedChunk { saved: &saved, past: &past, mass });
        if self.forgets {
            self.log.forget();
        }
        Ok((saved.placement.unplace(&saved.attended.out_bhnd), saved))
    }

    /// Chooses a chunk's victims, and writes them down.
    pub(super) fn choose(&mut self, policy: &dyn Policy, span: &ChunkSpan) {
        self.cache.enter(span);
        if let Some(quota) = self.cache.allocate(policy, span) {
            self.log.record_quota(quota);
        }
        self.apply_budget(span);
        let victims = self.cache.decide(policy, span);
        self.log.record(victims);
    }

    pub(super) fn replay(&mut self, span: &ChunkSpan, tokens: Qkv<'_>, keep_undo: bool) -> Result<Tensor, CacheError> {
        let written = self.write(span, tokens, KeepUndo::of(keep_undo))?;
        let saved = self.attend_unless_kept(span, tokens, written, false)?;
        Ok(saved.placement.unplace(&saved.attended.out_bhnd))
    }

    /// Recomputation of a cell: replays the choice, or attends again where the chunk stands in the cache already.
    pub(super) fn recompute(&mut self, span: &ChunkSpan, tokens: Qkv<'_>) -> Result<(Tensor, ChunkSaved), CacheError> {
        self.cache.enter(span);
        let written = if self.cache.num_chunks() == span.index + 1 {
            let undo = self.fetch_undo(span)?;
            let (k, v) = self.cache.recompose(span, &undo, tokens.k_bgnd, tokens.v_bgnd);
            let placement = self.cache.placement(span, &undo);
            self.undo.put(span.index, undo, KeepUndo::Resident)?;
            (k, v, placement)
        } else {
            self.write(span, tokens, KeepUndo::Resident)?
        };
        let saved = self.attend_unless_kept(span, tokens, written, true)?;
        Ok((saved.placement.unplace(&saved.attended.out_bhnd), saved))
    }

    /// Backward of one chunk's attention: adds to the cache's gradient, unwinds it and the cache, returns the gradients of queries, keys
    /// and values, and of the drains, where they are trained.
    pub(super) fn backward(
        &mut self,
        span: &ChunkSpan,
        saved: &ChunkSaved,
        dout: Option<&Tensor>,
        trains_drain: bool,
    ) -> Result<[Option<Tensor>; 4], CacheError> {
        self.cache.enter(span);
        let kind = accumulation_kind(saved.own.q.kind());
        let (size, past) = (self.cache.size(), self.past(span, self.seen_until(span, &saved.placement, saved.own.rule).as_ref()));
        let grads = self.grads.get_or_insert_with(|| CacheGrads::zeros(&size, kind, saved.own.q.device()));
        let mut ddrain = None;
        let dq = dout.map(|dout| {
            let dout = saved.placement.place(dout);
            let part = attention::attend_backward(&dout, saved.own.beside(&past), &past.parts(), &saved.attended);
            grads.add((&part.dk_bgnd, &part.dv_bgnd), &part.past);
            let drain_h = saved.own.drain_h.as_ref().filter(|_| trains_drain);
            ddrain = drain_h.map(|drain_h| drain_backward(&dout, &saved.attended, drain_h).to_kind(drain_h.kind()));
            saved.placement.unplace(&part.dq_bhnd)
        });
        let undo = self.undo.take(span.index).ok_or_else(|| self.cache.missing_undo(span))?;
        let (dk, dv) = grads.unwind(&undo);
        self.cache.unwind(span, &undo)?;
        let own = |d: &Tensor| saved.placement.unplace(d).to_kind(saved.own.k.kind());
        let dq = dq.unwrap_or_else(|| saved.placement.unplace(&saved.own.q.zeros_like()));
        Ok([Some(dq), Some(own(&dk)), Some(own(&dv)), ddrain])
    }

    /// Restores the cache to what it was before `span`: the cell that follows makes the undo entry again when it writes.
    pub(super) fn unwind(&mut self, span: &ChunkSpan) -> Result<(), CacheError> {
        let undo = self.fetch_undo(span)?;
        self.cache.unwind(span, &undo)
    }

    /// Begins to copy the undo entry of a chunk to the device, and its attention's output, where that waits.
    pub(super) fn prefetch(&mut self, span: &ChunkSpan) -> Result<(), CacheError> {
        let device = self.cache.shape().device;
        self.undo.prefetch(span.index, device).ok_or_else(|| self.cache.missing_undo(span))??;
        Ok(self.outputs.as_mut().map_or(Ok(()), |outputs| outputs.prefetch(span.index, device))?)
    }

    fn fetch_undo(&mut self, span: &ChunkSpan) -> Result<Undo, CacheError> {
        let device = self.cache.shape().device;
        Ok(self.undo.fetch(span.index, device).ok_or_else(|| self.cache.missing_undo(span))??)
    }

    /// Brings the layer's quota into force where its chunk has come.
    fn apply_budget(&mut self, span: &ChunkSpan) {
        if let Some(quota) = self.log.quota().filter(|quota| quota.index == span.index) {
            self.cache.apply_budget(quota);
        }
    }

    /// Writes a chunk by its recorded choice.
    fn write(&mut self, span: &ChunkSpan, tokens: Qkv<'_>, keep: KeepUndo) -> Result<InRegion, CacheError> {
        self.cache.enter(span);
        self.apply_budget(span);
        let victims = self.cache.recall(&self.log, span)?;
        let written = self.cache.write(span, victims, tokens.k_bgnd, tokens.v_bgnd)?;
        self.undo.put(span.index, written.undo, keep)?;
        Ok((written.k_bgnd, written.v_bgnd, written.placement))
    }

    /// Past and chunk side by side. An undo log that rounds brings the chunk's own entries back rounded, which it must see as they were.
    pub(super) fn joined(&self) -> Option<(Tensor, Tensor)> {
        if self.undo.store.form() == Form::Plain { self.cache.joined() } else { None }
    }

    /// How many of the region's columns see each filled slot, where the layer has a window.
    pub(super) fn seen_until(&self, span: &ChunkSpan, placement: &Placement, rule: ScoreRule) -> Option<Tensor> {
        rule.window.map(|window| self.cache.seen_until(span, placement, window))
    }

    /// What the chunk written last sees in addition to itself.
    fn past(&self, span: &ChunkSpan, seen_until_bgc: Option<&Tensor>) -> PastPages {
        let region = self.cache.region(span);
        // Kernels that see all at once know no window.
        let joined = if seen_until_bgc.is_none() { self.joined() } else { None };
        PastPages { pages: self.pages(region, seen_until_bgc), joined }
    }

    /// The first `count` slots by page.
    pub(super) fn pages(&self, count: i64, seen_until_bgc: Option<&Tensor>) -> Vec<PastPage> {
        let (in_use_bgp, mut start) = (self.cache.in_use(count), 0);
        let page = |(k, v): (Tensor, Tensor)| {
            let (first, slots) = (start, k.size()[2]);
            start += slots;
            let of_page = |all: &Tensor| all.narrow(2, first, slots);
            PastPage { k, v, in_use_bgp: in_use_bgp.as_ref().map(of_page), seen_until_bgp: seen_until_bgc.map(of_page) }
        };
        self.cache.past(count).into_iter().map(page).collect()
    }

    /// What a chunk's backward needs. Attention's output is the one that has waited, where it has; the chunk's cell uses it last.
    fn attend_unless_kept(
        &mut self,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        written: InRegion,
        is_last: bool,
    ) -> Result<ChunkSaved, CacheError> {
        let (device, outputs) = (self.cache.shape().device, self.outputs.as_mut());
        let kept = outputs.map(|outputs| outputs.find(span.index, device, is_last)).transpose()?;
        let Some(attended) = kept.flatten() else {
            let (saved, ..) = self.attend(span, tokens, written, None);
            if let Some(outputs) = self.outputs.as_mut().filter(|_| !is_last) {
                outputs.put(span.index, &saved.attended);
            }
            return Ok(saved);
        };
        let (k, v, placement) = written;
        let seen_until_bgc = self.seen_until(span, &placement, tokens.rule);
        let own = self.own(span, tokens, (k, v), (&placement, seen_until_bgc.as_ref()));
        Ok(ChunkSaved { own, attended, placement })
    }

    /// Also the attention mass, where a policy has announced that it will ask, and the kernel sums it while it attends.
    fn attend(
        &self,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        (k, v, placement): InRegion,
        asked: Option<Queries>,
    ) -> (ChunkSaved, PastPages, Option<Tensor>) {
        let (chunk, past) = self.sides(span, tokens, (k, v), &placement);
        let (attended, mass) = attention::attend_and_sum(chunk.beside(&past), &past.parts(), asked);
        (ChunkSaved { own: chunk, attended, placement }, past, mass)
    }

    /// The chunk written last, whose keys and values its own queries see as `k` and `v`, and what it sees beside.
    pub(super) fn sides(
        &self,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        (k, v): (Tensor, Tensor),
        placement: &Placement,
    ) -> (OwnKeys, PastPages) {
        let seen_until_bgc = self.seen_until(span, placement, tokens.rule);
        let own = self.own(span, tokens, (k, v), (placement, seen_until_bgc.as_ref()));
        (own, self.past(span, seen_until_bgc.as_ref()))
    }

    fn own(
        &self,
        span: &ChunkSpan,
        tokens: Qkv<'_>,
        (k, v): (Tensor, Tensor),
        (placement, seen_until_bgc): (&Placement, Option<&Tensor>),
    ) -> OwnKeys {
        // A chunk that is no longer than the window sees itself, where no older entry stands among its own.
        let sees_itself = tokens.rule.window.is_none_or(|window| window >= span.len) && !span.is_ragged();
        // A copy, as a part would keep the whole.
        let own = |all: &Tensor| all.narrow(2, self.cache.region(span), span.len as i64).copy();
        OwnKeys {
            q: placement.place(tokens.q_bhnd),
            k,
            v,
            rule: tokens.rule,
            drain_h: tokens.drain_h.map(Tensor::shallow_clone),
            in_use_bgn: self.cache.region_in_use(span),
            seen_until_bgn: seen_until_bgc.filter(|_| !sees_itself).map(own),
        }
    }
}

/// One run per layer, with an empty cache; their undo entries wait in one store.
pub(super) fn new_layer_states(caches: Vec<LayerCache>, store: &Store) -> Vec<SharedLayer> {
    caches.into_iter().map(|cache| Arc::new(Mutex::new(LayerState::new(cache, store.clone())))).collect()
}

/// Each forked; see [`LayerState::fork`].
pub(super) fn fork_layer_states(layers: &[SharedLayer]) -> Result<Vec<SharedLayer>, CacheError> {
    layers.iter().map(|layer| Ok(Arc::new(Mutex::new(lock(layer).fork()?)))).collect()
}

/// A one-element tensor that carries the order of a layer's operators.
pub(super) fn link(like: &Tensor) -> Tensor {
    Tensor::zeros([1], (like.kind(), like.device()))
}
