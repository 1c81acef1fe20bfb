//! What each part of a step does, written down once: the engine runs it, the planner weighs it. The forward phase goes through the columns from
//! left to right, the backward phase through bands top-down, and in each through cells from right to left.

use std::ops::Range;

use super::{ChunkPlan, Settings};
use crate::recipe::{StoreForm, StoreRecipe};

/// Bands are counted from the top, columns from the left.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Layers of each band, top first.
    bands: Vec<Range<usize>>,
    num_columns: usize,
    has_head_in_cells: bool,
    /// Cells whose graphs the forward phase keeps, in the order of the backward phase.
    kept: usize,
}

impl Schedule {
    /// The schedule of a step by `settings` over a batch planned as `plan`, of a model in which nothing below `first_trained` is trained:
    /// the backward phase ends there. No graphs are kept where its layers' weights wait on the host: the graph of one layer would keep its
    /// weights, whose room the next layer needs.
    pub fn new(settings: &Settings, plan: &ChunkPlan, first_trained: usize, layers_wait: bool) -> Self {
        let bands: Vec<_> = settings.trained_bands(first_trained).into_iter().rev().collect();
        let (grad, is_exact) = (settings.grad(), |store: StoreRecipe| store.form == StoreForm::Plain);
        // A single band ends in the very hidden states that the forward phase has ended in where it begins with what waits unrounded, or with
        // the embedding, and its caches are unwound exactly.
        let has_head_in_cells = matches!(&bands[..], [band] if band.start == 0 || is_exact(grad.layer_checkpoints));
        Self {
            num_columns: plan.columns.len(),
            has_head_in_cells: has_head_in_cells && is_exact(grad.undo_log),
            kept: if layers_wait { 0 } else { grad.keep_graph.cells() },
            bands,
        }
    }

    /// The schedule of losses alone: a forward phase that keeps nothing.
    pub fn of_losses(plan: &ChunkPlan) -> Self {
        Self { bands: Vec::new(), num_columns: plan.columns.len(), has_head_in_cells: false, kept: 0 }
    }

    pub fn layers(&self, band: usize) -> Range<usize> {
        self.bands[band].clone()
    }

    /// How many layer bands and columns there are.
    pub fn size(&self) -> (usize, usize) {
        (self.bands.len(), self.num_columns)
    }

    /// Whether the forward phase keeps the graph of a cell: of the last columns of the top band, or of whole bands. A band that is kept
    /// in part would have to be replayed as far as the rest.
    pub fn is_kept(&self, band: usize, column: usize) -> bool {
        let whole = self.kept / self.num_columns.max(1);
        band < whole || (band == 0 && column >= self.num_columns.saturating_sub(self.kept))
    }

    /// The bands whose graphs of a column the forward phase keeps, from the top.
    pub fn kept_bands(&self, column: usize) -> Range<usize> {
        0..(0..self.bands.len()).take_while(|&band| self.is_kept(band, column)).count()
    }

    /// The lowest layer of the backward phase; `usize::MAX` where it has none.
    pub fn first_layer(&self) -> usize {
        self.bands.last().map_or(usize::MAX, |band| band.start)
    }

    /// Whether a band runs forward once more over all columns before its cells, to make its undo log and its final caches. The top band stands in
    /// its caches already, and so do those of kept graphs.
    pub fn is_replayed(&self, band: usize) -> bool {
        band >= self.kept_bands(0).len().max(1)
    }

    /// The layers that are run forward a second time by a replay: neither the top band's nor those whose graphs are kept.
    pub fn replayed_layers(&self) -> Range<usize> {
        let uppermost = self.bands.get(self.kept_bands(0).len().max(1));
        uppermost.map_or(0..0, |band| self.first_layer()..band.end)
    }

    /// Whether a layer is the uppermost of its band: of it a replay makes keys and values alone.
    pub fn ends_band(&self, layer: usize) -> bool {
        self.bands.iter().any(|band| band.end == layer + 1)
    }

    /// How many columns of a layer, from the left, are computed again with autograd.
    pub fn columns_again(&self, layer: usize) -> usize {
        let band = self.bands.iter().position(|band| band.contains(&layer));
        band.map_or(0, |band| (0..self.num_columns).take_while(|&column| !self.is_kept(band, column)).count())
    }

    /// The number of cells whose graphs are kept.
    pub fn num_kept(&self) -> usize {
        (0..self.num_columns).map(|column| self.kept_bands(column).len()).sum()
    }

    /// The lowest layer whose graph is kept of a column. Where none is: the number of layers, or `usize::MAX` without a backward phase.
    pub fn first_kept_layer(&self, column: usize) -> usize {
        let layers = self.bands.first().map_or(usize::MAX, |top| top.end);
        self.kept_bands(column).last().map_or(layers, |band| self.bands[band].start)
    }

    /// The layers whose undo log the forward phase keeps of a column: those of the top band, unless it keeps their graph, and what they
    /// undo with it. The other bands make theirs when they replay.
    pub fn layers_with_undo(&self, column: usize) -> Range<usize> {
        self.bands.first().filter(|_| !self.is_kept(0, column)).cloned().unwrap_or(0..0)
    }

    /// Whether the input of a layer is kept for the backward phase, of a column. That of the lowest is the embedding, which is cheaper to
    /// look up again than to keep; a graph has its input.
    pub fn is_border(&self, layer: usize, column: usize) -> bool {
        let starts = |(at, band): (usize, &Range<usize>)| band.start == layer && !self.is_kept(at, column);
        layer > 0 && self.bands.iter().enumerate().any(starts)
    }

    /// Whether the head's loss is made in the cells, from hidden states that are computed again, and not in the forward phase.
    pub fn has_head_in_cells(&self) -> bool {
        self.has_head_in_cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_band_below_the_top_is_replayed() {
        let schedule = Schedule { bands: vec![2..3, 0..2], num_columns: 2, has_head_in_cells: false, kept: 0 };
        assert_eq!([0, 1].map(|band| schedule.is_replayed(band)), [false, true]);
        assert_eq!((schedule.layers(1), schedule.layers_with_undo(0)), (0..2, 2..3));
        assert_eq!((0..3).map(|layer| schedule.is_border(layer, 1)).collect::<Vec<_>>(), [false, false, true]);
    }

    #[test]
    fn what_is_kept_is_the_end_of_the_top_band_or_whole_bands() {
        let of = |kept| Schedule { bands: vec![4..6, 2..4, 0..2], num_columns: 3, has_head_in_cells: false, kept };
        let kept = |schedule: &Schedule| {
            (0..3).map(|band| (0..3).map(|c| u8::from(schedule.is_kept(band, c))).collect()).collect::<Vec<Vec<u8>>>()
        };
        let (none, all) = (vec![0; 3], vec![1; 3]);
        assert_eq!(kept(&of(2)), [vec![0, 1, 1], none.clone(), none.clone()]);
        for cells in [3, 5] {
            assert_eq!(kept(&of(cells)), [all.clone(), none.clone(), none.clone()]);
        }
        for cells in [100, usize::MAX] {
            assert_eq!(kept(&of(cells)), [all.clone(), all.clone(), all.clone()]);
        }
        assert_eq!([0, 2, 5, 8, 9, usize::MAX].map(|cells| of(cells).num_kept()), [0, 2, 3, 6, 9, 9]);
        // Layers from which on graphs are kept, and those of which an undo log is, of the first column and the last.
        let ends = |cells| [0, 2].map(|c| (of(cells).first_kept_layer(c), of(cells).layers_with_undo(c)));
        assert_eq!(ends(1), [(6, 4..6), (4, 0..0)]);
        assert_eq!(ends(6), [(2, 0..0), (2, 0..0)]);
        let borders = |cells, c| (0..6).filter(|&layer| of(cells).is_border(layer, c)).collect::<Vec<_>>();
        assert_eq!([borders(1, 1), borders(1, 2), borders(6, 0), borders(9, 0)], [vec![2, 4], vec![2], vec![], vec![]]);
        let replays = |cells| (0..3).filter(|&band| of(cells).is_replayed(band)).count();
        assert_eq!([0, 3, 6, 9].map(replays), [2, 2, 1, 0]);
        assert_eq!([0, 3, 6, 9].map(|cells| of(cells).replayed_layers()), [0..4, 0..4, 0..2, 0..0]);
        assert_eq!([5, 3, 0].map(|layer| of(2).columns_again(layer)), [1, 3, 3]);
    }

    #[test]
    fn the_backward_phase_ends_at_the_lowest_layer_that_is_trained() {
        let schedule = Schedule { bands: vec![4..6, 3..4], num_columns: 1, has_head_in_cells: false, kept: 0 };
        assert_eq!((schedule.first_layer(), schedule.replayed_layers()), (3, 3..4));
        assert_eq!((0..6).map(|layer| schedule.columns_again(layer)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        assert_eq!((0..6).filter(|&layer| schedule.is_border(layer, 0)).collect::<Vec<_>>(), [3, 4]);
        let nothing = Schedule { bands: Vec::new(), ..schedule };
        assert_eq!((nothing.layers_with_undo(0), nothing.replayed_layers()), (0..0, 0..0));
    }
}
