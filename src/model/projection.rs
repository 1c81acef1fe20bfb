//! The linears of a layer by what they do in it: which tensors they keep, and which of them share an input.

use super::LayerSpec;
use super::targets::LoraTarget;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    Query,
    Key,
    Value,
    /// From the heads back to the residual stream.
    Output,
    /// To all of these at once.
    QueryKeyValue,
    Gate,
    /// To what the gate lets through.
    Up,
    GateUp,
    /// From the MLP back to the residual stream.
    Down,
}

impl Projection {
    /// All of a layer's, in the order in which they are computed.
    pub const ALL: [Self; 9] =
        [Self::Query, Self::Key, Self::Value, Self::QueryKeyValue, Self::Output, Self::Gate, Self::Up, Self::GateUp, Self::Down];

    /// The path of the module inside a layer, such as `self_attn.q_proj`.
    fn path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::QueryKeyValue => "self_attn.qkv_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::GateUp => "mlp.gate_up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

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
        path == self.path() || path.contains("experts.") && self.expert_names().is_some_and(|names| names.contains(&end))
    }

    /// `[out, in]` in a layer, of experts what a token meets of them together; nothing where the layer has no such linear.
    pub fn shape(self, spec: &LayerSpec, hidden: usize) -> [usize; 2] {
        if let (Some(_), true) = (spec.feed_forward.experts(), self.expert_names().is_some()) {
            let wide = spec.feed_forward.intermediate_size();
            return if self == Self::Down { [hidden, wide] } else { [wide, hidden] };
        }
        let linears = spec.linears(hidden);
        linears.iter().find(|linear| linear.path == self.path()).map_or([0, 0], |linear| [linear.out, linear.inner])
    }

    /// The projections that are among some targets.
    pub(super) fn among(targets: &[LoraTarget]) -> Vec<Self> {
        let is_meant = |projection: &Self| targets.iter().any(|target| projection.is_at(&target.linear.spec.path));
        Self::ALL.into_iter().filter(is_meant).collect()
    }
}
