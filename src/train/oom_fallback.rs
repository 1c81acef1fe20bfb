//! Where memory runs out, and the recipe lets it, a run makes the micro-batch again with ever smaller cells and the same choices.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cache::ReplayLog;
use crate::data::Batch;
use crate::engine::{Engine, MicroBatchContext, MicroBatchGradients, Observer, Settings, guarded};
use crate::model::Model;
use crate::native::cuda::release_cached_memory;
use crate::native::take_gradient;
use crate::recipe::{AttentionOutputs, GradRecipe, KeepGraph, OnOutOfMemory, StoreForm};
use crate::store::copier_of;
use crate::units::{Fault, FaultKind};

/// How small cells have become after a lack of memory: of two ranks' the smaller one is the further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct OomFallback {
    /// Whether layer checkpoints are not rounded. What is tried last counts first.
    is_plain: bool,
    keeps_outputs: bool,
    layers_per_cell: usize,
    chunks_per_cell: usize,
    kept_graphs: usize,
}

impl Engine {
    pub(super) fn fallback(&self) -> OomFallback {
        let grad = self.settings().grad();
        OomFallback {
            is_plain: grad.layer_checkpoints.form == StoreForm::Plain,
            keeps_outputs: grad.attention_outputs == AttentionOutputs::Keep,
            layers_per_cell: grad.layers_per_cell,
            chunks_per_cell: grad.chunks_per_cell.unwrap_or(usize::MAX),
            kept_graphs: grad.keep_graph.cells(),
        }
    }

    /// Takes cells as small as another rank's, whose memory has run out: a sample is run in the same way whoever runs it.
    pub(super) fn fall_back_to(
        &mut self,
        model: &Model,
        furthest: Option<OomFallback>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let Some(further) = furthest.filter(|&furthest| furthest < self.fallback()) else { return Ok(()) };
        let mut grad = self.settings().grad().clone();
        // Fewer bits than the other rank's stay.
        if !further.is_plain && grad.layer_checkpoints.form == StoreForm::Plain {
            grad.layer_checkpoints.form = StoreForm::Int8;
        }
        if !further.keeps_outputs {
            grad.attention_outputs = AttentionOutputs::Recompute;
        }
        grad.layers_per_cell = further.layers_per_cell;
        grad.chunks_per_cell = Some(further.chunks_per_cell).filter(|&chunks| chunks < usize::MAX);
        grad.keep_graph = KeepGraph::of(further.kept_graphs);
        observer.note(&format!("another rank is out of memory: all steps that follow with {}", grad.tiling()));
        self.retile(Settings::new(model.config(), self.settings().kv_cache(), &grad)?);
        Ok(())
    }

    /// Loss and gradients of a batch; where memory runs out, with smaller cells, which all that follow have too. What was evicted the first
    /// time is evicted again: in chunks of other columns products round otherwise, so that a policy might choose otherwise.
    pub fn gradients_that_fit(
        &mut self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, Fault> {
        let (retreats, mut log) = (self.settings().grad().on_out_of_memory == OnOutOfMemory::Retreat, None);
        loop {
            let made = if retreats {
                self.attempt(model, batch, context, &mut log, observer)
            } else {
                self.gradients(model, batch, context, observer)
            };
            let Err(error) = made else { return made };
            // A backward that was cut short has added to some parameters' gradients.
            model.parameters().iter().for_each(|(_, parameter)| drop(take_gradient(parameter)));
            if error.kind() != FaultKind::OutOfMemory || !retreats {
                return Err(error);
            }
            let plan = self.settings().plan(batch, context.chunk_sizes)?;
            let widest = plan.columns.iter().map(Range::len).max().unwrap_or(1);
            let trained = model.first_trained_layer()..model.config().num_layers();
            let Some(smaller) = smaller(self.settings().grad(), widest, &trained) else { return Err(error) };
            let reason = error.to_string();
            let reason = reason.lines().next().unwrap_or_default().trim_start_matches("out of memory: ");
            observer.note(&format!("out of memory ({reason}): this step again, and all that follow, with {}", smaller.tiling()));
            self.retile(Settings::new(model.config(), self.settings().kv_cache(), &smaller)?);
            // Copies that nobody waited for keep what they were to fill: memory of the cell that failed.
            guarded(|| {
                copier_of(model.device()).drain();
                Ok(())
            })?;
            release_cached_memory(model.device());
        }
    }

    /// One attempt; what it has chosen is in `log` afterwards, if it came so far, and what is there before is followed.
    fn attempt(
        &mut self,
        model: &Model,
        batch: &Batch,
        context: MicroBatchContext,
        log: &mut Option<ReplayLog>,
        observer: &mut dyn Observer,
    ) -> Result<MicroBatchGradients, Fault> {
        self.follow(log.clone());
        let trace = self.forward(model, batch, context, observer);
        self.follow(None);
        let trace = trace?;
        *log = Some(trace.log());
        self.backward(model, trace, observer)
    }
}

/// The next smaller tiling: without kept graphs, half as wide, half as high, with attention computed again, or with rounded layer checkpoints.
fn smaller(grad: &GradRecipe, widest: usize, trained: &Range<usize>) -> Option<GradRecipe> {
    let layers = grad.layers_per_cell.min(trained.len());
    let mut smaller = grad.clone();
    if grad.keep_graph != KeepGraph::None {
        smaller.keep_graph = KeepGraph::None;
    } else if widest > 1 {
        smaller.chunks_per_cell = Some(widest.div_ceil(2));
    } else if layers > 1 {
        smaller.layers_per_cell = layers.div_ceil(2);
    } else if grad.attention_outputs == AttentionOutputs::Keep {
        smaller.attention_outputs = AttentionOutputs::Recompute;
    } else if ends_rounding(grad, trained) {
        smaller.layer_checkpoints.form = StoreForm::Int8;
    } else {
        return None;
    }
    Some(smaller)
}

/// Whether the last retreat rounds layer checkpoints, and the gradient of the layers that are trained with them.
pub fn ends_rounding(grad: &GradRecipe, trained: &Range<usize>) -> bool {
    !trained.is_empty() && trained.end > 1 && grad.layer_checkpoints.form == StoreForm::Plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Event, MemoryByPart, NoObserver};
    use crate::recipe::StoreRecipe;
    use crate::store::{WaitFault, copies_in_flight, with_delayed_copies};
    use crate::units::sabotage::{Sabotage, under};
    use crate::verify::Comparison;
    use crate::verify::mutations::support;
    use crate::verify::mutations::support::case::{Case, EXACT, PLAIN, Width};

    const CASE: Case = Case { layers_per_cell: 3, width: Width::Chunks(4), lengths: &[60, 43], ..PLAIN };

    fn tiled(case: &Case, model: &Model, on_out_of_memory: OnOutOfMemory) -> Engine {
        let (mut engine, grad) = (support::engine(case, model), support::recipes(case).1);
        let grad = GradRecipe { on_out_of_memory, ..grad };
        engine.retile(Settings::new(model.config(), engine.settings().kv_cache(), &grad).unwrap());
        engine
    }

    #[test]
    fn the_ladder_ends_where_nothing_smaller_is_left() {
        let model = support::model(&CASE);
        let mut grad = tiled(&CASE, &model, OnOutOfMemory::Retreat).settings().grad().clone();
        grad.keep_graph = KeepGraph::Cells(7);
        grad.attention_outputs = AttentionOutputs::Keep;
        let mut widest = 5;
        grad = smaller(&grad, widest, &(0..6)).unwrap();
        assert_eq!((grad.keep_graph, grad.chunks_per_cell), (KeepGraph::None, Some(4)));
        let mut seen = Vec::new();
        while let Some(next) = smaller(&grad, widest, &(0..6)) {
            widest = next.chunks_per_cell.unwrap();
            assert_eq!(next.attention_outputs == AttentionOutputs::Keep, seen.len() < 5, "{next:?}");
            seen.push((widest, next.layers_per_cell, next.layer_checkpoints.form));
            grad = next;
        }
        let (plain, int8) = (StoreForm::Plain, StoreForm::Int8);
        assert_eq!(
            seen,
            [(3, 3, plain), (2, 3, plain), (1, 3, plain), (1, 2, plain), (1, 1, plain), (1, 1, plain), (1, 1, int8)]
        );
        // Of two trained layers a cell has two at most, though the recipe says more.
        let narrow = GradRecipe { chunks_per_cell: Some(1), layers_per_cell: 6, ..GradRecipe::default() };
        let of = |trained| smaller(&GradRecipe { keep_graph: KeepGraph::None, ..narrow.clone() }, 1, &trained);
        assert_eq!(of(4..6).map(|next| next.layers_per_cell), Some(1));
        assert_eq!(of(5..6).map(|next| next.layer_checkpoints.form), Some(int8));
        assert!(of(6..6).is_none());
    }

    #[test]
    fn a_step_that_does_not_fit_is_made_again_with_smaller_cells_the_same_choices_and_the_same_gradient() {
        for kept in [0, 1, 100] {
            made_again(&Case { kept, ..CASE });
        }
    }

    fn made_again(case: &Case) {
        let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
        let whole =
            tiled(case, &model, OnOutOfMemory::Fail).gradients_that_fit(&model, &batch, context, &mut NoObserver).unwrap();
        let mut tiled = tiled(case, &model, OnOutOfMemory::Retreat);
        // Cells of one chunk and two layers fit, in the backward phase.
        let made = under(Sabotage::MemoryForTwo, || tiled.gradients_that_fit(&model, &batch, context, &mut NoObserver)).unwrap();
        assert_eq!((tiled.settings().grad().chunks_per_cell, tiled.settings().grad().layers_per_cell), (Some(1), 2));
        assert_eq!(tiled.settings().grad().layer_checkpoints, StoreRecipe::PLAIN);
        assert_eq!(made.log.hash(), whole.log.hash());
        let worst = Comparison::new(&made.losses, &made.gradients, &whole.losses, &whole.gradients).worst();
        assert!(worst <= EXACT, "{worst:.2e}");
        assert_eq!(tiled.settings().grad().keep_graph, KeepGraph::None);
        // The next step chooses for itself again.
        let again = tiled.gradients_that_fit(&model, &batch, context, &mut NoObserver).unwrap();
        assert_eq!(again.log.hash(), whole.log.hash());
    }

    #[test]
    fn a_rank_goes_as_far_as_another_and_never_back() {
        let case = Case { kept: 1, ..CASE };
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let [mut ran_out, mut follows] = [(); 2].map(|()| tiled(&case, &model, OnOutOfMemory::Retreat));
        let begins = follows.fallback();
        under(Sabotage::MemoryForTwo, || ran_out.gradients_that_fit(&model, &batch, context, &mut NoObserver)).unwrap();
        let furthest = ran_out.fallback();
        assert!(furthest < begins);
        follows.fall_back_to(&model, Some(furthest), &mut NoObserver).unwrap();
        assert_eq!((follows.fallback(), follows.settings().grad().tiling()), (furthest, ran_out.settings().grad().tiling()));
        follows.fall_back_to(&model, Some(begins), &mut NoObserver).unwrap();
        assert_eq!(follows.fallback(), furthest);
        let [a, b] =
            [ran_out, follows].map(|mut tiled| tiled.gradients_that_fit(&model, &batch, context, &mut NoObserver).unwrap());
        let worst = Comparison::new(&a.losses, &a.gradients, &b.losses, &b.gradients).worst();
        assert!(worst <= EXACT, "{worst:.2e}");
    }

    /// Counts what is being copied when a retreat is told, and at the first event after that.
    #[derive(Default)]
    struct Watching {
        has_heard: bool,
        before: usize,
        after: usize,
    }

    impl Observer for Watching {
        fn note(&mut self, _text: &str) {
            self.has_heard = true;
            self.before += copies_in_flight();
        }

        fn observe(&mut self, _event: Event, _: &dyn Fn() -> MemoryByPart) {
            if std::mem::take(&mut self.has_heard) {
                self.after += copies_in_flight();
            }
        }
    }

    #[test]
    fn copies_of_a_failed_attempt_are_over_before_the_next() {
        let case = Case { layers_per_cell: 2, ..CASE };
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let whole =
            tiled(&case, &model, OnOutOfMemory::Fail).gradients_that_fit(&model, &batch, context, &mut NoObserver).unwrap();
        let mut watching = Watching::default();
        let made = with_delayed_copies(WaitFault::Kept, || {
            let mut tiled = tiled(&case, &model, OnOutOfMemory::Retreat);
            under(Sabotage::MemoryForTwo, || tiled.gradients_that_fit(&model, &batch, context, &mut watching)).unwrap()
        });
        assert!(watching.before > 0 && watching.after == 0, "{} and {}", watching.before, watching.after);
        let worst = Comparison::new(&made.losses, &made.gradients, &whole.losses, &whole.gradients).worst();
        assert!(worst <= EXACT, "{worst:.2e}");
    }

    #[test]
    fn without_leave_the_first_failure_is_the_last() {
        let (model, batch, context) = (support::model(&CASE), support::batch(&CASE), support::context(&CASE));
        let mut tiled = tiled(&CASE, &model, OnOutOfMemory::Fail);
        let failed = under(Sabotage::MemoryForTwo, || tiled.gradients_that_fit(&model, &batch, context, &mut NoObserver));
        assert_eq!(failed.unwrap_err().kind(), FaultKind::OutOfMemory);
        assert_eq!(tiled.settings().grad().chunks_per_cell, Some(4));
    }

    #[test]
    fn where_nothing_fits_the_run_fails_in_the_end() {
        let (model, batch, context) = (support::model(&CASE), support::batch(&CASE), support::context(&CASE));
        let mut tiled = tiled(&CASE, &model, OnOutOfMemory::Retreat);
        let failed = under(Sabotage::NoMemory, || tiled.gradients_that_fit(&model, &batch, context, &mut NoObserver));
        assert_eq!(failed.unwrap_err().kind(), FaultKind::OutOfMemory);
        assert_eq!(tiled.settings().grad().layer_checkpoints.form, StoreForm::Int8);
    }
}
