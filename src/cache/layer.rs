//! The cache of one layer: slots in tail-resident order, written chunk by chunk and unwound exactly.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::budget::BudgetState;
use super::buffer::{Buffer, StoredEntries, slots_of, write_slots};
use super::entry_stats::EntryStats;
use super::moves::{self, Geometry, Moves, with_retained};
use super::policy::Agreement;
use super::undo::Undo;
use super::{CacheShape, ChunkSpan, HeadBudgets, LayerLog, Placement, Victims};
use crate::native::cuda::on_device;
use crate::ops::attention::KvBlock;
use crate::ops::query_statistics::QueryStatistics;
use crate::recipe::BufferKind;
use crate::store::bytes_of;
use crate::units::{Bytes, Fault, LayerIdx};

/// A written chunk: its entries as its own queries see them, and what they overwrote.
#[derive(Debug)]
pub struct Written {
    /// The region's entries `(B, G, n, ·)`: kept ones as they are stored, then tokens, exact.
    pub own: KvBlock,
    pub placement: Placement,
    pub undo: Undo,
}

#[derive(Debug)]
pub struct LayerCache {
    pub(super) layer: LayerIdx,
    pub(super) shape: CacheShape,
    pub(super) buffer: Buffer,
    /// Positions in all slots of all sequences `(B, G, C)`.
    pub(super) position_bgc: Tensor,
    /// Sequences that have not left: only their entries are seen, written and moved.
    pub(super) active: i64,
    pub(super) agreement: Agreement,
    pub(super) stats: EntryStats,
    /// The positions of each sequence's initial part that never leave; empty where there are none.
    pub initial_parts: Vec<Range<usize>>,
    /// Statistics of the layer's queries, for a policy that needs them.
    pub query_statistics: Option<QueryStatistics>,
    pub(super) budget: Option<BudgetState>,
    pub(super) filled: usize,
    pub(super) num_chunks: usize,
    pub(super) prefill: usize,
}

impl LayerCache {
    /// An empty cache. `prefill` is the length of the prefill span.
    pub fn new(layer: LayerIdx, shape: CacheShape, prefill: usize) -> Self {
        let buffer = Buffer::new(shape);
        let size = [shape.batch, shape.groups, buffer.slots()];
        Self {
            layer,
            shape,
            buffer,
            position_bgc: Tensor::full(size, -1, (Kind::Int64, shape.device)),
            active: shape.batch,
            agreement: Agreement::All(Vec::new()),
            stats: EntryStats::default(),
            initial_parts: Vec::new(),
            query_statistics: None,
            budget: None,
            filled: 0,
            num_chunks: 0,
            prefill,
        }
    }

    /// Empties the cache; the buffers stay.
    pub fn reset(&mut self, prefill: usize) {
        (self.agreement, self.stats, self.budget) = (Agreement::All(Vec::new()), EntryStats::default(), None);
        (self.filled, self.num_chunks, self.prefill) = (0, 0, prefill);
        self.active = self.shape.batch;
    }

    /// From now on the cache is that of the sequences that are under way in `span`. Those that have left stay in it untouched, and come
    /// back when the cache is unwound.
    pub fn enter(&mut self, span: &ChunkSpan) {
        self.active = span.num_sequences() as i64;
    }

    /// What keys, values, positions and statistics take where the cache computes, and what waits on the host.
    pub fn bytes(&self) -> (Bytes, Bytes) {
        let before = self.budget.as_ref().map(|budget| &budget.before_bgc);
        let (device, host) = self.buffer.bytes();
        let beside = bytes_of(self.stats.all().chain([&self.position_bgc]).chain(before));
        (Bytes(device.0 + beside.0), host)
    }

    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// How many chunks the cache holds, pieces of the prefill span counted one by one.
    pub fn num_chunks(&self) -> usize {
        self.num_chunks
    }

    /// Entries of a KV head; with budgets by head, on average over the heads.
    pub fn num_entries(&self) -> usize {
        self.budget.as_ref().map_or(self.filled, BudgetState::mean_held)
    }

    /// Positions held by the filled slots `(B, G, filled)`, −1 where a sequence has none.
    pub fn positions(&self) -> Tensor {
        slots_of(&self.position_bgc, self.active, 0, self.filled as i64)
    }

    fn active_positions(&self) -> Tensor {
        self.position_bgc.narrow(0, 0, self.active)
    }

    /// The entries of the filled slots `(B, G, filled, ·)`, restored where they are quantised.
    pub fn entries(&self) -> KvBlock {
        self.read(0, self.filled as i64)
    }

    /// The entries of some slots side by side, restored where they are quantised.
    pub(super) fn read(&self, start: i64, len: i64) -> KvBlock {
        if len == 0 {
            let further = self.shape.further_widths().map(|width| self.no_entries(width).to_kind(self.shape.further_kind()));
            let entries = [(); 2].map(|()| self.no_entries(self.shape.head_dim));
            return KvBlock::of_planes(entries.into_iter().chain(further));
        }
        KvBlock::cat(&self.buffer.read(self.active, start, len))
    }

    fn no_entries(&self, width: i64) -> Tensor {
        Tensor::zeros([self.active, self.shape.groups, 0, width], (self.shape.kind, self.shape.device))
    }

    /// Keys of the filled slots `(B, G, filled, D)`, restored where they are quantised.
    pub(super) fn keys(&self) -> Tensor {
        match &self.buffer.read_keys(self.active, self.filled as i64)[..] {
            [] => self.no_entries(self.shape.head_dim),
            [keys] => keys.shallow_clone(),
            pages => Tensor::cat(pages, 2),
        }
    }

    /// What the policy made of the attention so far, by filled slot `(B, G, filled)`.
    pub fn observed(&self) -> Option<Tensor> {
        self.stats.observed(self.active, self.filled as i64)
    }

    /// The first `count` slots by page: the past of a chunk whose region begins there.
    pub fn past(&self, count: i64) -> Vec<KvBlock> {
        self.buffer.read(self.active, 0, count)
    }

    /// All filled slots side by side, as the chunk written last and its past see them: where they are one page, exact, all in use.
    pub fn joined(&self) -> Option<KvBlock> {
        let is_exact = self.shape.buffer == BufferKind::Plain && self.budget.is_none();
        let mut pages = if is_exact { self.past(self.filled as i64) } else { Vec::new() };
        pages.pop().filter(|_| pages.is_empty())
    }

    /// The first slot of the region of the chunk that was written last.
    pub fn region(&self, span: &ChunkSpan) -> i64 {
        (self.filled - span.len) as i64
    }

    /// Brings keys and values to the device, ahead of their use.
    pub fn prefetch(&mut self) {
        self.buffer.prefetch();
    }

    /// Lets keys and values wait on the host, where the cache is offloaded.
    pub fn offload(&mut self) {
        self.buffer.offload();
    }

    /// Slots of a head's buffer: the cache length, until they are shared out.
    pub(super) fn capacity(&self) -> usize {
        self.budget.as_ref().map_or(self.shape.cache_length, |budget| budget.slots)
    }

    /// Which of the first `count` slots are in use `(B, G, count)`, bool, where heads have shares of different size.
    pub fn valid_slots(&self, count: i64) -> Option<Tensor> {
        self.budget.as_ref().map(|_| self.active_positions().narrow(2, 0, count).ge(0))
    }

    /// Which slots of the region of the chunk written last hold an entry `(B, G, n)`, bool, where sequences that end in it keep empty slots.
    pub fn valid_in_region(&self, span: &ChunkSpan) -> Option<Tensor> {
        let keeps_empty = self.budget.is_some() && span.is_ragged();
        keeps_empty.then(|| self.active_positions().narrow(2, self.region(span), span.len as i64).ge(0))
    }

    /// Brings budgets into force: what exceeds a head's share leaves, and all buffers get as long as the largest share.
    pub fn apply_budgets(&mut self, budgets: &HeadBudgets) {
        if self.budget.is_some() {
            return;
        }
        self.budget = Some(BudgetState::new(budgets, self.filled, &self.active_positions()));
        let leaving = on_device(&budgets.leaving, self.shape.device).view_as(&self.positions());
        let _ = self.positions().masked_fill_(&leaving, -1);
        self.reserve(budgets.slots as i64);
        // Another sequence may have left its positions there.
        let _ = self.active_positions().narrow(2, self.filled as i64, (budgets.slots - self.filled) as i64).fill_(-1);
        (self.filled, self.agreement) = (budgets.slots, Agreement::Nothing);
    }

    /// The recorded choice for `span`, checked to have the number of evictions that the cache needs.
    pub fn recall<'a>(&self, log: &'a LayerLog, span: &ChunkSpan) -> Result<Option<&'a Victims>, Fault> {
        let victims = log.victims(span.index);
        let (expected, found) = (span.evictions(self.filled, self.capacity()), victims.map_or(0, Victims::count));
        if found == expected {
            return Ok(victims);
        }
        let evictions = format!("expected {expected} evictions, found {found}");
        Err(Fault::defect(format!("layer {}: the replay log does not fit chunk {}: {evictions}", self.layer, span.index)))
    }

    /// Writes a chunk over its victims.
    ///
    /// # Shapes
    /// `(B, G, n, ·)` by token.
    pub fn write(&mut self, span: &ChunkSpan, victims: Option<&Victims>, tokens: &KvBlock) -> Result<Written, Fault> {
        self.check_order("write", span, self.num_chunks == span.index)?;
        self.enter(span);
        let (CacheShape { groups, device, .. }, batch, filled) = (self.shape, self.active, self.filled as i64);
        let top = (self.filled + span.len).min(self.capacity()) as i64;
        self.reserve(top);
        let at = Geometry { batch, groups, slots: self.buffer.slots(), filled, top, len: span.len as i64 };
        let kept = span.retained(self.filled, self.capacity());
        let moves = victims.map(|x| moves::plan(at, x, span, &kept, device));
        let placement = Placement::new(span, &kept, device);
        let own = tokens.map(|x| placement.place(x).contiguous());
        let positions = placement.positions(span, device).expand([at.batch, at.groups, at.len], false);
        let overwritten = self.overwrite(at.region(), self.buffer.encode(&own), positions, moves);
        self.write_agreement(span, at, victims);
        if let Some(budget) = &mut self.budget {
            budget.take(span.len);
        }
        (self.filled, self.num_chunks) = (top as usize, self.num_chunks + 1);
        let undo = Undo { at, overwritten };
        Ok(Written { own: self.composed(own, &undo), placement, undo })
    }

    /// Lets the region's survivors move into the victims' slots, and the chunk stand from `region` on. Returns the moves and what stood in the
    /// victims' slots, entries and positions, where some had to leave.
    fn overwrite(
        &mut self,
        region: i64,
        chunk: StoredEntries,
        positions_bgn: Tensor,
        moves: Option<Moves>,
    ) -> Option<(Moves, StoredEntries, Tensor)> {
        let overwritten = moves.map(|moves| {
            // Statistics move with their entries; those of the chunk are still to come.
            self.stats.all().for_each(|stats| moves.apply(stats));
            let (entries, positions) = (self.buffer.overwrite(&moves), moves.overwrite(&self.position_bgc));
            (moves, entries, positions)
        });
        // What a sequence keeps is known when it has been moved.
        let (chunk, positions_bgn) = match &overwritten {
            Some((Moves { retained: Some(retained), .. }, entries, positions)) => {
                (chunk.with_retained(entries, retained), with_retained(&positions_bgn, positions, retained))
            }
            _ => (chunk, positions_bgn),
        };
        self.buffer.write(region, &chunk);
        write_slots(&self.position_bgc, region, &positions_bgn);
        self.stats.clear(region, positions_bgn.size()[2]);
        overwritten
    }

    /// Writes tokens of the chunk written last, behind the first `from`, in place of what stands there.
    ///
    /// # Shapes
    /// `(B, G, n, ·)`.
    pub fn write_part(&mut self, span: &ChunkSpan, from: usize, tokens: &KvBlock) {
        let part = self.buffer.encode(&tokens.map(Tensor::contiguous));
        self.buffer.write(self.region(span) + from as i64, &part);
    }

    /// The region's entries for a chunk that stands in the cache already, from its tokens and what it overwrote.
    ///
    /// # Shapes
    /// `(B, G, n, ·)` in by token, out by slot of the region.
    pub fn recompose(&self, placement: &Placement, undo: &Undo, tokens: &KvBlock) -> KvBlock {
        self.composed(tokens.map(|x| placement.place(x).contiguous()), undo)
    }

    /// The region's entries as its own queries see them: the tokens exact, in front of them what the sequences keep, as it is stored.
    fn composed(&self, own: KvBlock, undo: &Undo) -> KvBlock {
        let Some((Moves { retained: Some(retained), .. }, saved, _)) = &undo.overwritten else { return own };
        let saved = self.buffer.decode(saved);
        KvBlock::of_planes(own.planes().zip(saved.planes()).map(|(own, saved)| with_retained(own, saved, retained)))
    }

    /// How the tokens of the chunk written last stand in its region.
    pub fn placement(&self, span: &ChunkSpan, undo: &Undo) -> Placement {
        Placement::new(span, &span.retained(undo.at.filled as usize, self.capacity()), self.shape.device)
    }

    /// Restores the cache to what it was before `span` was written.
    pub fn unwind(&mut self, span: &ChunkSpan, undo: &Undo) -> Result<(), Fault> {
        self.check_order("unwind", span, self.num_chunks == span.index + 1)?;
        self.enter(span);
        // Statistics and agreement are not needed backwards: choices are replayed.
        (self.stats, self.agreement) = (EntryStats::default(), Agreement::Nothing);
        if let Some((moves, saved, position)) = &undo.overwritten {
            self.buffer.restore(moves, saved);
            moves::restore(&self.position_bgc, moves, position);
        }
        (self.filled, self.num_chunks) = (undo.at.filled as usize, self.num_chunks - 1);
        if let Some(budget) = self.budget.take_if(|budget| budget.index == span.index) {
            let _ = self.active_positions().fill_(-1);
            self.filled = budget.filled_before;
            self.positions().copy_(&budget.before_bgc);
        }
        Ok(())
    }

    /// Keeps the host's copy of the positions in step, or gives it up when sequences or heads begin to differ.
    fn write_agreement(&mut self, span: &ChunkSpan, at: Geometry, victims: Option<&Victims>) {
        let shared = victims.map(Victims::shared);
        let by_sequence = victims.is_none_or(|victims| victims.num_heads() == 1);
        self.agreement = match (std::mem::replace(&mut self.agreement, Agreement::Nothing), shared) {
            (Agreement::All(positions), None) => Agreement::All(moved(positions, span, at, &[])),
            (Agreement::All(positions), Some(Some(slots))) => Agreement::All(moved(positions, span, at, &slots)),
            (Agreement::All(_) | Agreement::Heads, _) if by_sequence => Agreement::Heads,
            _ => Agreement::Nothing,
        };
    }

    pub(super) fn reserve(&mut self, needed: i64) {
        let have = self.buffer.slots();
        if needed <= have {
            return;
        }
        self.buffer.reserve(needed);
        let slots = self.buffer.slots();
        self.stats.reserve(slots);
        let larger = Tensor::full([self.shape.batch, self.shape.groups, slots], -1, (Kind::Int64, self.shape.device));
        larger.narrow(2, 0, have).copy_(&self.position_bgc);
        self.position_bgc = larger;
    }

    /// The fault of a chunk that is written or unwound out of order.
    pub(crate) fn out_of_order(&self, action: &str, span: &ChunkSpan) -> Fault {
        let Self { layer, num_chunks, .. } = self;
        Fault::defect(format!("layer {layer}: {action} chunk {}, but the cache stands after {num_chunks} chunks", span.index))
    }

    fn check_order(&self, action: &'static str, span: &ChunkSpan, in_order: bool) -> Result<(), Fault> {
        if in_order { Ok(()) } else { Err(self.out_of_order(action, span)) }
    }
}

/// Positions by slot after a write: survivors of the region stand in the victims' slots, the chunk at the end.
fn moved(mut positions: Vec<i64>, span: &ChunkSpan, at: Geometry, victims: &[i64]) -> Vec<i64> {
    let (region, filled) = (at.region() as usize, at.filled as usize);
    if !victims.is_empty() {
        let leaves = moves::membership(victims, filled);
        let holes = (0..region.min(filled)).filter(|&slot| leaves[slot]);
        let survivors = (region..filled).filter(|&slot| !leaves[slot]);
        for (to, from) in holes.zip(survivors) {
            positions[to] = positions[from];
        }
    }
    positions.truncate(region);
    positions.extend(span.start as i64..(span.start + span.len) as i64);
    positions
}
