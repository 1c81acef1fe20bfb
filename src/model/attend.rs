//! The seam between a layer and whoever remembers the past.

use tch::Tensor;

use crate::native::cuda::GraphError;
use crate::ops::attention::ModelFeature;
pub use crate::ops::attention::Qkv;
use crate::units::{Exit, Fault, FaultKind, LayerIdx};

/// What a layer asks of whoever remembers the past.
pub trait Attend {
    /// Attends one layer's new tokens to the past and, causally, to themselves.
    ///
    /// # Shapes
    /// As in [`Qkv`]; `(B, H, n, D)` out.
    fn attend(&mut self, layer: LayerIdx, qkv: Qkv) -> Result<Tensor, Fault>;

    /// Whether anything follows a layer's attention. Where nothing does, only its keys and values are wanted: what it makes means nothing.
    fn wants_output(&self, _layer: LayerIdx) -> bool {
        true
    }

    /// The number with which each new token of a layer is to come.
    fn model_feature(&self, _layer: LayerIdx) -> Option<ModelFeature> {
        None
    }

    /// Sees what a layer's new tokens make their queries, keys and values of, `(B, n, E)`, before it is asked to attend. `queries` makes the
    /// queries `(B, H, n, D)` as they are before they are turned to their positions.
    fn see_input(&mut self, _layer: LayerIdx, _x_bne: &Tensor, _queries: &dyn Fn() -> Tensor) {}

    /// Which experts one layer's new tokens go to. `choose` takes those that the router prefers; whoever computes a chunk once more gives
    /// the experts that it had before, as a rounding could make the router prefer others. `(B, n, k)`, int64, out.
    fn route(&mut self, _layer: LayerIdx, _routed: Routed<'_>, choose: &dyn Fn() -> Tensor) -> Result<Tensor, Fault> {
        Ok(choose())
    }
}

/// What a router says of some tokens.
#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    /// The probability of each expert `(B, n, X)`, over all experts; with the router's history, where it is trained.
    pub probability_bnx: &'a Tensor,
    /// k, experts of a token.
    pub top_k: usize,
}

impl From<GraphError> for Fault {
    fn from(error: GraphError) -> Self {
        let is_lacking = matches!(error, GraphError::Lacking(_));
        let exit = if is_lacking { Exit::Usage } else { Exit::Failed };
        let hint = "set `grad.cuda_graphs = false`; `kvtune doctor` tries a graph by itself";
        let fault = Self::new(exit, error.to_string()).with_hint(hint);
        if is_lacking { fault.of_kind(FaultKind::NoGraphs) } else { fault }
    }
}
