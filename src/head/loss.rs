//! Losses of a block of scores, with their gradient: cross-entropy, and that mixed with the divergence from a teacher's predictions
//! (`head.distill`; Hinton et al. 2015, arXiv 1503.02531).

use tch::{Kind, Tensor};

use super::SoftRows;

#[derive(Debug)]
pub struct BlockLoss {
    /// Losses, and below them 1 where the target is the first of the largest scores: `(2, N)`, f64.
    pub loss_and_correct_2n: Tensor,
    /// The gradient of `weight · Σ losses` with respect to the scores `(N, K)`, where there is a weight.
    pub gradient_nk: Option<Tensor>,
}

/// Losses `log Σ exp(scores) − scores[target]`. One tensor is made of the size of the scores. `scores_nk (N, K)`, `target_n (N)`, i64.
pub(super) fn cross_entropy(scores_nk: &Tensor, target_n: &Tensor, weight: Option<f64>) -> BlockLoss {
    let target_n1 = target_n.unsqueeze(1);
    let (largest_n1, best_n1) = largest(scores_nk);
    let mut prob_nk = scores_nk.softmax(-1, None);
    // The likeliest has 1 / Σ exp(scores − largest), which is no less than 1 / K.
    let value_n1 = largest_n1 - prob_nk.gather(1, &best_n1, false).log() - scores_nk.gather(1, &target_n1, false);
    let figures = [&value_n1, &best_n1.eq_tensor(&target_n1)].map(|figure| figure.to_kind(Kind::Double).view(-1));
    let gradient_nk =
        weight.map(|weight| prob_nk.g_mul_scalar_(weight).scatter_add_(1, &target_n1, &value_n1.full_like(-weight)));
    BlockLoss { loss_and_correct_2n: Tensor::stack(&figures, 0), gradient_nk }
}

/// Scores in a part of a row. On the CPU libtorch takes eight times as long to find where the largest score stands as to find how large it is. So
/// the largest of each part is found first, and only one part is searched.
const PART: i64 = 64;

/// The largest of each row's scores, and the first place that has it: `scores_nk (N, K)`; results `(N, 1)`.
fn largest(scores_nk: &Tensor) -> (Tensor, Tensor) {
    if scores_nk.size()[1] % PART != 0 || scores_nk.device().is_cuda() {
        return scores_nk.max_dim(-1, true);
    }
    let parts = scores_nk.unflatten(1, [-1, PART]);
    let (largest_n1, part_n1) = parts.amax(-1, false).max_dim(-1, true);
    let of_part = parts.gather(1, &part_n1.unsqueeze(-1).expand([-1, -1, PART], false), false);
    (largest_n1, part_n1 * PART + of_part.argmax(-1, false))
}

/// Losses and gradient of [`Head::Distilled`](super::Head::Distilled), whose weight is `share`: `scores_nk (N, K)`, `target_n (N)`, i64.
pub(super) fn distilled(
    scores_nk: &Tensor,
    target_n: &Tensor,
    soft: &SoftRows,
    share: f64,
    temperature: f64,
    weight: Option<f64>,
) -> BlockLoss {
    let (hard, softness) = (1.0 - share, share * temperature * temperature);
    let BlockLoss { loss_and_correct_2n, gradient_nk } = cross_entropy(scores_nk, target_n, weight.map(|weight| weight * hard));
    let weight = weight.map(|weight| weight * softness / temperature);
    let (divergence_n, of_divergence) = divergence(&(scores_nk / temperature), soft, weight);
    let loss_n = loss_and_correct_2n.get(0) * hard + divergence_n.to_kind(Kind::Double) * softness;
    let gradient_nk = gradient_nk.zip(of_divergence).map(|(mut sum, part)| sum.g_add_(&part));
    BlockLoss { loss_and_correct_2n: Tensor::stack(&[loss_n, loss_and_correct_2n.get(1)], 0), gradient_nk }
}

/// KL from the teacher's rows to the softmax of `scores_nv`, and the gradient of `weight` times their sum: `scores_nv (N, V)`; results `(N)` and
/// `(N, V)`.
fn divergence(scores_nv: &Tensor, soft: &SoftRows, weight: Option<f64>) -> (Tensor, Option<Tensor>) {
    let (token_nk, teacher_nk) = (&soft.token_nk, soft.log_prob_nk.to_kind(scores_nv.kind()));
    let log_q_nv = scores_nv.log_softmax(-1, None);
    let log_q_nk = log_q_nv.gather(1, token_nk, false);
    let p_nk = teacher_nk.exp();
    // All other tokens together. Rounding may leave the teacher nothing for them, or something where there are none.
    let p_rest_n1 = (-p_nk.sum_dim_intlist(&[-1i64][..], true, p_nk.kind()) + 1.0).clamp_min(0.0);
    let log_q_rest_n1 = log_q_nv.scatter_value(1, token_nk, f64::NEG_INFINITY).logsumexp(&[-1i64][..], true);
    let has_rest_n1 = p_rest_n1.gt(0.0).logical_and(&log_q_rest_n1.isfinite());
    let log_ratio_n1 = (p_rest_n1.log() - log_q_rest_n1).where_self(&has_rest_n1, &p_rest_n1.zeros_like());
    let of_tokens_n1 = (&p_nk * (teacher_nk - &log_q_nk)).sum_dim_intlist(&[-1i64][..], true, p_nk.kind());
    let divergence_n = (of_tokens_n1 + &p_rest_n1 * &log_ratio_n1).squeeze_dim(1);
    let gradient_nv = weight.map(|weight| {
        // As one exponent: at low temperatures the ratio alone may be more than any number. The product is at most what is left to the teacher.
        let taken_nv = (&log_q_nv + log_ratio_n1).exp() * has_rest_n1.to_kind(p_nk.kind());
        let of_tokens_nk = (log_q_nk.exp() - p_nk) * weight;
        ((log_q_nv.exp() - taken_nv) * weight).scatter_(1, token_nk, &of_tokens_nk)
    });
    (divergence_n, gradient_nv)
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
        // In parts as in one: equal scores, rows of nothing else, and what is no number.
        for (n, k, values) in [(50, 64, 3), (50, 640, 2), (50, 4096, 1000), (2, 128, 1), (0, 128, 2)] {
            let scores = Tensor::randint(values, [n, k], (Kind::Float, Device::Cpu)).log();
            assert_eq!(largest(&scores), scores.max_dim(-1, true), "{n} × {k}");
            let not_all = scores.where_scalarother(&scores.ne(0.0), f64::NAN);
            assert_eq!(largest(&not_all).1, not_all.max_dim(-1, true).1, "{n} × {k}");
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

#[cfg(test)]
mod tests_of_distilled {
    use tch::Device;

    use super::*;

    const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// The likeliest `k` of a teacher with random logits, and all that it predicts.
    fn teacher(n: i64, v: i64, k: i64) -> (SoftRows, Tensor) {
        let log_prob_nv = (Tensor::randn([n, v], OPTIONS) * 3.0).log_softmax(-1, None);
        let (log_prob_nk, token_nk) = log_prob_nv.topk(k, -1, true, true);
        (SoftRows { token_nk, log_prob_nk }, log_prob_nv)
    }

    #[test]
    fn loss_and_gradient_are_those_of_plain_autograd() {
        for (share, temperature, k) in [(0.5, 1.0, 3), (1.0, 2.0, 1), (0.25, 0.7, 5), (0.0, 1.0, 2), (0.9, 1.5, 11)] {
            let (n, v) = (6, 11);
            let (soft, all_nv) = teacher(n, v, k);
            let leaf = (Tensor::randn([n, v], OPTIONS) * 4.0).set_requires_grad(true);
            let target = Tensor::randint(v, [n], (Kind::Int64, Device::Cpu));
            let found = distilled(&leaf.detach(), &target, &soft, share, temperature, Some(0.3));

            // In a vocabulary of the teacher's tokens and one that stands for all others, plain KL.
            let q_nv = (&leaf / temperature).softmax(-1, None);
            let (p_nk, q_nk) = (soft.log_prob_nk.exp(), q_nv.gather(1, &soft.token_nk, false));
            let kl_n = if k == v {
                (all_nv.exp() * (&all_nv - q_nv.log())).sum_dim_intlist(&[-1i64][..], false, Kind::Double)
            } else {
                // The teacher's rest is what its tokens leave, for no more is known of it. The model's is a sum: 1 less the others loses its digits
                // where they have nearly all, as no tolerance of the gradient allows.
                let total = |x: &Tensor| x.sum_dim_intlist(&[-1i64][..], true, Kind::Double);
                let p = Tensor::cat(&[&p_nk, &(-total(&p_nk) + 1.0)], 1);
                let q = Tensor::cat(&[q_nk, total(&q_nv.scatter_value(1, &soft.token_nk, 0.0))], 1);
                (&p * (p.log() - q.log())).sum_dim_intlist(&[-1i64][..], false, Kind::Double)
            };
            let ce_n = leaf.cross_entropy_loss::<Tensor>(&target, None, tch::Reduction::None, -100, 0.0);
            let loss_n = ce_n * (1.0 - share) + kl_n * (share * temperature * temperature);
            (loss_n.sum(Kind::Double) * 0.3).backward();
            assert!(found.loss_and_correct_2n.get(0).allclose(&loss_n, 1e-12, 1e-12, false), "{share} {temperature} {k}");
            assert!(found.gradient_nk.unwrap().allclose(&leaf.grad(), 1e-11, 1e-13, false), "{share} {temperature} {k}");
        }
    }

    #[test]
    fn low_temperatures_leave_numbers() {
        let (soft, _) = teacher(4, 300, 20);
        let scores_nv = Tensor::randn([4, 300], (Kind::Float, Device::Cpu));
        for temperature in [1e-2, 1e-3, 1e-4] {
            let (_, gradient_nv) = divergence(&(&scores_nv / temperature), &soft, Some(1.0));
            assert!(gradient_nv.unwrap().isfinite().all().int64_value(&[]) == 1, "{temperature}");
        }
    }

    #[test]
    fn a_model_that_predicts_as_its_teacher_does_has_no_divergence() {
        let (soft, all_nv) = teacher(4, 300, 20);
        let (divergence_n, gradient_nv) = divergence(&all_nv, &soft, Some(1.0));
        assert!(divergence_n.abs().max().double_value(&[]) < 1e-13);
        assert!(gradient_nv.unwrap().abs().max().double_value(&[]) < 1e-13);
        // In f32 a teacher that is certain leaves less than nothing for the others.
        let certain = SoftRows { token_nk: Tensor::from_slice2(&[[1i64]]), log_prob_nk: Tensor::from_slice2(&[[1e-7f32]]) };
        let (found, gradient) = divergence(&Tensor::from_slice2(&[[-200f32, 0.0, -300.0]]), &certain, Some(1.0));
        assert!(found.double_value(&[0]).abs() < 1e-6 && gradient.unwrap().isfinite().all().int64_value(&[]) == 1);
    }
}
