//! The linears of a layer by what they do in it: which tensors they keep, and which of them share an input.

use super::LayerSpec;
use super::targets::LoraTarget;
use crate::units::named;

named! {
    /// The linears of a layer by what they do in it, in the order in which they are computed, with the paths of their modules inside of it.
    pub enum Projection {
        Query = "self_attn.q_proj",
        Key = "self_attn.k_proj",
        Value = "self_attn.v_proj",
        /// To all of these at once.
        QueryKeyValue = "self_attn.qkv_proj",
        /// From the heads back to the residual stream.
        Output = "self_attn.o_proj",
        Gate = "mlp.gate_proj",
        /// To what the gate lets through.
        Up = "mlp.up_proj",
        GateUp = "mlp.gate_up_proj",
        /// From the MLP back to the residual stream.
        Down = "mlp.down_proj",
    }
}

impl Projection {
    pub fn is_of_attention_input(self) -> bool {
        matches!(self, Self::Query | Self::Key | Self::Value | Self::QueryKeyValue)
    }

    /// The ends of the paths of what does the same in experts: of one, and of all side by side.
    fn expert_names(self) -> Option<[&'static str; 3]> {
        match self {
            Self::Gate => Some(["gate_proj", "w1", "gate_up_proj"]),
            Self::Up => Some(["up_proj", "w3", "gate_up_proj"]),
            Self::Down => Some(["down_proj", "w2", "down_proj"]),
            _ => None,
        }
    }

    /// Whether a linear's path in its layer is that of this one, or of experts.
    fn is_at(self, path: &str) -> bool {
        let end = path.rsplit('.').next().unwrap_or_default();
        path == self.name() || path.contains("experts.") && self.expert_names().is_some_and(|names| names.contains(&end))
    }

    /// `[out, in]` in a layer on a residual stream of width `hidden`; nothing where the layer has no such linear. Of experts, what a token
    /// meets of them together.
    pub fn shape(self, spec: &LayerSpec, hidden: usize) -> [usize; 2] {
        if let (Some(_), true) = (spec.feed_forward.experts(), self.expert_names().is_some()) {
            let wide = spec.feed_forward.intermediate_size();
            return if self == Self::Down { [hidden, wide] } else { [wide, hidden] };
        }
        let linears = spec.linears(hidden);
        linears.iter().find(|linear| linear.path == self.name()).map_or([0, 0], |linear| [linear.out, linear.inner])
    }

    /// The projections that are among some targets.
    pub(super) fn among(targets: &[LoraTarget]) -> Vec<Self> {
        let is_meant = |projection: &Self| targets.iter().any(|target| projection.is_at(&target.linear.spec.path));
        Self::ALL.into_iter().filter(is_meant).collect()
    }
}
