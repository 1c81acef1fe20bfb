//! A layer's experts: a router, the MLPs that it chooses from, and what is trained beside all of them at once.

use tch::{Tensor, no_grad};

use super::ModelError;
use super::attend::{Attend, AttendError, Routed};
use super::delta::{Delta, LoraDelta};
use super::dropout::TokenContext;
use super::linear::Linear;
use super::mlp::Mlp;
use super::names::layer_tensor;
use super::spec::{Activation, ExpertsSpec, STACKED_DOWN, STACKED_GATE_UP};
use super::weights::Weights;
use crate::ops::attention::accumulation_kind;
use crate::ops::experts::Grouping;
use crate::ops::linear::LowRank;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Experts {
    spec: ExpertsSpec,
    router: Linear,
    mlps: Vec<Mlp>,
    /// Beside gate and up, and beside down, of all experts.
    stacked: [StackedDelta; 2],
}

/// Matrices of low rank beside the same linear of all experts, in two tensors: A `(X·r, in)`, expert by expert, and B `(out, r·X)`,
/// whose columns of one expert are X apart, as PEFT keeps them.
#[derive(Debug)]
pub(super) struct StackedDelta {
    /// In the model: `model.layers.3.mlp.experts.gate_up_proj`.
    pub(super) name: String,
    pub(super) delta: Option<Delta>,
}

/// A and B of one expert, and the factor.
struct ExpertDelta {
    a_ri: Tensor,
    b_or: Tensor,
    scale: f64,
}

impl StackedDelta {
    /// By expert. Made anew for each use: under autograd, one operation brings the gradients of all experts together.
    fn by_expert(&self, num_experts: usize) -> Option<Vec<ExpertDelta>> {
        let Delta::Lora(LoraDelta { a_ri, b_or, scale, .. }) = self.delta.as_ref()?;
        let (experts, inner, out) = (num_experts as i64, a_ri.size()[1], b_or.size()[0]);
        let a = a_ri.view([experts, -1, inner]).unbind(0);
        // Products want each expert's columns side by side.
        let b = b_or.view([out, -1, experts]).permute([2, 0, 1]).contiguous().unbind(0);
        Some(a.into_iter().zip(b).map(|(a_ri, b_or)| ExpertDelta { a_ri, b_or, scale: *scale }).collect())
    }
}

impl ExpertDelta {
    /// With the rows `start .. start + len` of B.
    fn part(&self, start: i64, len: i64) -> Self {
        Self { a_ri: self.a_ri.shallow_clone(), b_or: self.b_or.narrow(0, start, len), scale: self.scale }
    }

    fn low_rank(&self) -> LowRank<'_> {
        LowRank { a_ri: &self.a_ri, b_or: &self.b_or, scale: self.scale, x_bni: None }
    }
}

impl Experts {
    pub(super) fn load(weights: &Weights, layer: LayerIdx, spec: &ExpertsSpec, hidden: usize) -> Result<Self, ModelError> {
        let expert = |expert| Mlp::load(weights, layer, spec.expert(expert, hidden), Activation::Silu);
        let stacked = [STACKED_GATE_UP, STACKED_DOWN].map(|path| StackedDelta { name: layer_tensor(layer.0, path), delta: None });
        Ok(Self {
            router: Linear::load(weights, layer, &spec.router(hidden))?,
            mlps: (0..spec.num_experts).map(expert).collect::<Result<_, _>>()?,
            stacked,
            spec: spec.clone(),
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
    ) -> Result<Tensor, AttendError> {
        let (top_k, num_experts) = (self.spec.top_k as i64, self.spec.num_experts);
        let score_bnx = self.router.forward(x_bne, tokens);
        let probability_bnx = score_bnx.softmax(-1, accumulation_kind(score_bnx.kind()));
        let routed = Routed { probability_bnx: &probability_bnx, top_k: self.spec.top_k };
        let choose = || no_grad(|| probability_bnx.topk(top_k, -1, true, true).1);
        let chosen_bnk = attend.route(layer, routed, &choose)?;
        let mut weight_bnk = probability_bnx.gather(-1, &chosen_bnk, false);
        if self.spec.is_renormalised {
            weight_bnk = &weight_bnk / weight_bnk.sum_dim_intlist(&[-1i64][..], true, weight_bnk.kind());
        }
        let grouping = Grouping::new(&chosen_bnk.view([-1, top_k]), num_experts);
        let made = self.by_expert(&grouping.spread(&x_bne.reshape([-1, x_bne.size()[2]])), grouping.rows());
        Ok(grouping.gather(&made, &weight_bnk.view([-1, top_k])).view(&x_bne.size()[..]))
    }

    /// Each expert on its part of the tokens, which are sorted by expert.
    fn by_expert(&self, x_ne: &Tensor, rows: &[i64]) -> Tensor {
        let [gate_up, down] = self.stacked.each_ref().map(|stacked| stacked.by_expert(self.spec.num_experts));
        let width = self.spec.intermediate_size as i64;
        let (mut made, mut start) = (Vec::with_capacity(rows.len()), 0);
        for (index, (expert, &count)) in self.mlps.iter().zip(rows).enumerate() {
            let here = x_ne.narrow(0, start, count);
            start += count;
            if count == 0 {
                continue;
            }
            let of = |all: &Option<Vec<ExpertDelta>>, start, len| all.as_ref().map(|all| all[index].part(start, len));
            let added = [of(&gate_up, 0, width), of(&gate_up, width, width), of(&down, 0, x_ne.size()[1])];
            made.push(expert.forward_added(&here, added.each_ref().map(|delta| delta.as_ref().map(ExpertDelta::low_rank))));
        }
        if made.is_empty() { x_ne.shallow_clone() } else { Tensor::cat(&made, 0) }
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        std::iter::once(&self.router).chain(self.mlps.iter().flat_map(Mlp::linears))
    }

    pub(super) fn linears_mut(&mut self) -> (impl Iterator<Item = &mut Linear>, &mut [StackedDelta; 2]) {
        let linears = std::iter::once(&mut self.router).chain(self.mlps.iter_mut().flat_map(Mlp::linears_mut));
        (linears, &mut self.stacked)
    }

    pub(super) fn stacked(&self) -> &[StackedDelta; 2] {
        &self.stacked
    }
}
