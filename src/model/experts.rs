//! A layer's experts: a router, the MLPs that it chooses from, and what is trained beside all of them at once.

use tch::Tensor;

use super::attend::{Attend, Routed};
use super::delta::LoraDelta;
use super::linear::Linear;
use super::mlp::{Mlp, activated};
use super::names::layer_tensor;
use super::positions::TokenContext;
use super::router::Router;
use super::spec::{Activation, ExpertsSpec, LinearSpec, STACKED_DOWN, STACKED_GATE_UP};
use super::weights::Weights;
use crate::ops::experts::Grouping;
use crate::ops::linear::{LowRank, Weight, linear};
use crate::units::{Fault, LayerIdx};

#[derive(Debug)]
pub(super) struct Experts {
    router: Router,
    matrices: ExpertMatrices,
    /// What all tokens go to beside their experts.
    shared: Option<Box<Mlp>>,
    /// Matrices of low rank beside gate and up, and beside down, of all experts at once, each in two tensors ([`LoraDelta::by_expert`]), by the
    /// name of these linears in the model, as `model.layers.3.mlp.experts.gate_up_proj`.
    pub(super) stacked: [(String, Option<LoraDelta>); 2],
}

#[derive(Debug)]
enum ExpertMatrices {
    Apart(Vec<Mlp>, i64),
    /// All side by side: gate and up by turns, and down, with biases `(X, 2I)` and `(X, E)`.
    Stacked {
        matrices: [StackedMatrices; 2],
        biases: [Tensor; 2],
        activation: Activation,
    },
}

/// The matrices of a linear of all experts.
#[derive(Debug)]
enum StackedMatrices {
    /// Inputs before outputs: `(X, E, 2I)` and `(X, I, E)`.
    Plain(Tensor),
    /// Packed one by one, outputs before inputs: `(2I, E)` and `(E, I)` of each expert.
    Packed(Vec<Weight>),
}

impl StackedMatrices {
    fn by_expert(&self) -> Vec<Weight> {
        match self {
            Self::Plain(all) => all.unbind(0).into_iter().map(|weight| Weight::Plain(weight.transpose(0, 1))).collect(),
            Self::Packed(all) => all.iter().map(Weight::shallow_clone).collect(),
        }
    }

    fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Self::Plain(all) => vec![all],
            Self::Packed(all) => all.iter().flat_map(Weight::tensors).collect(),
        }
    }
}

impl ExpertMatrices {
    fn load(weights: &Weights, layer: LayerIdx, spec: &ExpertsSpec, hidden: usize) -> Result<Self, Fault> {
        if spec.is_stacked() {
            let load = |path: String| weights.load(&layer_tensor(layer.0, &path));
            let [gate_up, down] = [STACKED_GATE_UP, STACKED_DOWN];
            let packed = |path: &str| weights.load_packed_experts(&layer_tensor(layer.0, path));
            let matrices = match packed(gate_up)?.zip(packed(down)?) {
                Some((gate_up, down)) => [gate_up, down].map(StackedMatrices::Packed),
                None => [load(gate_up.into())?, load(down.into())?].map(StackedMatrices::Plain),
            };
            let biases = [load(format!("{gate_up}_bias"))?, load(format!("{down}_bias"))?];
            return Ok(Self::Stacked { matrices, biases, activation: spec.activation });
        }
        let load = |linears: [LinearSpec; 3]| Mlp::load(weights, layer, &linears, spec.activation);
        let mlps = spec.experts(hidden).into_iter().map(load).collect::<Result<_, _>>()?;
        Ok(Self::Apart(mlps, spec.intermediate_size as i64))
    }

    /// Each expert on its part of the tokens, which are sorted by expert, with what is trained beside gate and up of each, and beside down.
    /// What is made of all matrices is made anew for each use: under autograd, one operation brings the gradients of all experts together.
    ///
    /// # Shapes
    /// `(N, E)` in and out.
    fn forward(&self, x_ne: &Tensor, rows: &[i64], gate_up: Option<&[LoraDelta]>, down: Option<&[LoraDelta]>) -> Tensor {
        match self {
            Self::Apart(mlps, width) => one_by_one(x_ne, rows, |expert, x_ne| {
                let parts = [0, *width].map(|start| gate_up.map(|all| all[expert].rows(start, *width)));
                let [gate, up] = parts.each_ref().map(|part| part.as_ref().map(|delta| delta.low_rank(None)));
                mlps[expert].forward_added(x_ne, [gate, up, low_rank(down, expert)])
            }),
            Self::Stacked { matrices, biases, activation } => {
                let [gate_up_bias, down_bias] = biases.each_ref().map(|bias| bias.unbind(0));
                let [gate_up_ie, down_ei] = matrices.each_ref().map(StackedMatrices::by_expert);
                one_by_one(x_ne, rows, |expert, x_ne| {
                    let both = linear(x_ne, &gate_up_ie[expert], Some(&gate_up_bias[expert]), low_rank(gate_up, expert));
                    let [gate, up] = [0, 1].map(|first| both.slice(-1, first, None, 2));
                    drop(both);
                    let activated = activated(*activation, &gate, &up);
                    linear(&activated, &down_ei[expert], Some(&down_bias[expert]), low_rank(down, expert))
                })
            }
        }
    }

    fn mlps(&self) -> &[Mlp] {
        if let Self::Apart(mlps, _) = self { mlps } else { &[] }
    }

    fn mlps_mut(&mut self) -> &mut [Mlp] {
        if let Self::Apart(mlps, _) = self { mlps } else { &mut [] }
    }

    /// All tensors that are of no linear.
    fn stacked(&self) -> Vec<&Tensor> {
        let Self::Stacked { matrices: [gate_up, down], biases: [gate_up_bias, down_bias], .. } = self else { return Vec::new() };
        [gate_up.tensors(), vec![gate_up_bias], down.tensors(), vec![down_bias]].concat()
    }
}

fn low_rank(all: Option<&[LoraDelta]>, expert: usize) -> Option<LowRank<'_>> {
    all.map(|all| all[expert].low_rank(None))
}

/// What `forward` makes of the parts of tokens of experts, which it gets by their numbers.
fn one_by_one(x_ne: &Tensor, rows: &[i64], forward: impl Fn(usize, &Tensor) -> Tensor) -> Tensor {
    // Parts that are split off together get their gradients together: by itself each would be as large as all.
    let parts = x_ne.split_with_sizes(rows, 0).into_iter().enumerate().filter(|(expert, _)| rows[*expert] > 0);
    let made: Vec<Tensor> = parts.map(|(expert, x_ne)| forward(expert, &x_ne)).collect();
    if made.is_empty() { x_ne.shallow_clone() } else { Tensor::cat(&made, 0) }
}

impl Experts {
    pub(super) fn load(weights: &Weights, layer: LayerIdx, spec: &ExpertsSpec, hidden: usize) -> Result<Self, Fault> {
        let stacked = [STACKED_GATE_UP, STACKED_DOWN].map(|path| (layer_tensor(layer.0, path), None));
        let shared = spec.shared(hidden).map(|linears| Mlp::load(weights, layer, &linears, spec.activation));
        Ok(Self {
            router: Router::load(weights, layer, spec, hidden)?,
            matrices: ExpertMatrices::load(weights, layer, spec, hidden)?,
            shared: shared.transpose()?.map(Box::new),
            stacked,
        })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        x_bne: &Tensor,
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let probability_bnx = self.router.probabilities(x_bne, tokens);
        let routed = Routed { probability_bnx: &probability_bnx, top_k: self.router.top_k };
        let chosen_bnk = attend.route(layer, routed, &|| self.router.choose(&probability_bnx))?;
        let weight_bnk = self.router.weights(&probability_bnx, &chosen_bnk);
        let (top_k, num_experts) = (self.router.top_k as i64, probability_bnx.size()[2] as usize);
        let grouping = Grouping::new(&chosen_bnk.view([-1, top_k]), num_experts);
        let spread_ne = grouping.spread(&x_bne.reshape([-1, x_bne.size()[2]]));
        let by_expert = |delta: &LoraDelta| delta.by_expert(num_experts);
        let [gate_up, down] = self.stacked.each_ref().map(|(_, delta)| delta.as_ref().map(by_expert));
        let made = self.matrices.forward(&spread_ne, grouping.rows(), gate_up.as_deref(), down.as_deref());
        drop((spread_ne, gate_up, down));
        let routed_bne = grouping.gather(&made, &weight_bnk.view([-1, top_k])).view(&x_bne.size()[..]);
        Ok(match &self.shared {
            Some(shared) => routed_bne + shared.forward(x_bne, tokens),
            None => routed_bne,
        })
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let apart = self.matrices.mlps().iter().chain(self.shared.as_deref()).flat_map(Mlp::linears);
        std::iter::once(&self.router.linear).chain(apart)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let apart = self.matrices.mlps_mut().iter_mut().chain(self.shared.as_deref_mut()).flat_map(Mlp::linears_mut);
        std::iter::once(&mut self.router.linear).chain(apart)
    }

    /// The tensors of the model itself that are of no linear.
    pub(super) fn further_tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.matrices.stacked().into_iter().chain(&self.router.correction_x)
    }
}
