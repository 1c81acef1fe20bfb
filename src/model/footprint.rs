//! What a decoder layer keeps for its backward, and takes while it computes: closed forms of its widths, by the token of a column.

use tch::{Device, Kind};

use super::{AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, Projection, TrainedPart};
use crate::native::{self, AttentionShape};
use crate::ops::attention::accumulation_kind;
use crate::ops::experts::ROWS_MULTIPLE;

/// A layer whose memory is asked for, and how it computes.
#[derive(Clone, Copy, Debug)]
pub struct LayerFootprint<'a> {
    pub layer: &'a LayerSpec,
    /// Width of the residual stream.
    pub hidden: usize,
    pub trained: &'a TrainedPart,
    pub has_gradient_below: bool,
    pub kind: Kind,
    pub device: Device,
    /// Threads that compute, on a CPU.
    pub threads: usize,
}

/// A column of tokens on its way through a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnShape {
    /// Tokens of all sequences, pads with them.
    pub tokens: usize,
    pub sequences: usize,
    /// Tokens of a sequence in the longest chunk.
    pub chunk: usize,
    /// Entries that the cache holds at the end.
    pub slots: usize,
    /// Whether the column is one chunk in which no sequence ends.
    pub is_one_chunk: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// What autograd keeps, the layer's output with it.
    pub graph: u64,
    /// The share of the MLP, which is freed before the backward comes to attention.
    pub graph_of_mlp: u64,
    /// The most at a time in addition to the input, without autograd.
    pub forward: u64,
    /// What the attention kernel works on, or a policy's choice behind it.
    pub attending: u64,
    /// The most in addition to input and graph, in the MLP's forward with autograd.
    pub beside_graph: u64,
    /// The most in addition to graphs in the MLP's backward.
    pub backward_of_mlp: u64,
    /// The most in addition to graphs in the backward of attention.
    pub backward_of_attention: u64,
}

impl LayerBytes {
    /// The same of a layer that ends at its attention; what is added to the residual stream `sum` bytes large, and the MLP, are not made.
    pub fn of_attention(self, sum: u64) -> Self {
        let graph = self.graph - self.graph_of_mlp - sum;
        Self { graph, graph_of_mlp: 0, beside_graph: 0, backward_of_mlp: 0, ..self }
    }
}

/// What an MLP takes of a [`LayerBytes`].
#[derive(Clone, Copy, Default)]
struct MlpBytes {
    graph: u64,
    forward: u64,
    beside_graph: u64,
    backward: u64,
}

/// Bytes of a policy's scores, sums, orders and indices, by entry and head of keys and values.
const SCORE_BYTES: u64 = 32;

impl LayerFootprint<'_> {
    /// What a column takes; a cache that is quantised restores `restored` bytes of entries for attention.
    pub fn bytes(&self, column: &ColumnShape, restored: u64) -> LayerBytes {
        let (w, e, tokens) = (self.element(), self.hidden as u64, column.tokens as u64);
        let [q, kv, _] = self.widths();
        let MlpBytes { graph: graph_of_mlp, forward: in_mlp, beside_graph, backward } = match &self.layer.feed_forward {
            FeedForwardSpec::Dense { intermediate_size, .. } => self.gated_mlp(*intermediate_size as u64, tokens),
            FeedForwardSpec::Experts(spec) => self.experts(spec, tokens),
        };
        let [attending, attending_backward] = self.attention_scratch(column).map(|bytes| bytes + restored);
        let scores = SCORE_BYTES * (column.sequences * self.layer.attention.num_kv_heads * column.slots) as u64;
        let attending = attending.max(scores + restored);
        LayerBytes {
            graph: tokens * self.graph_of_attention(column.is_one_chunk) + graph_of_mlp,
            graph_of_mlp,
            forward: in_mlp.max(tokens * w * (e + 2 * q + 4 * kv) + attending),
            attending,
            beside_graph,
            backward_of_mlp: backward,
            backward_of_attention: tokens * w * (2 * e + 2 * q + 2 * kv) + attending_backward,
        }
    }

    /// Attention's output and log-sum-exps, where they wait for the backward.
    pub fn waiting_outputs(&self, column: &ColumnShape) -> u64 {
        let AttentionSpec { num_heads, head_dim, .. } = self.layer.attention;
        (column.tokens * num_heads) as u64 * (head_dim as u64 * self.element() + self.wide())
    }

    fn element(&self) -> u64 {
        self.kind.elt_size_in_bytes() as u64
    }

    /// Bytes of a number that is summed up, at least four.
    fn wide(&self) -> u64 {
        accumulation_kind(self.kind).elt_size_in_bytes() as u64
    }

    /// Channels of queries, of keys and of values.
    fn widths(&self) -> [u64; 3] {
        self.layer.attention.widths().map(|width| width as u64)
    }

    /// `E + 3 HD + 2 GD + 5 r + H + 1` numbers a token, and HD more where chunks are joined.
    fn graph_of_attention(&self, is_one_chunk: bool) -> u64 {
        use Projection::{Key, Output, Query, QueryKeyValue, Value};
        let (attention, e, [q, kv, _]) = (&self.layer.attention, self.hidden as u64, self.widths());
        let heads = attention.num_heads as u64;
        // The kernel lays one chunk's output out as the next projection reads it.
        let is_shared = is_one_chunk && native::computes(self.device, self.kind);
        let joined = if is_shared { 0 } else { self.input_of(&[Output], q) };
        let (normed, of_norms) =
            if attention.qk_norm.is_some() { (q + kv, heads + attention.num_kv_heads as u64) } else { (0, 0) };
        let numbers = self.input_of(&[Query, Key, Value, QueryKeyValue], e) + 2 * q + 2 * kv + joined + normed + e;
        let wide = heads + of_norms + u64::from(self.has_gradient_below);
        self.element() * numbers
            + self.wide() * wide
            + self.adapters(&[Query, Key, Value, QueryKeyValue, Output])
            + self.normed_output(self.layer.norms.behind_attention.is_some())
    }

    /// An MLP of `i` channels: `2 E + 3 I + 2 r + 1` numbers a token in the graph.
    fn gated_mlp(&self, i: u64, tokens: u64) -> MlpBytes {
        use Projection::{Down, Gate, GateUp, Up};
        let (w, wide, e, drawn) = (self.element(), self.wide(), self.hidden as u64, self.dropout_draws());
        let numbers = self.input_of(&[Gate, Up, GateUp], e) + 2 * i + self.input_of(&[Down], i) + e;
        let graph = w * numbers
            + wide
            + self.adapters(&[Gate, Up, GateUp, Down])
            + self.normed_output(self.layer.norms.behind_feed_forward.is_some());
        let gated = w * (2 * e + 3 * i);
        // Gradients of gate, up and their product, whose value is freed meanwhile.
        let freed = (w * self.input_of(&[Down], i) + self.adapters(&[Down])).min(i * w);
        let is_fused = native::computes(self.device, self.kind);
        let gradients = if wide > w && !is_fused { i * (2 * w + 3 * wide) } else { 3 * i * w };
        MlpBytes {
            graph: tokens * graph,
            forward: tokens * gated.max(w * (3 * e + i)).max(w * (2 * e + i) + drawn),
            beside_graph: tokens * (gated + drawn).saturating_sub(graph),
            backward: tokens * (2 * e * w + gradients - freed),
        }
    }

    /// Experts, and the MLP beside them: a copy of each token for each of its experts, what that one makes of it, and both once more while
    /// they are brought together. Copies are k a token, and pads.
    fn experts(&self, spec: &ExpertsSpec, tokens: u64) -> MlpBytes {
        use Projection::{Gate, GateUp, Up};
        let (w, wide, e) = (self.element(), self.wide(), self.hidden as u64);
        let (chosen, experts) = (spec.top_k as u64 * tokens, spec.num_experts as u64);
        // Half of what an expert's rows are rounded up to is pads, on average.
        let copies = chosen + ROWS_MULTIPLE as u64 * experts.min(chosen) / 2;
        let keeps_inputs = self.input_of(&[Gate, Up, GateUp], 1);
        let all = self.gated_mlp(spec.intermediate_size as u64, copies);
        let one = self.gated_mlp(spec.intermediate_size as u64, copies / experts.max(1));
        let shared = spec.shared_size.map_or(MlpBytes::default(), |width| self.gated_mlp(width as u64, tokens));
        // Beside what experts keep: the sum of what they make, the norm's root, and the router's probabilities.
        let graph = all.graph - copies * wide + tokens * (w * e + wide * (1 + experts)) + self.laid_out(spec);
        let one_by_one = one.forward + one.backward;
        let products = chosen * e * if wide > w { w + 2 * wide } else { 2 * w };
        MlpBytes {
            graph: graph + shared.graph,
            forward: (copies * e * w * 2 + one_by_one.max(copies * e * w) + 2 * tokens * e * w)
                .max(shared.forward + tokens * e * w),
            beside_graph: (copies * e * w * (2 - keeps_inputs)).max(2 * chosen * e * w).max(shared.beside_graph) + tokens * e * w,
            backward: (2 * tokens * e * w + copies * e * w + products).max(shared.backward),
        }
    }

    /// The matrices B beside all experts, which each column lays out anew, expert by expert.
    fn laid_out(&self, spec: &ExpertsSpec) -> u64 {
        let TrainedPart { r, targets, .. } = self.trained;
        let out = |projection: &Projection| match projection {
            Projection::Gate | Projection::Up => spec.intermediate_size,
            Projection::Down => self.hidden,
            _ => 0,
        };
        (r * spec.num_experts * targets.iter().map(out).sum::<usize>()) as u64 * self.element()
    }

    /// What a branch has made, where a norm keeps it.
    fn normed_output(&self, is_normed: bool) -> u64 {
        if is_normed { self.hidden as u64 * self.element() + self.wide() } else { 0 }
    }

    /// `width` numbers, if one of the projections keeps its input as it is.
    fn input_of(&self, projections: &[Projection], width: u64) -> u64 {
        let TrainedPart { is_weights, targets, has_dropout, .. } = self.trained;
        // Of inputs that are dropped the rest is kept, which is the adapter's.
        let is_kept = !has_dropout && projections.iter().any(|projection| targets.contains(projection));
        if *is_weights || is_kept { width } else { 0 }
    }

    /// Bytes that an adapter's matrices keep beside some projections: r numbers, with dropout two inputs, with magnitudes the output.
    fn adapters(&self, projections: &[Projection]) -> u64 {
        let TrainedPart { r, targets, has_dropout, has_magnitudes, .. } = self.trained;
        let numbers = projections.iter().filter(|projection| targets.contains(projection)).map(|projection| {
            let [out, inner] = projection.shape(self.layer, self.hidden);
            r + if *has_dropout { 2 * inner } else { 0 } + if *has_magnitudes { out } else { 0 }
        });
        numbers.sum::<usize>() as u64 * self.element()
    }

    /// Two words of 64 bits for each number that may be dropped, while that is drawn.
    fn dropout_draws(&self) -> u64 {
        let inputs = self
            .trained
            .targets
            .iter()
            .filter(|_| self.trained.has_dropout)
            .map(|projection| projection.shape(self.layer, self.hidden)[1] as u64);
        16 * inputs.max().unwrap_or(0)
    }

    /// The most that the attention kernel has for itself, forward and backward.
    fn attention_scratch(&self, column: &ColumnShape) -> [u64; 2] {
        let AttentionSpec { num_heads, num_kv_heads, head_dim, .. } = self.layer.attention;
        let (w, wide) = (self.element(), self.wide());
        let entries = (column.sequences * column.slots * num_kv_heads) as u64;
        let keys = entries * head_dim as u64;
        if native::computes(self.device, self.kind) {
            let (batch, tokens) = (column.sequences, column.chunk);
            let (heads, groups, width, threads) = (num_heads, num_kv_heads, head_dim, self.threads.max(1));
            let [forward, backward] =
                AttentionShape { batch, heads, groups, tokens, width, keys: column.slots, threads }.scratch();
            return [wide * (forward + 2 * entries), wide * (backward + 2 * keys)];
        }
        // An output and a log-sum-exp each of past and chunk, merged in more bits, and gradients of both. A kernel of CUDA may make
        // gradients of keys for each query head first.
        let queries = (column.sequences * column.chunk * num_heads * head_dim) as u64;
        let by_query_head = 2 * (column.sequences * column.slots * (num_heads + num_kv_heads) * head_dim) as u64 * w;
        let of_keys = if self.device.is_cuda() { by_query_head.max(2 * keys * wide) } else { 2 * keys * wide };
        [queries * (2 * w + 3 * wide), queries * (2 * w + 2 * wide) + of_keys]
    }
}
