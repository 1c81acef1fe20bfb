//! The proof of one batch in many tilings: the reference is computed once, on the choices that the first tiling makes.

use tch::Kind;

use super::{Comparison, ErrorBound, Reference, check_finite};
use crate::data::Batch;
use crate::engine::{Engine, Event, MemoryByPart, MicroBatchContext, MicroBatchGradients, Observer};
use crate::model::Model;
use crate::recipe::Dtype;
use crate::units::{Bytes, Fault, named};

#[derive(Debug)]
pub struct Proofs<'a> {
    pub model: &'a Model,
    pub batch: &'a Batch,
    pub context: MicroBatchContext,
    /// What all tilings are compared with: the hash of the first one's replay log, and the reference.
    first: Option<(String, Reference)>,
    /// Gradients of the first tiling whose stores do not round.
    exact: Option<MicroBatchGradients>,
}

#[derive(Clone, Debug)]
pub struct TilingProof {
    /// The tiling's loss and gradient beside the reference's.
    pub comparison: Comparison,
    /// The largest relative difference from the first tiling whose stores do not round; `None` for that one, and where stores round.
    pub apart: Option<f64>,
    /// What is asked of the gradient where stores round; `None` where it is exact.
    pub bound: Option<ErrorBound>,
    /// Whether the policies chose what they had chosen in the first tiling.
    pub has_first_choices: bool,
    /// Layers and chunks of the largest cell.
    pub largest_cell: (usize, usize),
    pub cells: (usize, usize),
    /// How many cells had kept their graph.
    pub kept: usize,
    /// Whether loss and gradient of the last hidden states were made in the cells of the only band, and not in the forward phase.
    pub is_head_in_cells: bool,
    /// The most that waited at once as layer checkpoints.
    pub layer_checkpoints: Bytes,
    /// The most that waited at once in the undo log.
    pub undo_log: Bytes,
}

named! {
    pub enum Verdict {
        /// The gradient is the reference's and that of the first exact tiling, to rounding.
        Proved = "proved",
        /// Stores round, and the gradient points where the exact one does.
        NearEnough = "near enough",
        /// The gradient differs by more than rounding.
        Disproved = "disproved",
        /// Stores round, and the gradient points elsewhere.
        TooCoarse = "too coarse",
        /// The policies chose otherwise than in the first tiling, so that there is nothing to compare with.
        OtherChoices = "other choices",
    }
}

impl Verdict {
    /// Whether the tiling does what it should.
    pub fn is_good(self) -> bool {
        matches!(self, Self::Proved | Self::NearEnough)
    }

    /// Which of these tilings is to be told of, if any: the first with a wrong gradient, else the first that is too coarse.
    pub fn first_bad(verdicts: &[Self]) -> Option<usize> {
        let bad = (0..verdicts.len()).filter(|&at| !verdicts[at].is_good());
        bad.min_by_key(|&at| verdicts[at] == Self::TooCoarse)
    }
}

impl<'a> Proofs<'a> {
    pub fn new(model: &'a Model, batch: &'a Batch, context: MicroBatchContext) -> Self {
        Self { model, batch, context, first: None, exact: None }
    }

    pub fn dtype(&self) -> Dtype {
        if self.model.kind() == Kind::Double { Dtype::F64 } else { Dtype::F32 }
    }

    /// The relative error that rounding explains.
    pub fn tolerance(&self) -> f64 {
        if self.dtype() == Dtype::F64 { 1e-12 } else { 2e-5 }
    }

    /// Runs the batch through an engine, which must have the head and the buffers of all others.
    pub fn prove(&mut self, engine: &Engine) -> Result<TilingProof, Fault> {
        let (model, batch, context) = (self.model, self.batch, self.context);
        let mut seen = ProofObserver::default();
        let ours = engine.gradients(model, batch, context, &mut seen)?;
        check_finite(batch, &ours.losses)?;
        let choices = ours.log.hash();
        let first = match self.first.take() {
            Some(first) => first,
            None => (choices.clone(), Reference::new(engine, model, batch, &ours.log, context)?),
        };
        let (first_choices, reference) = self.first.insert(first);
        let first_trained = model.first_trained_layer();
        let bound = ErrorBound::of_stores(engine.settings(), first_trained);
        let exact = self.exact.as_ref().filter(|_| bound.is_none());
        let apart = exact.map(|exact| Comparison::new(&ours.losses, &ours.gradients, &exact.losses, &exact.gradients).worst());
        let columns = engine.settings().plan(batch, context.chunk_sizes)?.columns;
        let widest = columns.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let bands = engine.settings().trained_bands(first_trained);
        let highest = bands.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let found = TilingProof {
            comparison: reference.compare(&ours),
            apart,
            bound,
            has_first_choices: choices == *first_choices,
            largest_cell: (highest, widest),
            cells: seen.cells,
            kept: seen.kept,
            is_head_in_cells: seen.is_head_in_cells,
            layer_checkpoints: engine.stores().layer_checkpoints.bytes().most,
            undo_log: engine.stores().undo_log.bytes().most,
        };
        if bound.is_none() && self.exact.is_none() && found.has_first_choices {
            self.exact = Some(ours);
        }
        Ok(found)
    }
}

impl TilingProof {
    /// The largest relative error of a matrix or the loss, beside reference and first exact tiling; where stores round, of the whole gradient.
    pub fn relative_error(&self) -> f64 {
        match self.bound {
            None => self.comparison.worst().max(self.apart.unwrap_or(0.0)),
            Some(_) => self.comparison.whole().1,
        }
    }

    /// The verdict where relative errors up to `tolerance` count as rounding.
    pub fn verdict(&self, tolerance: f64) -> Verdict {
        let (cosine, _) = self.comparison.whole();
        match self.bound {
            _ if !self.has_first_choices => Verdict::OtherChoices,
            None if self.relative_error() <= tolerance => Verdict::Proved,
            None => Verdict::Disproved,
            Some(bound) if cosine >= bound.smallest_cosine => Verdict::NearEnough,
            Some(_) => Verdict::TooCoarse,
        }
    }
}

/// What the engine tells of its cells and of the head.
#[derive(Debug, Default)]
struct ProofObserver {
    /// Layer bands and columns; none as long as the forward phase lasts.
    cells: (usize, usize),
    kept: usize,
    is_head_in_cells: bool,
}

impl Observer for ProofObserver {
    fn observe(&mut self, event: Event, _: &dyn Fn() -> MemoryByPart) {
        match event {
            Event::Cell { num_bands, num_columns, is_kept, .. } => {
                self.cells = (num_bands, num_columns);
                self.kept += usize::from(is_kept);
            }
            Event::Head { .. } if self.cells != (0, 0) => self.is_head_in_cells = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict::{self, Disproved, NearEnough, OtherChoices, Proved, TooCoarse};

    #[test]
    fn a_wrong_gradient_is_told_before_a_coarse_one() {
        for (verdicts, expected) in [
            (&[Proved, NearEnough][..], None),
            (&[Proved, TooCoarse, NearEnough, TooCoarse], Some(1)),
            (&[TooCoarse, Proved, Disproved, OtherChoices, Disproved], Some(2)),
            (&[TooCoarse, OtherChoices, Disproved], Some(1)),
        ] {
            assert_eq!(Verdict::first_bad(verdicts), expected, "{verdicts:?}");
        }
    }
}
