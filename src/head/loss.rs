//! Cross-entropy of a block of scores, with its gradient.

use tch::{Kind, Tensor};

#[derive(Debug)]
pub struct BlockLoss {
    /// Losses, and below them 1 where the target is the first of the largest scores: `(2, N)`, f64.
    pub loss_and_correct_2n: Tensor,
    /// The gradient of `weight · Σ losses` with respect to the scores `(N, K)`, where there is a weight.
    pub gradient_nk: Option<Tensor>,
}

/// Losses `log Σ exp(scores) − scores[target]`. One tensor is made of the size of the scores.
///
/// # Shapes
/// `scores_nk (N, K)`, `target_n (N)`, i64.
pub(super) fn cross_entropy(scores_nk: &Tensor, target_n: &Tensor, weight: Option<f64>) -> BlockLoss {
    let target_n1 = target_n.unsqueeze(1);
    let (largest_n1, best_n1) = scores_nk.max_dim(-1, true);
    let mut power_nk = (scores_nk - &largest_n1).exp_();
    let sum_n1 = power_nk.sum_dim_intlist(&[-1i64][..], true, power_nk.kind());
    let value_n1 = sum_n1.log() + largest_n1 - scores_nk.gather(1, &target_n1, false);
    let figures = [&value_n1, &best_n1.eq_tensor(&target_n1)].map(|figure| figure.to_kind(Kind::Double).view(-1));
    let gradient_nk = weight.map(|weight| {
        power_nk *= sum_n1.reciprocal() * weight;
        power_nk.scatter_add_(1, &target_n1, &value_n1.full_like(-weight))
    });
    BlockLoss { loss_and_correct_2n: Tensor::stack(&figures, 0), gradient_nk }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn losses_and_gradient_are_those_of_cross_entropy() {
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 2e-6)] {
            for (n, k) in [(1, 1), (3, 7), (65, 1024), (5, 5000)] {
                let scores = Tensor::randn([n, k], (kind, Device::Cpu)) * 9.0;
                let target = Tensor::randint(k, [n], (Kind::Int64, Device::Cpu));
                let BlockLoss { loss_and_correct_2n: ours, gradient_nk: of_ours } = cross_entropy(&scores, &target, Some(0.3));
                let leaf = scores.to_kind(Kind::Double).set_requires_grad(true);
                let plain = leaf.cross_entropy_loss::<Tensor>(&target, None, tch::Reduction::None, -100, 0.0);
                (plain.sum(Kind::Double) * 0.3).backward();
                assert!(ours.get(0).allclose(&plain, bound, bound, false), "{kind:?} {n} × {k}");
                assert!(of_ours.unwrap().to_kind(Kind::Double).allclose(&leaf.grad(), bound, bound, false), "{kind:?} {n} × {k}");
                let alone = cross_entropy(&scores, &target, None);
                assert!(alone.loss_and_correct_2n == ours && alone.gradient_nk.is_none());
            }
        }
        // Equal scores, some that are far apart, and one that is no number.
        let scores = Tensor::from_slice2(&[[2f32, 2.0, 1.0], [2.0, 2.0, 1.0], [0.0, -1e30, 900.0], [0.0, f32::NAN, 1.0]]);
        let found = cross_entropy(&scores, &Tensor::from_slice(&[0i64, 1, 1, 2]), Some(1.0));
        let figures: Vec<f64> = found.loss_and_correct_2n.view(-1).try_into().unwrap();
        assert_eq!(figures[0].to_bits(), figures[1].to_bits());
        assert!(figures[2] > 9e29 && figures[3].is_nan());
        assert_eq!(figures[4..], [1.0, 0.0, 0.0, 0.0]);
        let gradient: Vec<f32> = found.gradient_nk.unwrap().get(2).try_into().unwrap();
        assert_eq!(gradient, [0.0, -1.0, 1.0]);
    }
}
