//! What the layers of a model are: data, from which the one decoder layer is built. A family reads it from its `config.json`.

use std::borrow::Cow;

pub(super) use crate::ops::attention::ScoreRule;
pub use crate::ops::frequencies::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling};

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Its attention.
    pub attention: AttentionSpec,
    /// What follows its attention.
    pub feed_forward: FeedForwardSpec,
}

/// A linear of a layer. Whoever speaks of one names its path: which ones a layer has is for its specs alone to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Inside the layer: `self_attn.q_proj`.
    pub path: Cow<'static, str>,
    /// Channels that come out.
    pub out: usize,
    /// Channels that go in.
    pub inner: usize,
    /// Whether a bias is added.
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
    /// All linears of the layer, on a residual stream of width `hidden`, in the order in which they are computed. A linear's place in it is
    /// its number in the masks of dropout.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        self.attention.linears(hidden).into_iter().chain(self.feed_forward.linears(hidden)).collect()
    }
}

/// The attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// H, query heads.
    pub num_heads: usize,
    /// G, heads of keys and values; divides H.
    pub num_kv_heads: usize,
    /// D, even.
    pub head_dim: usize,
    /// Scale and window of the scores.
    pub rule: ScoreRule,
    /// How queries and keys are rotated; `None` where they know no position.
    pub rope: Option<RopeSpec>,
    /// Each head of queries and keys is normalised before it is rotated.
    pub has_qk_norm: bool,
    /// Queries, keys and values have a bias.
    pub has_qkv_bias: bool,
    /// What comes back from the heads has a bias.
    pub has_output_bias: bool,
}

impl AttentionSpec {
    /// Those to queries, keys and values, and that from the heads back to the residual stream.
    pub fn linears(&self, hidden: usize) -> [LinearSpec; 4] {
        let [queries, keys] = [self.num_heads, self.num_kv_heads].map(|heads| heads * self.head_dim);
        [
            LinearSpec::new("self_attn.q_proj", [queries, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.k_proj", [keys, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.v_proj", [keys, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.o_proj", [hidden, queries], self.has_output_bias),
        ]
    }
}

/// The part of a layer that acts on each token alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedForwardSpec {
    /// A gated MLP with `SiLU`.
    Dense {
        /// Its width.
        intermediate_size: usize,
        /// Its projections have a bias.
        has_bias: bool,
    },
    /// Some of many gated MLPs, which a router chooses for each token.
    Experts(ExpertsSpec),
}

/// A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): gated MLPs with `SiLU`, of which each token goes to those with the largest
/// router probabilities, and gets the sum of what they make of it, weighted by these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertsSpec {
    /// X, how many there are.
    pub num_experts: usize,
    /// k, how many a token goes to.
    pub top_k: usize,
    /// The width of each.
    pub intermediate_size: usize,
    /// The weights of a token's experts are divided by their sum.
    pub is_renormalised: bool,
    /// How its linears are called in checkpoints.
    pub names: &'static ExpertNames,
}

/// What a family calls the linears of its experts.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Where router and experts are in the layer: `mlp`.
    pub block: &'static str,
    /// Of one expert: gate, up, down.
    pub linears: [&'static str; 3],
}

impl ExpertsSpec {
    /// The linear whose outputs are the experts' scores.
    pub(super) fn router(&self, hidden: usize) -> LinearSpec {
        LinearSpec { path: format!("{}.gate", self.names.block).into(), out: self.num_experts, inner: hidden, has_bias: false }
    }

    /// Gate, up and down of one expert.
    pub(super) fn expert(&self, expert: usize, hidden: usize) -> [LinearSpec; 3] {
        let [gate, up, down] = self.names.linears;
        let linear = |name: &str, [out, inner]: [usize; 2]| LinearSpec {
            path: format!("{}.experts.{expert}.{name}", self.names.block).into(),
            out,
            inner,
            has_bias: false,
        };
        let (wide, narrow) = ([self.intermediate_size, hidden], [hidden, self.intermediate_size]);
        [linear(gate, wide), linear(up, wide), linear(down, narrow)]
    }

    /// The matrices of all experts side by side, as adapters may target them: gate above up, and down. Shapes are those of one expert.
    pub(super) fn stacked(&self, hidden: usize) -> [LinearSpec; 2] {
        [
            LinearSpec::new(STACKED_GATE_UP, [2 * self.intermediate_size, hidden], false),
            LinearSpec::new(STACKED_DOWN, [hidden, self.intermediate_size], false),
        ]
    }
}

/// What PEFT calls the gate and up matrices of all experts, whatever they are called in a checkpoint.
pub(super) const STACKED_GATE_UP: &str = "mlp.experts.gate_up_proj";
/// The same of the down matrices.
pub(super) const STACKED_DOWN: &str = "mlp.experts.down_proj";

impl FeedForwardSpec {
    /// Its linears, in the order in which they are computed.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        match self {
            Self::Dense { intermediate_size, has_bias } => gated_linears(*intermediate_size, hidden, *has_bias).into(),
            Self::Experts(spec) => {
                let experts = (0..spec.num_experts).flat_map(|expert| spec.expert(expert, hidden));
                std::iter::once(spec.router(hidden)).chain(experts).collect()
            }
        }
    }

    /// The width that a token meets between its projections: of all of its experts together.
    pub fn intermediate_size(&self) -> usize {
        match self {
            Self::Dense { intermediate_size, .. } => *intermediate_size,
            Self::Experts(spec) => spec.top_k * spec.intermediate_size,
        }
    }

    /// The experts, where it has some.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        if let Self::Experts(spec) = self { Some(spec) } else { None }
    }
}

/// The linears of a gated MLP: gate, up, down.
pub(super) fn gated_linears(intermediate: usize, hidden: usize, has_bias: bool) -> [LinearSpec; 3] {
    [
        LinearSpec::new("mlp.gate_proj", [intermediate, hidden], has_bias),
        LinearSpec::new("mlp.up_proj", [intermediate, hidden], has_bias),
        LinearSpec::new("mlp.down_proj", [hidden, intermediate], has_bias),
    ]
}
