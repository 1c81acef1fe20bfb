//! The order of a step, written down once: the engine runs it, the planner weighs it.

use std::ops::Range;

use super::{ChunkPlan, Settings};

/// What the forward phase does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardStage {
    /// A column, of this index from the left, goes through all layers.
    Column(usize),
    /// The head's loss, and its gradient where one is wanted, for the column that came last.
    Head(usize),
}

/// What the backward phase does next. Bands are counted from the top, columns from the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardStage {
    /// A layer band runs forward once more over all columns, to make its undo log and its final caches.
    Replay {
        /// Index of the band.
        band: usize,
    },
    /// A cell is unwound, computed again with autograd, and differentiated. The head belongs to it where the forward phase has left
    /// it out.
    Cell {
        /// Index of the band.
        band: usize,
        /// Index of the column.
        column: usize,
    },
    /// A layer band is done: its caches and its checkpoints are free.
    BandDone {
        /// Index of the band.
        band: usize,
    },
}

/// The stages of a step over a plan.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Layers of each band, top first.
    bands: Vec<Range<usize>>,
    num_columns: usize,
    has_head_in_cells: bool,
}

impl Schedule {
    /// The schedule of a step by `settings` over a batch planned as `plan`.
    pub fn new(settings: &Settings, plan: &ChunkPlan) -> Self {
        Self {
            bands: settings.layer_bands().into_iter().rev().collect(),
            num_columns: plan.columns.len(),
            has_head_in_cells: settings.makes_last_hidden_states_again(),
        }
    }

    /// The schedule of losses alone: a forward phase that keeps nothing.
    pub fn of_losses(plan: &ChunkPlan) -> Self {
        Self { bands: Vec::new(), num_columns: plan.columns.len(), has_head_in_cells: false }
    }

    /// The layers of a band.
    pub fn layers(&self, band: usize) -> Range<usize> {
        self.bands[band].clone()
    }

    /// Layer bands and columns.
    pub fn size(&self) -> (usize, usize) {
        (self.bands.len(), self.num_columns)
    }

    /// The layers whose undo log the forward phase keeps: those of the top band. The others make theirs when they replay.
    pub fn layers_with_undo(&self) -> Range<usize> {
        self.bands.first().cloned().unwrap_or(0..0)
    }

    /// Whether the input of a layer is kept for the backward phase. That of the lowest is the embedding, which is cheaper to look up
    /// again than to keep.
    pub fn is_border(&self, layer: usize) -> bool {
        layer > 0 && self.bands.iter().any(|band| band.start == layer)
    }

    /// Whether the head's loss is made in the cells, from hidden states that are computed again, and not in the forward phase.
    pub fn has_head_in_cells(&self) -> bool {
        self.has_head_in_cells
    }

    /// The forward phase: columns from left to right.
    pub fn forward(&self) -> impl Iterator<Item = ForwardStage> + use<> {
        let has_head = !self.has_head_in_cells;
        (0..self.num_columns).flat_map(move |column| {
            std::iter::once(ForwardStage::Column(column)).chain(has_head.then_some(ForwardStage::Head(column)))
        })
    }

    /// The backward phase: bands top-down, cells from right to left. The top band stands in its caches already.
    pub fn backward(&self) -> impl Iterator<Item = BackwardStage> + use<> {
        let num_columns = self.num_columns;
        (0..self.bands.len()).flat_map(move |band| {
            let replay = (band > 0).then_some(BackwardStage::Replay { band });
            let cells = (0..num_columns).rev().map(move |column| BackwardStage::Cell { band, column });
            replay.into_iter().chain(cells).chain([BackwardStage::BandDone { band }])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_goes_forward_by_columns_and_back_by_cells() {
        let schedule = Schedule { bands: vec![2..3, 0..2], num_columns: 2, has_head_in_cells: false };
        let forward = [ForwardStage::Column(0), ForwardStage::Head(0), ForwardStage::Column(1), ForwardStage::Head(1)];
        assert_eq!(schedule.forward().collect::<Vec<_>>(), forward);
        let backward = [
            BackwardStage::Cell { band: 0, column: 1 },
            BackwardStage::Cell { band: 0, column: 0 },
            BackwardStage::BandDone { band: 0 },
            BackwardStage::Replay { band: 1 },
            BackwardStage::Cell { band: 1, column: 1 },
            BackwardStage::Cell { band: 1, column: 0 },
            BackwardStage::BandDone { band: 1 },
        ];
        assert_eq!(schedule.backward().collect::<Vec<_>>(), backward);
        assert_eq!((schedule.layers(1), schedule.layers_with_undo()), (0..2, 2..3));
        assert_eq!((0..3).map(|layer| schedule.is_border(layer)).collect::<Vec<_>>(), [false, false, true]);
    }

    #[test]
    fn a_single_band_leaves_the_head_to_its_cells() {
        let bands = std::iter::once(0..3).collect();
        let schedule = Schedule { bands, num_columns: 2, has_head_in_cells: true };
        assert_eq!(schedule.forward().collect::<Vec<_>>(), [ForwardStage::Column(0), ForwardStage::Column(1)]);
        assert!(!schedule.backward().any(|stage| matches!(stage, BackwardStage::Replay { .. })));
    }
}
