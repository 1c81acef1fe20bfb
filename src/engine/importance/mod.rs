//! How much the loss depends on the entries of a cache: what later queries, some way behind, sum up of the squared gradient of their attention
//! scores. The backward phase has these gradients at hand chunk by chunk, and the sums travel with the entries as their gradient does.
//!
//! Squared gradients stand for importance as in Fisher pruning (Theis et al. 2018, arXiv 1801.05787).

mod gate_fit;
mod slot_demand;

use std::collections::BTreeMap;

use tch::{Kind, Tensor, no_grad};

use crate::cache::{ChunkSpan, LayerCache, Placement, Undo};
use crate::native::cuda::on_device;
use crate::ops::query_statistics::QuerySums;

pub use gate_fit::FittedGate;
use gate_fit::GateFit;
pub(super) use gate_fit::MIN_QUERIES;
pub(super) use slot_demand::{SlotDemand, share_out};

/// Queries nearer than this to an entry do not count: every policy keeps the youngest entries for a while.
pub(super) const MIN_DISTANCE: usize = 192;

#[derive(Debug, Default)]
pub(super) struct LayerImportance {
    /// The sum of squared gradients of each entry, and the number of queries that it is of: `(B, G, C, 2)`.
    sums: Option<Tensor>,
    /// What tokens make their keys and values of `(B, n, E)`, by chunks whose backward is to come.
    inputs: BTreeMap<usize, Tensor>,
    /// Pairs of channels of a query that turn.
    pairs: i64,
    /// The first position of queries before which entries are counted.
    pub(super) counts_from: usize,
    pub(super) gate: GateFit,
    pub(super) queries: QuerySums,
    pub(super) slots: SlotDemand,
}

impl LayerImportance {
    pub(super) fn new(pairs: usize) -> Self {
        Self { pairs: pairs as i64, ..Self::default() }
    }

    /// Takes the inputs of a column, chunk by chunk, and the queries that come of them, before they are turned; pads may follow them.
    pub(super) fn see_inputs(&mut self, spans: &[ChunkSpan], x_bne: &Tensor, queries: &dyn Fn() -> Tensor) {
        let first = spans[0].start;
        let q_bhnd = no_grad(queries);
        for span in spans {
            for (sequence, &real) in span.real.iter().enumerate() {
                let of_sequence = q_bhnd.narrow(0, sequence as i64, 1);
                self.queries.add(&of_sequence.narrow(2, (span.start - first) as i64, real as i64), self.pairs);
            }
        }
        let of = |span: &ChunkSpan| x_bne.detach().narrow(1, (span.start - first) as i64, span.len as i64);
        self.inputs.extend(spans.iter().map(|span| (span.index, of(span))));
    }

    /// Drops what was recorded of the entries of a batch.
    pub(super) fn forget_entries(&mut self) {
        self.sums = None;
        self.inputs.clear();
    }

    /// Adds what a chunk's queries give to the entries before it, page by page `(B, G, ·)`.
    pub(super) fn add(&mut self, cache: &LayerCache, span: &ChunkSpan, given: impl Iterator<Item = Tensor>) {
        let sums = self.sums.get_or_insert_with(|| cache.zeros(2, Kind::Float));
        let older = cache.region(span);
        if older == 0 {
            return;
        }
        let position_bgp = cache.positions().narrow(2, 0, older);
        let is_far =
            position_bgp.ge(0).logical_and(&position_bgp.le(span.start as i64 - MIN_DISTANCE as i64)).to_kind(Kind::Float);
        let given_bgp = Tensor::cat(&given.collect::<Vec<_>>(), 2).to_kind(Kind::Float) * &is_far;
        let queries: Vec<f32> = span.real.iter().map(|&real| real as f32).collect();
        let queries_bgp = is_far * on_device(&queries, given_bgp.device()).view([-1, 1, 1]);
        let mut total = sums.narrow(0, 0, span.num_sequences() as i64).narrow(2, 0, older);
        let _ = total.g_add_(&Tensor::stack(&[given_bgp, queries_bgp], -1));
        if span.start >= self.counts_from {
            self.slots.count(&total.select(3, 0), &position_bgp.ge(0));
        }
    }

    /// Goes back to before a chunk was written: of its entries all is known now.
    pub(super) fn unwind(&mut self, span: &ChunkSpan, undo: &Undo, placement: &Placement) {
        let own = self.sums.as_ref().map(|sums| placement.unplace(&undo.unwind_sums(sums)));
        if let Some((x_bne, own_bgn2)) = self.inputs.remove(&span.index).zip(own) {
            self.gate.add(&x_bne, &own_bgn2, span.start);
        }
    }
}
