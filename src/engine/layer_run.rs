//! One layer's cache during a step, with the logs that belong to it: what the three kinds of attention below share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Tensor};

use crate::cache::{CacheError, CacheGrads, ChunkSpan, LayerCache, LayerLog, Placement, Policy, Shape, Undo};
use crate::ops::attention::{self, Attended, Chunk, Past, accumulation_kind, attention_paid};
use crate::units::LayerIdx;

/// The state of one layer.
#[derive(Debug)]
pub(super) struct LayerRun {
    pub(super) cache: LayerCache,
    pub(super) log: LayerLog,
    /// By chunk; `None` where the entry is not kept or has been used.
    undo: Vec<Option<Undo>>,
    grads: Option<CacheGrads>,
}

/// A layer's state, shared with the autograd nodes that unwind it.
pub(super) type SharedRun = Arc<Mutex<LayerRun>>;

/// Locks a run; a poisoned lock means that a panic is on its way up already.
pub(super) fn lock(run: &SharedRun) -> MutexGuard<'_, LayerRun> {
    run.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queries, keys and values of one chunk, by the tokens' own columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) scale: f64,
}

/// What a chunk's backward needs, and nothing of the size of the cache.
#[derive(Debug)]
pub(super) struct Saved {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    placement: Placement,
    scale: f64,
}

impl LayerRun {
    pub(super) fn new(layer: LayerIdx, shape: Shape, prefill: usize) -> Self {
        Self { cache: LayerCache::new(layer, shape, prefill), log: LayerLog::default(), undo: Vec::new(), grads: None }
    }

    /// Begins again at the first chunk; the replay log stays.
    pub(super) fn reset(&mut self, prefill: usize) {
        self.cache.reset(prefill);
        self.undo.clear();
        self.grads = None;
    }

    /// Forward phase: chooses the victims, writes, attends, lets the policy observe.
    pub(super) fn decide(
        &mut self,
        policy: &dyn Policy,
        span: &ChunkSpan,
        tokens: Tokens<'_>,
        keep_undo: bool,
        is_scored: bool,
    ) -> Result<Tensor, CacheError> {
        let victims = self.cache.decide(policy, span);
        self.log.record(victims);
        let saved = self.write_and_attend(span, tokens, keep_undo)?;
        if is_scored {
            let (k, v) = self.cache.past(self.cache.region(span));
            let lse = saved.placement.silence(&saved.attended.lse_bhn);
            self.cache.observe(policy, attention_paid(saved.chunk(), past(&k, &v), &lse));
        }
        Ok(saved.placement.unplace(&saved.attended.out_bhnd))
    }

    /// Replays the recorded choice.
    pub(super) fn replay(&mut self, span: &ChunkSpan, tokens: Tokens<'_>) -> Result<Tensor, CacheError> {
        let saved = self.write_and_attend(span, tokens, true)?;
        Ok(saved.placement.unplace(&saved.attended.out_bhnd))
    }

    /// Recomputation of a cell: replays the choice, or attends again where the chunk stands in the cache already.
    pub(super) fn recompute(&mut self, span: &ChunkSpan, tokens: Tokens<'_>) -> Result<(Tensor, Saved), CacheError> {
        let saved = if self.cache.stands() == span.index + 1 {
            let undo = self.undo_of(span)?;
            let (k, v) = self.cache.recompose(span, undo, tokens.k, tokens.v);
            let placement = self.cache.placement(span, undo);
            self.attend(span, tokens, (k, v), placement)
        } else {
            self.write_and_attend(span, tokens, true)?
        };
        Ok((saved.placement.unplace(&saved.attended.out_bhnd), saved))
    }

    /// Backward of one chunk's attention: adds to the cache's gradient, unwinds it and the cache, returns `(dq, dk, dv)`.
    pub(super) fn backward(
        &mut self,
        span: &ChunkSpan,
        saved: &Saved,
        dout: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor, Tensor), CacheError> {
        let kind = accumulation_kind(saved.q.kind());
        let size = self.cache.size();
        let grads = self.grads.get_or_insert_with(|| CacheGrads::zeros(&size, kind, saved.q.device()));
        let dq = dout.map(|dout| {
            let (k, v) = self.cache.past(self.cache.region(span));
            let part = attention::attend_backward(&saved.placement.place(dout), saved.chunk(), past(&k, &v), &saved.attended);
            grads.add((&part.dk_bgnd, &part.dv_bgnd), part.past.as_ref());
            saved.placement.unplace(&part.dq_bhnd)
        });
        let undo = self.undo.get_mut(span.index).and_then(Option::take).ok_or_else(|| self.cache.missing_undo(span))?;
        let (dk, dv) = grads.unwind(&undo);
        self.cache.unwind(span, &undo)?;
        let own = |d: &Tensor| saved.placement.unplace(d).to_kind(saved.k.kind());
        Ok((dq.unwrap_or_else(|| saved.placement.unplace(&saved.q.zeros_like())), own(&dk), own(&dv)))
    }

    /// Restores the cache to what it was before `span`; the undo entry stays for the backward.
    pub(super) fn unwind(&mut self, span: &ChunkSpan) -> Result<(), CacheError> {
        let undo = self.undo.get(span.index).and_then(Option::as_ref).ok_or_else(|| self.cache.missing_undo(span))?;
        self.cache.unwind(span, undo)
    }

    fn undo_of(&self, span: &ChunkSpan) -> Result<&Undo, CacheError> {
        self.undo.get(span.index).and_then(Option::as_ref).ok_or_else(|| self.cache.missing_undo(span))
    }

    fn write_and_attend(&mut self, span: &ChunkSpan, tokens: Tokens<'_>, keep_undo: bool) -> Result<Saved, CacheError> {
        let victims = self.cache.recall(&self.log, span)?;
        let written = self.cache.write(span, victims, tokens.k, tokens.v)?;
        let placement = self.cache.placement(span, &written.undo);
        let saved = self.attend(span, tokens, (written.k_bgnd, written.v_bgnd), placement);
        if self.undo.len() <= span.index {
            self.undo.resize_with(span.index + 1, || None);
        }
        self.undo[span.index] = keep_undo.then_some(written.undo);
        Ok(saved)
    }

    fn attend(&self, span: &ChunkSpan, tokens: Tokens<'_>, (k, v): (Tensor, Tensor), placement: Placement) -> Saved {
        let q = placement.place(tokens.q);
        let (past_k, past_v) = self.cache.past(self.cache.region(span));
        let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, scale: tokens.scale };
        let attended = attention::attend(chunk, past(&past_k, &past_v));
        Saved { q, k, v, attended, placement, scale: tokens.scale }
    }
}

impl Saved {
    fn chunk(&self) -> Chunk<'_> {
        Chunk { q_bhnd: &self.q, k_bgnd: &self.k, v_bgnd: &self.v, scale: self.scale }
    }
}

fn past<'a>(k: &'a Tensor, v: &'a Tensor) -> Option<Past<'a>> {
    (k.size()[2] > 0).then_some(Past { k_bgpd: k, v_bgpd: v })
}

/// One empty run per layer.
pub(super) fn fresh(layers: &[Shape], prefill: usize) -> Vec<SharedRun> {
    let run = |(l, shape): (usize, &Shape)| Arc::new(Mutex::new(LayerRun::new(LayerIdx(l), *shape, prefill)));
    layers.iter().enumerate().map(run).collect()
}

/// A one-element tensor that carries the order of a layer's operators.
pub(super) fn link(like: &Tensor) -> Tensor {
    Tensor::zeros([1], (like.kind(), like.device()))
}

/// Moves a tensor that waits to the host.
pub(super) fn to_host(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu)
}
