//! What the tokens of a column take in one layer: what its graph keeps for the backward, and what is there for a moment. Every term
//! stands for a tensor that an operation of the layer saves or makes.

use super::Subject;
use super::attention::Kernel;
use super::subject::Trained;
use crate::model::Projection;

/// Bytes of one layer for one column of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerBytes {
    /// What autograd keeps, the layer's output with it.
    pub(super) graph: u64,
    /// Of this what the MLP keeps, which is gone when the backward comes to attention.
    pub(super) graph_of_mlp: u64,
    /// The most at a time beside its input, without autograd.
    pub(super) forward: u64,
    /// The most at a time beside graphs, in the backward of the MLP.
    pub(super) backward_of_mlp: u64,
    /// The same in that of attention.
    pub(super) backward_of_attention: u64,
}

/// Numbers a token and bytes, layer by layer.
pub(super) struct Layer<'a> {
    pub(super) subject: &'a Subject<'a>,
    /// Index from the bottom.
    pub(super) index: usize,
    /// Tokens of the column, pads with them, of all rows.
    pub(super) tokens: u64,
    /// The column's attention.
    pub(super) kernel: Kernel,
}

impl Layer<'_> {
    pub(super) fn bytes(&self) -> LayerBytes {
        let (s, w) = (self.subject, self.subject.element());
        let (e, q, kv, i) = (s.hidden(), s.queries(), s.keys(), s.config.intermediate_size as u64);
        let graph_of_mlp = self.graph_of_mlp();
        let in_mlp = (w * (3 * e + (4 * i).max(3 * i + e))).max(w * 3 * (e + i) + self.drawn());
        let in_attention = w * (e + 2 * q + 4 * kv);
        LayerBytes {
            graph: self.tokens * (self.graph_of_attention() + graph_of_mlp),
            graph_of_mlp: self.tokens * graph_of_mlp,
            forward: (self.tokens * in_mlp).max(self.tokens * in_attention + self.kernel.forward),
            backward_of_mlp: self.tokens * w * (2 * i + 2 * e),
            backward_of_attention: self.tokens * w * (2 * e + 2 * q + 2 * kv) + self.kernel.backward,
        }
    }

    /// Whether a gradient goes on below the layer.
    fn has_gradient_below(&self) -> bool {
        self.index > 0 || self.subject.trains_weights()
    }

    /// A token's norm over `width` numbers: what it saves beside its input, and its input where that is a copy in more bits.
    fn norm(&self, width: u64) -> u64 {
        let s = self.subject;
        let copy = if s.is_narrow() { width * s.wide() } else { 0 };
        let normed = if s.trains_weights() { width * s.element() } else { 0 };
        copy + s.wide() + normed
    }

    /// While it is drawn which of a projection's inputs are dropped: two words of 64 bits for each.
    fn drawn(&self) -> u64 {
        let Trained::Adapter { targets, has_dropout: true, .. } = self.subject.trained else { return 0 };
        let inputs = targets.iter().map(|projection| projection.shape(self.subject.config)[1] as u64);
        16 * inputs.max().unwrap_or(0)
    }

    /// What an adapter's matrices on a projection save: `x Aᵀ`, and where inputs are dropped the factors and what is left of x.
    fn addition(&self, projection: Projection) -> u64 {
        let Trained::Adapter { r, targets, has_dropout } = self.subject.trained else { return 0 };
        let dropped = if *has_dropout { 2 * projection.shape(self.subject.config)[1] as u64 } else { 0 };
        if targets.contains(&projection) { (*r as u64 + dropped) * self.subject.element() } else { 0 }
    }

    fn additions(&self, projections: &[Projection]) -> u64 {
        projections.iter().map(|&projection| self.addition(projection)).sum()
    }

    /// A tensor of so many numbers a token, if one of the projections keeps its input.
    fn input_of(&self, projections: &[Projection], width: u64) -> u64 {
        let is_kept = projections.iter().any(|&projection| self.subject.keeps_input(projection));
        if is_kept { width * self.subject.element() } else { 0 }
    }

    fn graph_of_attention(&self) -> u64 {
        use Projection::{Key, Output, Query, Value};
        let (s, w) = (self.subject, self.subject.element());
        let (e, q, kv) = (s.hidden(), s.queries(), s.keys());
        let norm = if self.has_gradient_below() { self.norm(e) } else { 0 };
        let head_norms = if s.config.variant.has_qk_norm {
            let inputs = if s.is_narrow() { 0 } else { (q + kv) * w };
            inputs + self.norm(q) + self.norm(kv) + (s.config.num_heads + s.config.num_kv_heads) as u64 * s.wide()
        } else {
            0
        };
        let rotation = s.config.head_dim as u64 * w;
        let attended = w * (q + 2 * kv + q) + s.config.num_heads as u64 * s.wide();
        // In more bits the next norm has a copy of its own, and the sum itself is not kept.
        let sum = if s.is_narrow() { 0 } else { e * w };
        norm + self.input_of(&[Query, Key, Value], e)
            + self.additions(&[Query, Key, Value, Output])
            + head_norms
            + rotation
            + attended
            + self.input_of(&[Output], q)
            + sum
    }

    fn graph_of_mlp(&self) -> u64 {
        use Projection::{Down, Gate, Up};
        let (s, w) = (self.subject, self.subject.element());
        let (e, i) = (s.hidden(), s.config.intermediate_size as u64);
        let sum = if s.is_narrow() { 0 } else { e * w };
        self.norm(e)
            + self.input_of(&[Gate, Up], e)
            + self.additions(&[Gate, Up, Down])
            + 3 * i * w
            + self.input_of(&[Down], i)
            + sum
    }
}
