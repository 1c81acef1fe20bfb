//! The cache of one layer: slots in tail-resident order, written chunk by chunk and unwound exactly.

use tch::{Device, Kind, Tensor};

use super::moves::{self, Geometry, Moves, put, take, with_retained};
use super::victims::choose;
use super::{CacheError, ChunkSpan, Entries, LayerLog, Placement, Policy, Victims};
use crate::units::LayerIdx;

/// The dimensions of a cache for one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub batch: i64,
    /// KV heads.
    pub groups: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Slots in all.
    pub cache_length: usize,
    /// Slots to allocate at once; fewer than `cache_length` for a cache that grows, or a sequence that is shorter.
    pub allocated: usize,
    /// dtype of keys and values.
    pub kind: Kind,
    /// Where they live.
    pub device: Device,
}

/// What a write overwrote: with it the cache before the write is restored exactly.
#[derive(Debug)]
pub struct Undo {
    pub(super) at: Geometry,
    pub(super) moves: Option<Moves>,
    /// Keys and values `(B·G·e, D)` and positions `(B·G·e)` of the candidates, on the host.
    saved: Option<(Tensor, Tensor, Tensor)>,
}

/// A written chunk: its entries as the region holds them, and what they overwrote.
#[derive(Debug)]
pub struct Written {
    /// Keys of the region's columns `(B, G, n, D)`: kept entries, then tokens.
    pub k_bgnd: Tensor,
    /// Values likewise.
    pub v_bgnd: Tensor,
    /// For the way back.
    pub undo: Undo,
}

/// Keys, values, positions and scores of one layer.
#[derive(Debug)]
pub struct LayerCache {
    layer: LayerIdx,
    shape: Shape,
    k_bgcd: Tensor,
    v_bgcd: Tensor,
    position_bgc: Tensor,
    /// Positions by slot while every choice so far was the same for all rows and heads.
    host_positions: Option<Vec<i64>>,
    score_bgc: Option<Tensor>,
    filled: usize,
    stands: usize,
    prefill: usize,
}

impl LayerCache {
    /// An empty cache. `prefill` is the length of the prefill span.
    pub fn new(layer: LayerIdx, shape: Shape, prefill: usize) -> Self {
        let size = [shape.batch, shape.groups, shape.allocated.max(1) as i64, shape.head_dim];
        let opts = (shape.kind, shape.device);
        Self {
            layer,
            shape,
            k_bgcd: Tensor::zeros(size, opts),
            v_bgcd: Tensor::zeros(size, opts),
            position_bgc: Tensor::full(&size[..3], -1, (Kind::Int64, shape.device)),
            host_positions: Some(Vec::new()),
            score_bgc: None,
            filled: 0,
            stands: 0,
            prefill,
        }
    }

    /// Empties the cache; the buffers stay.
    pub fn reset(&mut self, prefill: usize) {
        self.host_positions = Some(Vec::new());
        (self.score_bgc, self.filled, self.stands, self.prefill) = (None, 0, 0, prefill);
    }

    /// The dimensions.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many chunks the cache holds, pieces of the prefill span counted one by one.
    pub fn stands(&self) -> usize {
        self.stands
    }

    /// Size of the buffers `(B, G, C, D)`.
    pub fn size(&self) -> Vec<i64> {
        self.k_bgcd.size()
    }

    /// Positions held by the filled slots `(B, G, filled)`, −1 where a row has none.
    pub fn positions(&self) -> Tensor {
        self.position_bgc.narrow(2, 0, self.filled as i64)
    }

    /// Keys and values of the filled slots `(B, G, filled, D)`.
    pub fn entries(&self) -> (Tensor, Tensor) {
        self.past(self.filled as i64)
    }

    /// Cumulative scores of the filled slots `(B, G, filled)`.
    pub fn scores(&self) -> Option<Tensor> {
        self.score_bgc.as_ref().map(|s| s.narrow(2, 0, self.filled as i64))
    }

    /// The first `count` slots, `(B, G, count, D)` each: the past of a chunk whose region begins there.
    pub fn past(&self, count: i64) -> (Tensor, Tensor) {
        (self.k_bgcd.narrow(2, 0, count), self.v_bgcd.narrow(2, 0, count))
    }

    /// The first slot of the region of the chunk that was written last.
    pub fn region(&self, span: &ChunkSpan) -> i64 {
        (self.filled - span.len) as i64
    }

    /// What `policy` evicts for the next chunk; `None` where everything fits.
    pub fn decide(&self, policy: &dyn Policy, span: &ChunkSpan) -> Option<Victims> {
        let num_evicted = span.evictions(self.filled, self.shape.cache_length);
        let score_bgc = self.scores();
        let entries = Entries {
            filled: self.filled,
            cache_length: self.shape.cache_length,
            num_evicted,
            prefill: self.prefill,
            next_position: span.start,
            position_bgc: self.positions(),
            score_bgc: score_bgc.as_ref(),
        };
        (num_evicted > 0).then(|| choose(policy, &entries, self.host_positions.as_deref()))
    }

    /// The choice recorded in `log` for `span`.
    pub fn recall<'a>(&self, log: &'a LayerLog, span: &ChunkSpan) -> Result<Option<&'a Victims>, CacheError> {
        log.expect(self.layer, span, span.evictions(self.filled, self.shape.cache_length))
    }

    /// Writes a chunk over its victims.
    ///
    /// # Shapes
    /// `k`, `v (B, G, n, D)` by the tokens' own columns.
    pub fn write(&mut self, span: &ChunkSpan, victims: Option<&Victims>, k: &Tensor, v: &Tensor) -> Result<Written, CacheError> {
        self.check_order("write", span, self.stands == span.index)?;
        self.grow(span);
        let at = self.geometry(span);
        let kept = span.retained(self.filled, self.shape.cache_length);
        let moves = victims.map(|x| moves::plan(at, x, span, &kept, self.shape.device));
        let saved = moves.as_ref().map(|m| self.move_entries(m));
        let placement = Placement::new(span, &kept, self.shape.device);
        let positions = placement.positions(span, self.shape.device).expand([at.batch, at.groups, at.len], false);
        let (k, v, positions) = compose(&placement, moves.as_ref(), saved.as_ref(), (k, v, &positions));
        for (buffer, chunk) in [(&self.k_bgcd, &k), (&self.v_bgcd, &v), (&self.position_bgc, &positions)] {
            buffer.narrow(2, at.region(), at.len).copy_(chunk);
        }
        if let Some(score) = &self.score_bgc {
            let _ = score.narrow(2, at.region(), at.len).zero_();
        }
        self.write_host_positions(span, at, victims);
        (self.filled, self.stands) = (at.top as usize, self.stands + 1);
        let to_host = |(k, v, p): (Tensor, Tensor, Tensor)| (k.to(Device::Cpu), v.to(Device::Cpu), p.to(Device::Cpu));
        Ok(Written { k_bgnd: k, v_bgnd: v, undo: Undo { at, moves, saved: saved.map(to_host) } })
    }

    /// The region's entries for a chunk that stands in the cache already, from its tokens and what it overwrote.
    ///
    /// # Shapes
    /// `k`, `v (B, G, n, D)` by the tokens' own columns; out by the region's.
    pub fn recompose(&self, span: &ChunkSpan, undo: &Undo, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
        let kept = span.retained(undo.at.filled as usize, self.shape.cache_length);
        let placement = Placement::new(span, &kept, self.shape.device);
        let saved = undo.saved_on(self.shape.device);
        let positions = self.position_bgc.narrow(2, undo.at.region(), undo.at.len);
        let (k, v, _) = compose(&placement, undo.moves.as_ref(), saved.as_ref(), (k, v, &positions));
        (k, v)
    }

    /// How the tokens of the chunk written last stand in its region.
    pub fn placement(&self, span: &ChunkSpan, undo: &Undo) -> Placement {
        Placement::new(span, &span.retained(undo.at.filled as usize, self.shape.cache_length), self.shape.device)
    }

    /// Restores the cache to what it was before `span` was written.
    pub fn unwind(&mut self, span: &ChunkSpan, undo: &Undo) -> Result<(), CacheError> {
        self.check_order("unwind", span, self.stands == span.index + 1)?;
        // Scores and host positions are not needed backwards: choices are replayed.
        (self.score_bgc, self.host_positions) = (None, None);
        if let (Some(moves), Some((k, v, position))) = (&undo.moves, undo.saved_on(self.shape.device)) {
            for (buffer, saved) in [(&self.k_bgcd, k), (&self.v_bgcd, v), (&self.position_bgc, position)] {
                put(buffer, &moves.from, &take(buffer, &moves.to));
                #[cfg(test)]
                if crate::sabotage::is_active(crate::sabotage::Sabotage::UndoDropped) {
                    continue;
                }
                put(buffer, &moves.to, &saved);
            }
        }
        (self.filled, self.stands) = (undo.at.filled as usize, self.stands - 1);
        Ok(())
    }

    /// Adds what the policy makes of the attention paid by the chunk written last.
    ///
    /// # Shapes
    /// `paid_bgc (B, G, filled)`.
    pub fn observe(&mut self, policy: &dyn Policy, paid_bgc: Tensor) {
        let like = &self.position_bgc;
        let score = self.score_bgc.get_or_insert_with(|| like.zeros_like().to_kind(Kind::Float));
        let _ = score.narrow(2, 0, self.filled as i64).g_add_(&policy.observe(paid_bgc).to_kind(Kind::Float));
    }

    fn geometry(&self, span: &ChunkSpan) -> Geometry {
        let top = (self.filled + span.len).min(self.shape.cache_length);
        Geometry {
            batch: self.shape.batch,
            groups: self.shape.groups,
            slots: self.k_bgcd.size()[2],
            filled: self.filled as i64,
            top: top as i64,
            len: span.len as i64,
        }
    }

    /// Moves the region's survivors into the victims' slots and returns what stood there.
    fn move_entries(&self, moves: &Moves) -> (Tensor, Tensor, Tensor) {
        let replace = |buffer: &Tensor| {
            let (old, moved) = (take(buffer, &moves.to), take(buffer, &moves.from));
            put(buffer, &moves.to, &moved);
            old
        };
        #[cfg(test)]
        if crate::sabotage::is_active(crate::sabotage::Sabotage::ValueMovedWithoutKey) {
            return (take(&self.k_bgcd, &moves.to), replace(&self.v_bgcd), replace(&self.position_bgc));
        }
        if let Some(score) = &self.score_bgc {
            let _ = replace(score);
        }
        (replace(&self.k_bgcd), replace(&self.v_bgcd), replace(&self.position_bgc))
    }

    /// Keeps the host's copy of the positions in step, or gives it up when heads begin to differ.
    fn write_host_positions(&mut self, span: &ChunkSpan, at: Geometry, victims: Option<&Victims>) {
        let Some(mut positions) = self.host_positions.take() else { return };
        if let Some(Victims::PerHead(_)) = victims {
            return;
        }
        if let Some(Victims::Shared(slots)) = victims {
            let (region, filled) = (at.region() as usize, at.filled as usize);
            let mut to: Vec<usize> = slots.iter().map(|&s| s as usize).filter(|&s| s < region).collect();
            to.sort_unstable();
            let survivors = (region..filled).filter(|&s| !slots.contains(&(s as i64)));
            for (to, from) in to.into_iter().zip(survivors) {
                positions[to] = positions[from];
            }
        }
        positions.truncate(at.region() as usize);
        positions.extend(span.start as i64..(span.start + span.len) as i64);
        self.host_positions = Some(positions);
    }

    /// Doubles the buffers until the chunk fits, for a cache that grows.
    fn grow(&mut self, span: &ChunkSpan) {
        let needed = (self.filled + span.len).min(self.shape.cache_length);
        let have = self.k_bgcd.size()[2] as usize;
        if needed <= have {
            return;
        }
        let want = needed.max(2 * have).min(self.shape.cache_length);
        let enlarge = |x: &Tensor, fill: f64| {
            let mut size = x.size();
            size[2] = want as i64;
            let larger = Tensor::full(&size[..], fill, (x.kind(), x.device()));
            larger.narrow(2, 0, have as i64).copy_(x);
            larger
        };
        self.k_bgcd = enlarge(&self.k_bgcd, 0.0);
        self.v_bgcd = enlarge(&self.v_bgcd, 0.0);
        self.position_bgc = enlarge(&self.position_bgc, -1.0);
        self.score_bgc = self.score_bgc.as_ref().map(|s| enlarge(s, 0.0));
    }

    /// The error for an undo entry that is not there.
    pub(crate) fn missing_undo(&self, span: &ChunkSpan) -> CacheError {
        CacheError::OutOfOrder { layer: self.layer, action: "unwind", chunk: span.index, stands: self.stands }
    }

    fn check_order(&self, action: &'static str, span: &ChunkSpan, in_order: bool) -> Result<(), CacheError> {
        if in_order {
            return Ok(());
        }
        Err(CacheError::OutOfOrder { layer: self.layer, action, chunk: span.index, stands: self.stands })
    }
}

impl Undo {
    fn saved_on(&self, device: Device) -> Option<(Tensor, Tensor, Tensor)> {
        self.saved.as_ref().map(|(k, v, p)| (k.to(device), v.to(device), p.to(device)))
    }
}

/// The region's columns: the tokens in their places, and what the rows keep in front of them.
fn compose(
    placement: &Placement,
    moves: Option<&Moves>,
    saved: Option<&(Tensor, Tensor, Tensor)>,
    (k, v, positions): (&Tensor, &Tensor, &Tensor),
) -> (Tensor, Tensor, Tensor) {
    let (k, v) = (placement.place(k), placement.place(v));
    match (moves.and_then(|m| m.retained.as_ref()), saved) {
        (Some(retained), Some((saved_k, saved_v, saved_position))) => (
            with_retained(&k, saved_k, retained),
            with_retained(&v, saved_v, retained),
            with_retained(positions, saved_position, retained),
        ),
        _ => (k, v, positions.shallow_clone()),
    }
}
