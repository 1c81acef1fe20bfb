//! What the layers of a model are: data, from which the one decoder layer is built. A family reads it from its `config.json`.

use std::borrow::Cow;

pub(super) use crate::ops::attention::ScoreRule;
pub use crate::ops::frequencies::{DynamicYarnScaling, Llama3Scaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling};

#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    pub attention: AttentionSpec,
    pub feed_forward: FeedForwardSpec,
    pub norms: LayerNorms,
    /// What attention and feed-forward make is multiplied by it before it is added to the residual stream.
    pub residual_scale: f64,
}

/// The norms of a layer over the width of the residual stream, of which it may lack any: by their names in it, or as they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNorms<Norm = &'static str> {
    /// The norm of what attention takes from the residual stream.
    pub before_attention: Option<Norm>,
    /// The norm of what it makes, before that is added.
    pub behind_attention: Option<Norm>,
    /// The norms of what follows attention, likewise.
    pub before_feed_forward: Option<Norm>,
    pub behind_feed_forward: Option<Norm>,
}

impl LayerNorms {
    /// Before both branches, as most models have them.
    pub(super) const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        behind_attention: None,
        before_feed_forward: Some("post_attention_layernorm"),
        behind_feed_forward: None,
    };
    /// Before both branches and behind them (Gemma 2, arXiv 2408.00118, section 2).
    pub(super) const AROUND: Self = Self {
        before_attention: Some("input_layernorm"),
        behind_attention: Some("post_attention_layernorm"),
        before_feed_forward: Some("pre_feedforward_layernorm"),
        behind_feed_forward: Some("post_feedforward_layernorm"),
    };
    /// Behind both branches, whose inputs are the residual stream as it is (`OLMo` 2, arXiv 2501.00656, section 3.2).
    pub(super) const BEHIND: Self = Self { before_attention: None, before_feed_forward: None, ..Self::AROUND };
}

impl<Norm> LayerNorms<Norm> {
    /// The norms that there are, in the order in which they are computed.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Norm> {
        let Self { before_attention, behind_attention, before_feed_forward, behind_feed_forward } = self;
        [before_attention, behind_attention, before_feed_forward, behind_feed_forward].into_iter().flatten()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormSpec {
    /// The path inside the layer, as `self_attn.q_norm`.
    pub path: &'static str,
    /// Channels that are normalised together.
    pub width: usize,
}

/// How queries and keys are normalised before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    PerHead,
    FullWidth,
}

/// A factor on queries that grows with their position, as Llama 4 was published: `1 + beta · ln(1 + floor(position / original))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    pub beta: f64,
    pub original: usize,
}

/// What a gated MLP does to its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The product `x · sigmoid(x)`.
    Silu,
    /// `GELU`, the normal distribution in it approximated by a hyperbolic tangent.
    GeluTanh,
    /// `x · sigmoid(1.702 x)` of what is at most 7, for what is let through in ±7 and moved by 1 (gpt-oss, arXiv 2508.10925).
    ClampedSilu,
}

/// A linear of a layer. Whoever speaks of one names its path: which ones a layer has is for its specs alone to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// The path inside the layer, as `self_attn.q_proj`.
    pub path: Cow<'static, str>,
    pub out: usize,
    pub inner: usize,
    pub has_bias: bool,
}

impl LinearSpec {
    fn new(path: &'static str, [out, inner]: [usize; 2], has_bias: bool) -> Self {
        Self { path: path.into(), out, inner, has_bias }
    }

    /// The last part of its path, by which PEFT and recipes target it: `q_proj`.
    pub fn name(&self) -> &str {
        self.path.rsplit_once('.').map_or(&self.path, |(_, name)| name)
    }
}

impl LayerSpec {
    /// All linears of the layer on a residual stream of width `hidden`, in the order in which they are computed. A linear's
    /// place is its number in the masks of dropout.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        self.attention.linears(hidden).into_iter().chain(self.feed_forward.linears(hidden)).collect()
    }

    /// All norms of the layer, on a residual stream of width `hidden`.
    pub fn norms(&self, hidden: usize) -> Vec<NormSpec> {
        let around = self.norms.iter().map(|path| NormSpec { path, width: hidden });
        around.chain(self.attention.norms().into_iter().flatten()).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact by itself")]
pub struct AttentionSpec {
    pub num_heads: usize,
    /// G, heads of keys and values; divides H.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Scale, window and cap of the scores.
    pub rule: ScoreRule,
    /// How queries and keys are rotated; `None` where they know no position.
    pub rope: Option<RopeSpec>,
    pub qk_norm: Option<QkNorm>,
    pub query_growth: Option<QueryGrowth>,
    /// Queries, keys and values come of one linear, one behind the other.
    pub is_fused: bool,
    pub has_qkv_bias: bool,
    /// What comes back from the heads has a bias.
    pub has_output_bias: bool,
    /// Each query head has an attention sink: one more logit in its softmax, to which no value belongs.
    pub has_sinks: bool,
}

/// The attention sinks of a layer, inside it.
pub(super) const SINKS: &str = "self_attn.sinks";

impl AttentionSpec {
    /// All linears, that from the heads back to the residual stream as the last.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        self.inputs(hidden).into_iter().chain([self.output(hidden)]).collect()
    }

    /// The linears to queries, keys and values, or one to all of them.
    pub(super) fn inputs(&self, hidden: usize) -> Vec<LinearSpec> {
        let input = |path, width| LinearSpec::new(path, [width, hidden], self.has_qkv_bias);
        let [queries, keys, values] = self.widths();
        if self.is_fused {
            return vec![input("self_attn.qkv_proj", queries + keys + values)];
        }
        vec![input("self_attn.q_proj", queries), input("self_attn.k_proj", keys), input("self_attn.v_proj", values)]
    }

    pub(super) fn output(&self, hidden: usize) -> LinearSpec {
        LinearSpec::new("self_attn.o_proj", [hidden, self.widths()[0]], self.has_output_bias)
    }

    /// Channels of the queries of a token, of its keys and of its values.
    pub fn widths(&self) -> [usize; 3] {
        [self.num_heads, self.num_kv_heads, self.num_kv_heads].map(|heads| heads * self.head_dim)
    }

    /// Pairs of channels of a head that are turned to positions.
    pub fn pairs(&self) -> usize {
        self.rope.as_ref().map_or(0, |rope| rope.rotary_dim / 2)
    }

    /// The norms of queries and of keys, if they are normalised.
    pub(super) fn norms(&self) -> Option<[NormSpec; 2]> {
        let [queries, keys, _] = self.widths();
        let [of_queries, of_keys] = match self.qk_norm? {
            QkNorm::PerHead => [self.head_dim; 2],
            QkNorm::FullWidth => [queries, keys],
        };
        Some([NormSpec { path: "self_attn.q_norm", width: of_queries }, NormSpec { path: "self_attn.k_norm", width: of_keys }])
    }
}

/// The part of a layer that acts on each token alone.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardSpec {
    Dense {
        intermediate_size: usize,
        has_bias: bool,
        /// Gate and up come of one linear, one behind the other.
        is_fused: bool,
        activation: Activation,
    },
    /// Some of many gated MLPs, which a router chooses for each token.
    Experts(ExpertsSpec),
}

/// A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): gated MLPs, of which each token goes to those that the router prefers, and
/// gets the sum of what they make of it, weighted by its probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// X, how many there are.
    pub num_experts: usize,
    /// k, how many a token goes to.
    pub top_k: usize,
    pub intermediate_size: usize,
    /// How the router's scores become probabilities, and which experts are preferred.
    pub preference: Preference,
    /// The weights of a token's experts are divided by their sum.
    pub is_renormalised: bool,
    /// The weights are multiplied by it at last.
    pub weight_scale: f64,
    /// The width of a further MLP that all tokens go to, with weight 1.
    pub shared_size: Option<usize>,
    pub activation: Activation,
    /// How its linears are called in checkpoints.
    pub names: &'static ExpertNames,
}

/// How a router's scores become probabilities, and which experts it prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// Softmax over all experts; the largest are preferred.
    Softmax,
    /// Each expert by itself, and for the choice alone a correction is added (`DeepSeek`-V3, arXiv 2412.19437, section 2.1.2). Experts
    /// stand in groups of which some are kept: those with the largest sum of their two best experts.
    Sigmoid {
        groups: usize,
        /// How many of them are kept.
        kept: usize,
    },
}

/// What a family calls the linears of its experts.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Where router and experts are in the layer: `mlp`.
    pub block: &'static str,
    /// The router in the block: `gate`.
    pub router: &'static str,
    /// Gate, up and down of one expert. `None` where a checkpoint has the matrices of all experts in two tensors, inputs before outputs,
    /// gate and up by turns; then router and experts have biases.
    pub linears: Option<[&'static str; 3]>,
}

impl ExpertsSpec {
    /// The linear whose outputs are the experts' scores.
    pub(super) fn router(&self, hidden: usize) -> LinearSpec {
        let path = format!("{}.{}", self.names.block, self.names.router).into();
        LinearSpec { path, out: self.num_experts, inner: hidden, has_bias: self.is_stacked() }
    }

    /// Whether its router is in the accumulation kind, as published models of its kind are run.
    pub(super) fn has_wide_router(&self) -> bool {
        matches!(self.preference, Preference::Sigmoid { .. })
    }

    /// Whether checkpoints have the matrices of all experts side by side.
    pub(super) fn is_stacked(&self) -> bool {
        self.names.linears.is_none()
    }

    /// What is added to the probabilities of the experts for the choice, as a tensor in the layer.
    pub(super) fn correction(&self) -> Option<String> {
        let is_corrected = matches!(self.preference, Preference::Sigmoid { .. });
        is_corrected.then(|| format!("{}.{}.e_score_correction_bias", self.names.block, self.names.router))
    }

    /// Gate, up and down of each expert, where they are apart.
    pub(super) fn experts(&self, hidden: usize) -> Vec<[LinearSpec; 3]> {
        let Some(names) = &self.names.linears else { return Vec::new() };
        let of_expert =
            |expert| gated(&format!("{}.experts.{expert}", self.names.block), names, [self.intermediate_size, hidden]);
        (0..self.num_experts).map(of_expert).collect()
    }

    /// Gate, up and down of the MLP that all tokens go to.
    pub(super) fn shared(&self, hidden: usize) -> Option<[LinearSpec; 3]> {
        let names = ["gate_proj", "up_proj", "down_proj"];
        self.shared_size.map(|width| gated(&format!("{}.shared_experts", self.names.block), &names, [width, hidden]))
    }

    /// The matrices of all experts side by side, as adapters may target them, with the shapes of one: gate above up, or both by turns, and down.
    pub(super) fn stacked(&self, hidden: usize) -> [LinearSpec; 2] {
        [
            LinearSpec::new(STACKED_GATE_UP, [2 * self.intermediate_size, hidden], self.is_stacked()),
            LinearSpec::new(STACKED_DOWN, [hidden, self.intermediate_size], self.is_stacked()),
        ]
    }

    fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        let apart = self.experts(hidden).into_iter().chain(self.shared(hidden)).flatten();
        std::iter::once(self.router(hidden)).chain(apart).collect()
    }
}

/// Gate, up and down of an MLP of `wide` channels on a residual stream of `hidden`.
fn gated(path: &str, names: &[&str; 3], [wide, hidden]: [usize; 2]) -> [LinearSpec; 3] {
    let linear =
        |name: &str, [out, inner]: [usize; 2]| LinearSpec { path: format!("{path}.{name}").into(), out, inner, has_bias: false };
    let [gate, up, down] = names;
    [linear(gate, [wide, hidden]), linear(up, [wide, hidden]), linear(down, [hidden, wide])]
}

/// What PEFT calls the gate and up matrices of all experts, whatever they are called in a checkpoint.
pub(super) const STACKED_GATE_UP: &str = "mlp.experts.gate_up_proj";
pub(super) const STACKED_DOWN: &str = "mlp.experts.down_proj";

impl FeedForwardSpec {
    /// The linears, in the order in which they are computed.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        match self {
            Self::Dense { intermediate_size: wide, has_bias, is_fused, .. } => {
                let input = |path, width| LinearSpec::new(path, [width, hidden], *has_bias);
                let down = LinearSpec::new("mlp.down_proj", [hidden, *wide], *has_bias);
                if *is_fused {
                    return vec![input("mlp.gate_up_proj", 2 * wide), down];
                }
                vec![input("mlp.gate_proj", *wide), input("mlp.up_proj", *wide), down]
            }
            Self::Experts(spec) => spec.linears(hidden),
        }
    }

    /// The width that a token meets between its projections: of all of its experts together, the shared one among them.
    pub fn intermediate_size(&self) -> usize {
        match self {
            Self::Dense { intermediate_size, .. } => *intermediate_size,
            Self::Experts(spec) => spec.top_k * spec.intermediate_size + spec.shared_size.unwrap_or(0),
        }
    }

    pub fn experts(&self) -> Option<&ExpertsSpec> {
        if let Self::Experts(spec) = self { Some(spec) } else { None }
    }
}
