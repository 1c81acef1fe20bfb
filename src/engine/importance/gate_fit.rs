//! Gates by least squares: a linear map from attention's input to the logarithm of an entry's importance.

use tch::{Kind, Tensor};

use crate::cache::STREAMING_LLM_SINKS;

/// Entries of which fewer queries tell are left out.
pub(in crate::engine) const MIN_QUERIES: usize = 256;

/// What is added to an importance before its logarithm, as a part of the mean: far below it, differences decide nothing.
const FLOOR: f64 = 1e-3;

/// Ridge, as a part of the mean variance of a channel.
const RIDGE: f64 = 2e-4;

/// Sums over entries for a linear fit, in f64.
#[derive(Debug, Default)]
pub(in crate::engine) struct GateFit {
    num_entries: f64,
    /// Sum of importances by KV head `(G)`.
    importance_g: Option<Tensor>,
    /// Of products of the inputs, a constant 1, and the labels with each other, `(E + 1 + G, E + 1 + G)`.
    products: Option<Tensor>,
}

/// A gate, and the part of its labels' variance that it explains, on average over KV heads and less what it owes to having many channels.
#[derive(Debug)]
pub struct FittedGate {
    /// Weight `(G, E)` and bias `(G)`, f64.
    pub output: [Tensor; 2],
    pub explained: f64,
}

impl GateFit {
    /// Adds a chunk's entries, of which `sums_bgn2` are sums of importance and numbers of queries.
    pub(super) fn add(&mut self, x_bne: &Tensor, sums_bgn2: &Tensor, start: usize) {
        let (sum_bgn, queries_bgn) = (sums_bgn2.select(3, 0), sums_bgn2.select(3, 1));
        let num_tokens = x_bne.size()[1];
        let is_sink = Tensor::arange_start(start as i64, start as i64 + num_tokens, (Kind::Int64, x_bne.device()))
            .lt(STREAMING_LLM_SINKS as i64);
        let counts_bn = queries_bgn.ge(MIN_QUERIES as f64).all_dim(1, false).logical_and(&is_sink.logical_not());
        let rows = |x: &Tensor| x.flatten(0, 1).index_select(0, &counts_bn.flatten(0, -1).nonzero().squeeze_dim(1));
        let mean_mg = rows(&(sum_bgn / queries_bgn.clamp_min(1.0)).transpose(1, 2)).to_kind(Kind::Double);
        let (count, groups) = mean_mg.size2().unwrap_or_default();
        if count == 0 {
            return;
        }
        self.num_entries += count as f64;
        plus(&mut self.importance_g, mean_mg.sum_dim_intlist(&[0i64][..], false, Kind::Double));
        let mean_g = self.importance_g.as_ref().map(|sum| sum / self.num_entries);
        let floor_g = mean_g.unwrap_or_default().view([1, groups]) * FLOOR + f64::MIN_POSITIVE;
        let y_mg = (mean_mg + floor_g).log();
        let x_me = rows(x_bne).to_kind(Kind::Double);
        let all = Tensor::cat(&[&x_me, &x_me.narrow(1, 0, 1).ones_like(), &y_mg], 1);
        plus(&mut self.products, all.transpose(0, 1).matmul(&all));
    }

    /// The gate with the least squared error, and a little ridge; `None` of fewer entries than channels.
    pub(in crate::engine) fn solve(&self) -> Option<FittedGate> {
        let (products, groups, n) = (self.products.as_ref()?, self.importance_g.as_ref()?.size()[0], self.num_entries);
        let width = products.size()[0] - 1 - groups;
        if n <= width as f64 + 1.0 {
            return None;
        }
        // Around the means, so that no ridge pulls at the bias.
        let mean = products.narrow(0, width, 1) / n;
        let around = products / n - mean.transpose(0, 1).matmul(&mean);
        let (of_inputs, of_labels) = (around.narrow(0, 0, width), around.narrow(0, width + 1, groups));
        let (covariance, with_labels) = (of_inputs.narrow(1, 0, width), of_inputs.narrow(1, width + 1, groups));
        let ridge = covariance.diagonal(0, 0, 1).mean(Kind::Double) * RIDGE;
        let ridged = &covariance + Tensor::eye(width, (Kind::Double, products.device())) * ridge;
        let weight_eg = Tensor::linalg_solve(&ridged, &with_labels, true);
        let variance_g = of_labels.narrow(1, width + 1, groups).diagonal(0, 0, 1);
        let by_head = |x: Tensor| x.sum_dim_intlist(&[0i64][..], false, Kind::Double);
        let error_g =
            &variance_g - by_head(&weight_eg * &with_labels) * 2.0 + by_head(&weight_eg * covariance.matmul(&weight_eg));
        let bias_g = (mean.narrow(1, width + 1, groups) - mean.narrow(1, 0, width).matmul(&weight_eg)).view(-1);
        // As many entries as channels could be fitted to any labels (adjusted R²).
        let free = (n - 1.0) / (n - width as f64 - 1.0);
        // Of equal labels rounding leaves a variance, which is none.
        let is_constant_g = variance_g.le_tensor(&(mean.narrow(1, width + 1, groups).view(-1).square() * 1e-12));
        let explained = 1.0 - (error_g / variance_g.masked_fill(&is_constant_g, 0.0)).mean(Kind::Double).double_value(&[]) * free;
        Some(FittedGate { output: [weight_eg.transpose(0, 1).contiguous(), bias_g], explained })
    }
}

fn plus(total: &mut Option<Tensor>, more: Tensor) {
    *total = Some(if let Some(mut total) = total.take() { total.g_add_(&more) } else { more });
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn a_linear_rule_is_found_again_and_all_of_it_explained() {
        let (x_bne, weight_ge) =
            (Tensor::randn([2, 300, 6], (Kind::Double, Device::Cpu)), Tensor::randn([2, 6], (Kind::Double, Device::Cpu)) * 0.3);
        let importance_bgn = (x_bne.matmul(&weight_ge.transpose(0, 1)).transpose(1, 2) - 30.0).exp();
        let queries = importance_bgn.full_like(400.0);
        let mut fit = GateFit::default();
        fit.add(&x_bne, &Tensor::stack(&[&importance_bgn * &queries, queries.shallow_clone()], -1), 8);
        let found = fit.solve().unwrap();
        assert!(found.explained > 0.98, "{}", found.explained);
        assert!(found.output[0].allclose(&weight_ge, 0.02, 0.02, false));
        assert!((found.output[1].mean(Kind::Double).double_value(&[]) + 30.0).abs() < 0.2);
        let mut constant = GateFit::default();
        constant.add(&x_bne, &Tensor::stack(&[&queries, &queries], -1), 8);
        assert!(!constant.solve().unwrap().explained.is_finite(), "nothing varies, and nothing is explained");
        let few = Tensor::stack(&[&importance_bgn, &importance_bgn.full_like(255.0)], -1);
        let mut untold = GateFit::default();
        untold.add(&x_bne, &few, 8);
        assert!(untold.solve().is_none());
    }
}
