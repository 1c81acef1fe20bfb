//! What follows a layer's attention: a gated MLP; or experts, with a router, the MLPs that it chooses from, and what is trained beside all of
//! them at once.

use tch::{Kind, Tensor, no_grad};

use super::attend::{Attend, Routed};
use super::linear::{Linear, LoraDelta};
use super::names::layer_tensor;
use super::positions::TokenContext;
use super::spec::{Activation, ExpertsSpec, LinearSpec, Preference, STACKED_DOWN, STACKED_GATE_UP};
use super::vectors::scaled;
use super::weights::Weights;
use crate::ops::attention::accumulation_kind;
use crate::ops::experts::Grouping;
use crate::ops::linear::{LowRank, Weight, linear};
use crate::ops::pointwise::{clamped_swiglu, geglu, swiglu};
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
            Self::Packed(all) => all.iter().map(|weight| weight.map(Tensor::shallow_clone)).collect(),
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

    /// Each expert, with what is trained beside gate and up, and beside down, on its part of the tokens `(N, E)`, which are sorted by expert. What is
    /// made of all matrices is made anew for each use: under autograd, one operation brings the gradients of all experts together.
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

    /// `(B, n, E)` in and out.
    pub(super) fn forward(
        &self,
        layer: LayerIdx,
        x_bne: &Tensor,
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let probability_bnx = self.router.probabilities(x_bne, tokens);
        let (top_k, num_experts) = (self.router.spec.top_k, self.router.spec.num_experts);
        let routed = Routed { probability_bnx: &probability_bnx, top_k };
        let chosen_bnk = attend.route(layer, routed, &|| self.router.choose(&probability_bnx))?;
        let weight_bnk = self.router.weights(&probability_bnx, &chosen_bnk);
        let grouping = Grouping::new(&chosen_bnk.view([-1, top_k as i64]), num_experts);
        let spread_ne = grouping.spread(&x_bne.reshape([-1, x_bne.size()[2]]));
        let by_expert = |delta: &LoraDelta| delta.by_expert(num_experts);
        let [gate_up, down] = self.stacked.each_ref().map(|(_, delta)| delta.as_ref().map(by_expert));
        let made = self.matrices.forward(&spread_ne, &grouping.rows, gate_up.as_deref(), down.as_deref());
        drop((spread_ne, gate_up, down));
        let routed_bne = grouping.gather(&made, &weight_bnk.view([-1, top_k as i64])).view(&x_bne.size()[..]);
        Ok(match &self.shared {
            Some(shared) => routed_bne + shared.forward(x_bne, tokens),
            None => routed_bne,
        })
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let mlps = if let ExpertMatrices::Apart(mlps, _) = &self.matrices { &mlps[..] } else { &[] };
        let apart = mlps.iter().chain(self.shared.as_deref()).flat_map(Mlp::linears);
        std::iter::once(&self.router.linear).chain(apart)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        let mlps = if let ExpertMatrices::Apart(mlps, _) = &mut self.matrices { &mut mlps[..] } else { &mut [] };
        let apart = mlps.iter_mut().chain(self.shared.as_deref_mut()).flat_map(Mlp::linears_mut);
        std::iter::once(&mut self.router.linear).chain(apart)
    }

    /// The tensors of the model itself that are of no linear.
    pub(super) fn further_tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.matrices.stacked().into_iter().chain(&self.router.correction_x)
    }
}

#[derive(Debug)]
struct Router {
    linear: Linear,
    spec: ExpertsSpec,
    /// What a router with [`Preference::Sigmoid`] adds for the choice.
    correction_x: Option<Tensor>,
}

impl Router {
    fn load(weights: &Weights, layer: LayerIdx, spec: &ExpertsSpec, hidden: usize) -> Result<Self, Fault> {
        let linear = Linear::load(weights, layer, &spec.router(hidden), spec.has_wide_router())?;
        let correction = spec.correction().map(|path| weights.load_wide(&layer_tensor(layer.0, &path)));
        Ok(Self { linear, spec: spec.clone(), correction_x: correction.transpose()? })
    }

    /// The probability of each expert: `(B, n, E)` in, `(B, n, X)` in the accumulation kind out.
    fn probabilities(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let kind = accumulation_kind(x_bne.kind());
        match self.spec.preference {
            Preference::Softmax => self.linear.forward(x_bne, tokens).softmax(-1, kind),
            // Published models of this kind compute the scores in f32 already.
            Preference::Sigmoid { .. } => self.linear.forward(&x_bne.to_kind(kind), tokens).sigmoid(),
        }
    }

    /// The experts that each token prefers: `(B, n, X)` in, `(B, n, k)` int64 out.
    fn choose(&self, probability_bnx: &Tensor) -> Tensor {
        no_grad(|| {
            let corrected = self.correction_x.as_ref().map(|correction_x| probability_bnx + correction_x);
            let preferred_bnx = match self.spec.preference {
                Preference::Sigmoid { groups, kept } => of_groups(&corrected.unwrap_or_default(), groups as i64, kept as i64),
                Preference::Softmax => probability_bnx.shallow_clone(),
            };
            preferred_bnx.topk(self.spec.top_k as i64, -1, true, true).1
        })
    }

    /// The weights of the experts that were chosen: `(B, n, X)` and `(B, n, k)` in, `(B, n, k)` out.
    fn weights(&self, probability_bnx: &Tensor, chosen_bnk: &Tensor) -> Tensor {
        let mut weight_bnk = probability_bnx.gather(-1, chosen_bnk, false);
        if self.spec.is_renormalised {
            // The least is nothing beside a sum of softmax; sigmoids may all be 0.
            weight_bnk = &weight_bnk / (weight_bnk.sum_dim_intlist(&[-1i64][..], true, weight_bnk.kind()) + 1e-20);
        }
        scaled(weight_bnk, self.spec.weight_scale)
    }
}

/// Scores with 0 for experts outside of the groups that are kept, as published models were run, even where some of a kept group are less.
fn of_groups(score_bnx: &Tensor, groups: i64, kept: i64) -> Tensor {
    if groups == kept {
        return score_bnx.shallow_clone();
    }
    let [b, n, experts] = <[i64; 3]>::try_from(score_bnx.size()).unwrap_or_default();
    let by_group = score_bnx.view([b, n, groups, experts / groups]);
    let best_two = by_group.topk(2, -1, true, false).0.sum_dim_intlist(&[-1i64][..], false, score_bnx.kind());
    let is_kept = best_two.zeros_like().to_kind(Kind::Bool).scatter_value(-1, &best_two.topk(kept, -1, true, false).1, 1);
    by_group.masked_fill(&is_kept.logical_not().unsqueeze(-1), 0.0).view([b, n, experts])
}

#[derive(Debug)]
pub(super) struct Mlp {
    /// Gate and up, or one linear with up behind gate.
    inputs: Vec<Linear>,
    down: Linear,
    activation: Activation,
}

impl Mlp {
    /// Loads the linears of `specs`: those before the gate, and then the one behind it.
    pub(super) fn load(weights: &Weights, layer: LayerIdx, specs: &[LinearSpec], activation: Activation) -> Result<Self, Fault> {
        let mut inputs = specs.iter().map(|spec| Linear::load(weights, layer, spec, false)).collect::<Result<Vec<_>, _>>()?;
        let down = inputs.remove(specs.len() - 1);
        Ok(Self { inputs, down, activation })
    }

    /// `(B, n, E)` in and out.
    pub(super) fn forward(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.down.forward(&self.gated(|linear, _| linear.forward(x_bne, tokens)), tokens)
    }

    /// Computes as [`Self::forward`] for tokens `(N, E)` by themselves, with low-rank matrices for gate, up and down that lie elsewhere.
    fn forward_added(&self, x_ne: &Tensor, [gate, up, down]: [Option<LowRank<'_>>; 3]) -> Tensor {
        self.down.forward_added(&self.gated(|linear, index| linear.forward_added(x_ne, [gate, up][index])), down)
    }

    /// What `forward` makes by each of the linears before the gate, given with its number, and the gate of both. Gate and up are gone,
    /// but for what autograd keeps, before the next product.
    fn gated(&self, forward: impl Fn(&Linear, usize) -> Tensor) -> Tensor {
        if let [gate, up] = &self.inputs[..] {
            return activated(self.activation, &forward(gate, 0), &forward(up, 1));
        }
        let both = forward(&self.inputs[0], 0);
        let half = both.size()[both.dim() - 1] / 2;
        activated(self.activation, &both.narrow(-1, 0, half), &both.narrow(-1, half, half))
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.iter().chain([&self.down])
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.iter_mut().chain([&mut self.down])
    }
}

/// Two tensors of one shape in, the same shape out.
fn activated(activation: Activation, gate: &Tensor, up: &Tensor) -> Tensor {
    match activation {
        Activation::Silu => swiglu(gate, up),
        Activation::GeluTanh => geglu(gate, up),
        Activation::ClampedSilu => clamped_swiglu(gate, up),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Transformers 5.3 has it: an expert of a group that is dropped has a score of 0, not none.
    #[test]
    fn experts_of_groups_that_are_dropped_have_a_score_of_zero() {
        let of = |scores: &[f64], groups, kept| {
            let score_bnx = Tensor::from_slice(scores).view([1, 1, -1]);
            Vec::<f64>::try_from(of_groups(&score_bnx, groups, kept).view([-1])).unwrap()
        };
        // The best expert of all stands in a group whose best two are worth least.
        let scores = [0.9, -0.5, 0.4, 0.3, 0.35, 0.3, 0.1, 0.6];
        assert_eq!(of(&scores, 4, 2), [0.0, 0.0, 0.4, 0.3, 0.0, 0.0, 0.1, 0.6]);
        assert_eq!(of(&scores, 2, 1), [0.9, -0.5, 0.4, 0.3, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(of(&scores, 1, 1), scores);
    }
}
