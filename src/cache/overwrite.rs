//! One write: survivors of the region take the victims' slots, and the chunk takes the region.

use tch::Tensor;

use super::buffer::StoredEntries;
use super::layer::LayerCache;
use super::moves::{Moves, with_retained, write_plane};

impl LayerCache {
    /// Lets the region's survivors move into the victims' slots, and the chunk stand from `region` on. Returns what stood in the victims'
    /// slots, entries and positions, where some had to leave.
    ///
    /// # Shapes
    /// `positions (B, G, n)`.
    pub(super) fn overwrite(
        &mut self,
        region: i64,
        chunk: &StoredEntries,
        positions: &Tensor,
        moves: Option<&Moves>,
    ) -> Option<(StoredEntries, Tensor)> {
        // What a sequence keeps is known when it has been moved.
        let is_ragged = moves.is_some_and(|moves| moves.retained.is_some());
        let saved = self.write_planes(region, (!is_ragged).then_some((chunk, positions)), moves);
        if let (true, Some(moves), Some((stored, position))) = (is_ragged, moves, &saved)
            && let Some(retained) = &moves.retained
        {
            let (chunk, positions) = (chunk.with_retained(stored, moves), with_retained(positions, position, retained));
            self.write_planes(region, Some((&chunk, &positions)), None);
        }
        self.notes.clear(region, positions.size()[2]);
        saved
    }

    fn write_planes(
        &mut self,
        region: i64,
        chunk: Option<(&StoredEntries, &Tensor)>,
        moves: Option<&Moves>,
    ) -> Option<(StoredEntries, Tensor)> {
        let (entries, positions) = chunk.unzip();
        let stored = self.buffer.overwrite(region, entries, moves);
        // Notes move with their entries; those of the chunk are still to come.
        if let Some(moves) = moves {
            self.notes.all().for_each(|notes| moves.apply(notes));
        }
        stored.zip(write_plane(&self.position_bgc, moves, positions, region))
    }
}
