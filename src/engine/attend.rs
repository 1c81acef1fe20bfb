//! How a column's layers reach their caches: choosing (forward phase), replaying, and replaying under autograd.

use tch::{Kind, Tensor, no_grad};

use super::layer_state::{SharedLayer, link, lock};
use crate::cache::{CacheError, ChunkSpan, Policy};
use crate::model::{Attend, AttendError, Qkv};
use crate::native::attach_backward;
use crate::units::LayerIdx;

/// A column's chunks; attention goes chunk by chunk, everything else of a layer runs over the whole column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column<'a> {
    pub(super) spans: &'a [ChunkSpan],
    pub(super) runs: &'a [SharedLayer],
    /// First layer, and the one behind the last, of those that take turns.
    pub(super) layers: (usize, usize),
}

impl Column<'_> {
    /// Lets one layer work: its cache is brought to the device, the next one's set out on its way, and its own sent back when it
    /// is done, unless its turn comes again at once. Without offloading all of this is nothing.
    fn turn<T>(&self, layer: LayerIdx, next: usize, work: impl FnOnce() -> Result<T, AttendError>) -> Result<T, AttendError> {
        for layer in [layer.0, next] {
            lock(&self.runs[layer]).cache.bring();
        }
        let done = work()?;
        if self.takes_turns() && next != layer.0 {
            lock(&self.runs[layer.0]).cache.park();
        }
        Ok(done)
    }

    /// Whether there are layers that wait while one works and one is on its way.
    pub(super) fn takes_turns(&self) -> bool {
        self.layers.1 - self.layers.0 > 2
    }

    /// The layer whose turn is next on the way up.
    fn above(&self, layer: LayerIdx) -> usize {
        if layer.0 + 1 < self.layers.1 { layer.0 + 1 } else { self.layers.0 }
    }

    /// Calls `attend` for each chunk with its part of q, k, v and joins the outputs.
    fn by_chunk(
        &self,
        qkv: &Qkv<'_>,
        mut attend: impl FnMut(&ChunkSpan, [Tensor; 3]) -> Result<Tensor, AttendError>,
    ) -> Result<Tensor, AttendError> {
        let first = self.spans[0].start;
        let mut outs = Vec::with_capacity(self.spans.len());
        for span in self.spans {
            let part = |x: &Tensor| x.narrow(2, (span.start - first) as i64, span.len as i64);
            outs.push(attend(span, [part(qkv.q_bhnd), part(qkv.k_bgnd), part(qkv.v_bgnd)])?);
        }
        Ok(if outs.len() == 1 { outs.remove(0) } else { Tensor::cat(&outs, 2) })
    }
}

/// Forward phase: policies choose, and what they choose is recorded.
pub(super) struct Deciding<'a> {
    pub(super) column: Column<'a>,
    pub(super) policies: &'a [Box<dyn Policy>],
    /// The lowest layer whose undo log is kept.
    pub(super) keep_undo_from: usize,
}

impl Attend for Deciding<'_> {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
        let (policy, run) = (&*self.policies[layer.0], &self.column.runs[layer.0]);
        let keep_undo = layer.0 >= self.keep_undo_from;
        self.column.turn(layer, self.column.above(layer), || {
            self.column.by_chunk(&qkv, |span, [q, k, v]| {
                let tokens = Qkv { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, rule: qkv.rule };
                lock(run).decide(policy, span, tokens, keep_undo).map_err(refused)
            })
        })
    }
}

/// Follows recorded choices: in a forward phase that is given its log, and in a sequence's second forward, which makes the sequence's undo log
/// and its final caches.
pub(super) struct Replaying<'a> {
    pub(super) column: Column<'a>,
    /// The lowest layer whose undo log is kept.
    pub(super) keep_undo_from: usize,
}

impl Attend for Replaying<'_> {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
        let run = &self.column.runs[layer.0];
        let keep_undo = layer.0 >= self.keep_undo_from;
        self.column.turn(layer, self.column.above(layer), || {
            self.column.by_chunk(&qkv, |span, [q, k, v]| {
                lock(run).replay(span, Qkv { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, rule: qkv.rule }, keep_undo).map_err(refused)
            })
        })
    }
}

/// A cell's recomputation with autograd: one custom node per layer and chunk, over the shared buffers.
pub(super) struct Differentiating<'a> {
    pub(super) column: Column<'a>,
    /// The leaf at which every layer's chain begins.
    pub(super) chain: &'a Tensor,
    /// The ends of the chains, which are roots of the backward.
    pub(super) chain_ends: Vec<Tensor>,
}

impl<'a> Differentiating<'a> {
    pub(super) fn new(column: Column<'a>, chain: &'a Tensor) -> Self {
        Self { column, chain, chain_ends: Vec::new() }
    }
}

impl Attend for Differentiating<'_> {
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv<'_>) -> Result<Tensor, AttendError> {
        let run = &self.column.runs[layer.0];
        let mut chain = self.chain.shallow_clone();
        #[cfg(test)]
        if crate::sabotage::is_active(crate::sabotage::Sabotage::ChainRemoved) {
            chain = chain.detach();
        }
        let column = self.column;
        // The backward comes from above: the uppermost layer's next turn is its own.
        let next = if layer.0 + 1 < column.layers.1 { layer.0 + 1 } else { layer.0 };
        let out = column.turn(layer, next, || {
            column.by_chunk(&qkv, |span, [q, k, v]| {
                let turn = OffloadMoves::of(column, layer, span);
                let (out, next) =
                    cached_attention((run, turn), span, Qkv { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, rule: qkv.rule }, &chain)?;
                chain = next;
                Ok(out)
            })
        })?;
        #[cfg(test)]
        if crate::sabotage::is_active(crate::sabotage::Sabotage::ChainRemoved) {
            return Ok(out);
        }
        self.chain_ends.push(chain);
        Ok(out)
    }
}

/// What a chunk's backward does for offloaded caches beside its own: the column's last chunk comes first, and sets the layer below on
/// its way; the first chunk comes last, and sends its own layer back.
struct OffloadMoves {
    below: Option<SharedLayer>,
    parks: bool,
}

impl OffloadMoves {
    fn of(column: Column<'_>, layer: LayerIdx, span: &ChunkSpan) -> Self {
        let is = |edge: Option<&ChunkSpan>| edge.is_some_and(|edge| edge.index == span.index);
        let below = is(column.spans.last()) && layer.0 > column.layers.0;
        Self { below: below.then(|| column.runs[layer.0 - 1].clone()), parks: is(column.spans.first()) && column.takes_turns() }
    }
}

/// The fused operator: writes the chunk into the shared buffers and attends; its backward attends backward over the buffers as
/// they stand, adds to their gradient, and unwinds both.
///
/// The node must exist and run whatever is trained, and in reverse order of the chunks: so it takes and returns a one-element
/// tensor that requires grad. Without that chain, LoRA on the MLP alone would leave layer 0's cache wound up.
fn cached_attention(
    (run, turn): (&SharedLayer, OffloadMoves),
    span: &ChunkSpan,
    Qkv { q_bhnd: q, k_bgnd: k, v_bgnd: v, rule }: Qkv<'_>,
    chain: &Tensor,
) -> Result<(Tensor, Tensor), AttendError> {
    let needs = [q.requires_grad(), k.requires_grad(), v.requires_grad()];
    let detached = [q.detach(), k.detach(), v.detach()];
    let (out, saved, next) = no_grad(|| {
        let tokens = Qkv { q_bhnd: &detached[0], k_bgnd: &detached[1], v_bgnd: &detached[2], rule };
        let (out, saved) = lock(run).recompute(span, tokens).map_err(refused)?;
        // Autograd hangs its history on a tensor of its own; its numbers are those that the backward keeps.
        Ok::<_, AttendError>((out.detach(), saved, link(chain)))
    })?;
    let (shared, here) = (run.clone(), span.clone());
    attach_backward(&[q, k, v, chain], &[&out, &next], move |grads| {
        lock(&shared).cache.bring();
        if let Some(below) = &turn.below {
            lock(below).cache.bring();
        }
        let (dq, dk, dv) = no_grad(|| lock(&shared).backward(&here, &saved, grads[0].as_ref())).map_err(|e| e.to_string())?;
        if turn.parks {
            lock(&shared).cache.park();
        }
        let given = |needed: bool, grad: Tensor| needed.then_some(grad);
        let end = Tensor::zeros([1], (dq.kind(), dq.device()));
        Ok(vec![given(needs[0], dq), given(needs[1], dk), given(needs[2], dv), Some(end)])
    })
    .map_err(|e| AttendError::new(e.to_string()))?;
    Ok((out, next))
}

fn refused(error: CacheError) -> AttendError {
    AttendError::caused_by(error)
}

/// The leaf of the chains: requires grad, whatever is trained.
pub(super) fn chain_leaf(kind: Kind, device: tch::Device) -> Tensor {
    Tensor::zeros([1], (kind, device)).set_requires_grad(true)
}
