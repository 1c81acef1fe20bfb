//! The tail-resident move: what leaves, what moves into its place, and the way back.
//!
//! After a write the chunk stands in the last of the filled slots, in order; a victim among them "moves" onto itself. `docs/METHOD.md`, section
//! 3, has an example.

use tch::{Device, Kind, Tensor};

use super::{ChunkSpan, Victims};
use crate::native::cuda::on_device;

/// Where a write happens: which slots there were, and which the chunk takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) batch: i64,
    pub(super) groups: i64,
    /// Slots allocated, the stride between heads.
    pub(super) slots: i64,
    pub(super) filled: i64,
    pub(super) top: i64,
    pub(super) len: i64,
}

impl Geometry {
    pub(super) fn region(&self) -> i64 {
        self.top - self.len
    }
}

/// The moves of one write, as indices into a buffer seen as `(B·G·slots, …)`.
#[derive(Debug)]
pub(super) struct Moves {
    /// Evicted slots, those inside the region last; `(B·G·e)`.
    pub(super) to: Tensor,
    /// The region's old slots in matching order; `(B·G·e)`.
    pub(super) from: Tensor,
    /// Present for a chunk in which some sequence keeps candidates.
    pub(super) retained: Option<Retained>,
}

impl Moves {
    /// Moves the region's survivors of a plane `(B, G, C, …)` into the slots of those that leave.
    pub(super) fn apply(&self, plane: &Tensor) {
        let mut rows = in_rows(plane);
        let _ = rows.index_copy_(0, &self.to, &rows.index_select(0, &self.from));
    }

    /// Moves as [`Self::apply`] does; returns what it overwrote, `(e, …)`.
    pub(super) fn overwrite(&self, plane: &Tensor) -> Tensor {
        let saved = in_rows(plane).index_select(0, &self.to);
        self.apply(plane);
        saved.view_dtype(plane.kind())
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.to, &self.from].into_iter().chain(self.retained.iter().flat_map(|r| [&r.mask_b1n, &r.saved]))
    }
}

/// Slots at the front of the region that keep candidates which their sequence does not evict.
#[derive(Debug)]
pub(super) struct Retained {
    /// Whether each slot keeps an old entry: `(B, 1, n)`, bool.
    pub(super) mask_b1n: Tensor,
    /// Indices `(B·G·n)` into the saved entries, seen as `(B·G·e, …)`.
    pub(super) saved: Tensor,
}

/// Plans the moves for `victims`, of which sequence `b` keeps the last `retained[b]`.
pub(super) fn plan(at: Geometry, victims: &Victims, span: &ChunkSpan, retained: &[usize], device: Device) -> Moves {
    let e = victims.count() as i64;
    let Geometry { batch, groups, slots, .. } = at;
    let (to, order, from) = match victims.shared() {
        Some(slots) => shared(at, &slots, device),
        None => per_head(at, &victims.slots(batch, groups, device), e),
    };
    let offsets = head_offsets(at, slots, device);
    let [to, from] = [to, from].map(|slot_bge| (slot_bge + &offsets).reshape([-1]));
    // A sequence keeps something only where the chunk is ragged.
    let retained = (span.is_ragged() && retained.iter().any(|&r| r > 0)).then(|| keep(at, &order, retained, e));
    Moves { to, from, retained }
}

/// Where each head begins in a buffer with `stride` entries a head: `(B, G, 1)`.
fn head_offsets(at: Geometry, stride: i64, device: Device) -> Tensor {
    (Tensor::arange(at.batch * at.groups, (Kind::Int64, device)) * stride).view([at.batch, at.groups, 1])
}

/// Host arithmetic for victims that all heads share: `(to, order, from)`, each `(B, G, e)`.
fn shared(at: Geometry, slots: &[i64], device: Device) -> (Tensor, Tensor, Tensor) {
    let region = at.region();
    let mut order: Vec<i64> = (0..slots.len() as i64).collect();
    order.sort_by_key(|&i| (slots[i as usize] >= region, slots[i as usize]));
    let to: Vec<i64> = order.iter().map(|&i| slots[i as usize]).collect();
    let leaves = membership(slots, at.filled as usize);
    let mut from: Vec<i64> = (region..at.filled).collect();
    from.sort_by_key(|&slot| (leaves[slot as usize], slot));
    let spread = |values: &[i64]| on_device(values, device).expand([at.batch, at.groups, values.len() as i64], false);
    (spread(&to), spread(&order), spread(&from))
}

pub(super) fn membership(slots: &[i64], filled: usize) -> Vec<bool> {
    let mut is_member = vec![false; filled];
    for &slot in slots {
        // A log that was tampered with may name any slot.
        if let Some(member) = usize::try_from(slot).ok().and_then(|slot| is_member.get_mut(slot)) {
            *member = true;
        }
    }
    is_member
}

/// The moves `(to, order, from)` where each head has victims of its own, found with tensor operations.
fn per_head(at: Geometry, victim_bge: &Tensor, e: i64) -> (Tensor, Tensor, Tensor) {
    let (region, device) = (at.region(), victim_bge.device());
    // What lies below the region sorts before what lies inside it; within both, by slot.
    let order = (victim_bge - victim_bge.lt(region).to_kind(Kind::Int64) * at.slots).argsort(-1, false);
    let to = victim_bge.gather(2, &order, false);
    let tail =
        Tensor::arange_start(region, (region + e).max(region), (Kind::Int64, device)).expand([at.batch, at.groups, e], false);
    let leaves = Tensor::zeros([at.batch, at.groups, at.slots], (Kind::Int64, device)).scatter_value(2, victim_bge, 1);
    let is_victim = leaves.gather(2, &tail.contiguous(), false);
    let from = tail.gather(2, &(&tail + is_victim * at.slots).argsort(-1, false), false);
    (to, order, from)
}

/// Slot `c` of the region of sequence `b` keeps candidate number `e − retained[b] + c`, found through the inverse of the order of saving.
fn keep(at: Geometry, order_bge: &Tensor, retained: &[usize], e: i64) -> Retained {
    let device = order_bge.device();
    let (mut mask, mut rank) = (Vec::new(), Vec::new());
    for &kept in retained {
        for slot in 0..at.len {
            mask.push(slot < kept as i64);
            rank.push((e - kept as i64 + slot).clamp(0, e - 1));
        }
    }
    let mask_b1n = on_device(&mask, device).view([at.batch, 1, at.len]);
    let rank_bgn = on_device(&rank, device).view([at.batch, 1, at.len]).expand([at.batch, at.groups, at.len], false);
    let saved = order_bge.argsort(-1, false).gather(2, &rank_bgn, false) + head_offsets(at, e, device);
    Retained { mask_b1n, saved: saved.reshape([-1]) }
}

/// The inverse of [`Moves::overwrite`] in one plane, given what it returned; zeros in its place, where there is nothing.
pub(super) fn move_back(plane: &Tensor, Moves { to, from, .. }: &Moves, saved: Option<&Tensor>) {
    let mut rows = in_rows(plane);
    let moved = rows.index_select(0, to);
    let _ = rows.index_copy_(0, from, &moved);
    let _ = match saved {
        Some(saved) => rows.index_copy_(0, to, &saved.view_dtype(rows.kind())),
        None => rows.index_fill_(0, to, 0),
    };
}

/// `(B, G, C, …)` as `(B · G · C, …)`, in the same memory. libtorch copies rows number by number: those of whole 64 bits are seen as i64, fewer
/// numbers of the same bits.
fn in_rows(plane: &Tensor) -> Tensor {
    let size = plane.size();
    let rows = plane.view(&[&[-1], &size[3..]].concat()[..]);
    let bytes = size[3..].iter().product::<i64>() * plane.kind().elt_size_in_bytes() as i64;
    if bytes % 8 == 0 { rows.view_dtype(Kind::Int64) } else { rows }
}

/// Moves entries back to where they came from, and what was saved to where it stood.
pub(super) fn restore(x: &Tensor, moves: &Moves, saved: &Tensor) {
    #[cfg(test)]
    if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::UndoDropped) {
        let moved = take(x, &moves.to);
        return move_back(x, moves, Some(&moved));
    }
    move_back(x, moves, Some(saved));
}

/// The entries at `index`, `(B·G·e, …)`.
#[cfg(test)]
pub(super) fn take(x: &Tensor, index: &Tensor) -> Tensor {
    x.flatten(0, 2).index_select(0, index)
}

/// Puts retained ones of the entries `saved (B·G·e, …)` into the front slots of a chunk's region `(B, G, n, …)`; elsewhere its own stay.
pub(super) fn with_retained(chunk: &Tensor, saved: &Tensor, retained: &Retained) -> Tensor {
    let kept = saved.index_select(0, &retained.saved).view(&chunk.size()[..]);
    let mask = if chunk.dim() == 4 { retained.mask_b1n.unsqueeze(-1) } else { retained.mask_b1n.shallow_clone() };
    kept.where_self(&mask, chunk)
}
