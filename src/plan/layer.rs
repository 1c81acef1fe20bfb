//! What the tokens of a column take in one layer: what its graph keeps for the backward, and what is there for a moment. Every term
//! stands for a tensor that an operation of the layer saves or makes.

use super::StepSpec;
use super::attention::Kernel;
use super::projection::Projection;
use super::step_spec::TrainedPart;
use crate::model::{BranchNorms, LayerSpec};
use crate::native;

/// Bytes of one layer for one column of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerBytes {
    /// What autograd keeps, the layer's output with it.
    pub(super) graph: u64,
    /// Of this what the MLP keeps, which is gone when the backward comes to attention.
    pub(super) graph_of_mlp: u64,
    /// The most at a time in addition to its input, without autograd.
    pub(super) forward: u64,
    /// What attention's kernel takes for itself.
    pub(super) attending: u64,
    /// The most at a time in addition to input and graph, while the MLP is computed with autograd.
    pub(super) in_addition_to_graph: u64,
    /// The most at a time in addition to graphs, in the backward of the MLP.
    pub(super) backward_of_mlp: u64,
    /// The same in that of attention.
    pub(super) backward_of_attention: u64,
}

/// Numbers a token and bytes, layer by layer.
pub(super) struct Layer<'a> {
    pub(super) spec: &'a StepSpec<'a>,
    pub(super) index: usize,
    /// Tokens of the column, pads with them, of all sequences.
    pub(super) tokens: u64,
    /// Whether they are one chunk in which no sequence ends.
    pub(super) is_one_chunk: bool,
    pub(super) kernel: Kernel,
}

impl Layer<'_> {
    fn layer(&self) -> &LayerSpec {
        &self.spec.config.layers[self.index]
    }

    /// H · D, G · D and the width of what a token meets behind attention.
    fn widths(&self) -> [u64; 3] {
        let [queries, keys, _] = self.layer().attention.widths();
        [queries, keys, self.layer().feed_forward.intermediate_size()].map(|width| width as u64)
    }

    pub(super) fn bytes(&self) -> LayerBytes {
        let (s, w) = (self.spec, self.spec.element());
        let (e, [q, kv, i]) = (s.hidden(), self.widths());
        let graph_of_mlp = self.graph_of_mlp();
        // Gate, up and what comes of them; without autograd the last alone is there when its product begins.
        let (gated, drawn) = (w * (2 * e + 3 * i), self.drawn());
        let in_mlp = gated.max(w * (3 * e + i)).max(w * (2 * e + i) + drawn);
        let in_attention = w * (e + 2 * q + 4 * kv);
        LayerBytes {
            graph: self.tokens * (self.graph_of_attention() + graph_of_mlp),
            graph_of_mlp: self.tokens * graph_of_mlp,
            attending: self.kernel.forward,
            forward: (self.tokens * in_mlp).max(self.tokens * in_attention + self.kernel.forward),
            in_addition_to_graph: self.tokens * (gated + drawn).saturating_sub(graph_of_mlp),
            backward_of_mlp: self.tokens * self.backward_of_mlp(),
            backward_of_attention: self.tokens * w * (2 * e + 2 * q + 2 * kv) + self.kernel.backward,
        }
    }

    /// Gradients of gate and up, and that of their gated product, whose value the down projection has kept and frees.
    fn backward_of_mlp(&self) -> u64 {
        let (s, w) = (self.spec, self.spec.element());
        let (e, [_, _, i]) = (s.hidden(), self.widths());
        let freed = (self.input_of(&[Projection::Down], i) + self.addition(Projection::Down)).min(i * w);
        let is_fused = native::computes(s.device, s.kind);
        let gradients = if s.is_narrow() && !is_fused { i * (2 * w + 3 * s.wide()) } else { 3 * i * w };
        2 * e * w + gradients - freed
    }

    /// Whether a gradient goes on below the layer.
    fn has_gradient_below(&self) -> bool {
        self.index > 0 || self.spec.trains_embedding()
    }

    /// What so many norms of a token save in addition to their inputs.
    fn norms(&self, count: usize) -> u64 {
        count as u64 * self.spec.wide()
    }

    /// What a branch makes, where a norm of it keeps it.
    fn made(&self, norms: BranchNorms) -> u64 {
        norms.output.map_or(0, |_| self.spec.hidden() * self.spec.element() + self.norms(1))
    }

    /// While it is drawn which of a projection's inputs are dropped: two words of 64 bits for each.
    fn drawn(&self) -> u64 {
        let TrainedPart::Adapter { targets, has_dropout: true, .. } = self.spec.trained else { return 0 };
        let inputs = targets.iter().map(|projection| projection.shape(self.layer(), self.spec.config.hidden_size)[1] as u64);
        16 * inputs.max().unwrap_or(0)
    }

    /// What an adapter's matrices on a projection save: `x Aᵀ`, and where inputs are dropped the factors and what is left of x. With lengths
    /// of rows, what is scaled by them, too.
    fn addition(&self, projection: Projection) -> u64 {
        let TrainedPart::Adapter { r, targets, has_dropout, has_magnitudes, .. } = self.spec.trained else { return 0 };
        let [out, inner] = projection.shape(self.layer(), self.spec.config.hidden_size);
        let dropped = if *has_dropout { 2 * inner } else { 0 };
        let scaled = if *has_magnitudes { out } else { 0 };
        if targets.contains(&projection) { (r + dropped + scaled) as u64 * self.spec.element() } else { 0 }
    }

    fn additions(&self, projections: &[Projection]) -> u64 {
        projections.iter().map(|&projection| self.addition(projection)).sum()
    }

    /// A tensor of so many numbers a token, if one of the projections keeps its input.
    fn input_of(&self, projections: &[Projection], width: u64) -> u64 {
        let is_kept = projections.iter().any(|&projection| self.spec.keeps_input(projection));
        if is_kept { width * self.spec.element() } else { 0 }
    }

    fn graph_of_attention(&self) -> u64 {
        use Projection::{Key, Output, Query, QueryKeyValue, Value};
        let (s, w) = (self.spec, self.spec.element());
        let (e, [q, kv, _], attention) = (s.hidden(), self.widths(), &self.layer().attention);
        let norm = if self.has_gradient_below() { self.norms(1) } else { 0 };
        let head_norms =
            if attention.qk_norm.is_some() { (q + kv) * w + self.norms(attention.num_heads + attention.num_kv_heads) } else { 0 };
        let attended = w * (q + 2 * kv + q) + attention.num_heads as u64 * s.wide();
        // The kernel lays a chunk's output out as the projection reads it: what both keep is one tensor.
        let is_shared = self.is_one_chunk && native::computes(s.device, s.kind);
        let joined = if is_shared { 0 } else { self.input_of(&[Output], q) };
        // The next norm's input.
        let sum = e * w;
        let made = self.made(self.layer().norms.attention);
        norm + made
            + self.input_of(&[Query, Key, Value, QueryKeyValue], e)
            + self.additions(&[Query, Key, Value, QueryKeyValue, Output])
            + head_norms
            + attended
            + joined
            + sum
    }

    fn graph_of_mlp(&self) -> u64 {
        use Projection::{Down, Gate, GateUp, Up};
        let (s, w) = (self.spec, self.spec.element());
        let (e, [_, _, i]) = (s.hidden(), self.widths());
        let (gate_and_up, sum) = (2 * i * w, e * w);
        self.norms(1)
            + self.made(self.layer().norms.feed_forward)
            + self.input_of(&[Gate, Up, GateUp], e)
            + self.additions(&[Gate, Up, GateUp, Down])
            + gate_and_up
            + self.input_of(&[Down], i)
            + sum
    }
}
