//! Tokens on their way to the experts that a router has chosen for them, and back (Shazeer et al. 2017, arXiv 1701.06538): sorted by
//! expert, so that each expert's products run over all of its tokens at once.

use tch::{Kind, Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::differentiable;
use crate::native::cuda::on_device;

/// Rows that an expert gets are a multiple of this: oneDNN compiles a kernel for each number of rows, and keeps so many.
pub(crate) const ROWS_MULTIPLE: i64 = 8;

/// The choices of some tokens, sorted by expert; within an expert in the order of the tokens, with pads behind them.
#[derive(Debug)]
pub struct Grouping {
    /// `(P)`: the choice at each place, as `token · k + rank`; any at a pad.
    choice: Tensor,
    /// `(N·k)`: the place of each choice.
    place: Tensor,
    top_k: i64,
    /// How many rows each expert gets.
    pub rows: Vec<i64>,
}

impl Grouping {
    /// Sorts the choices `(N, k)` of N tokens, int64, each below `num_experts`.
    pub fn new(chosen_nk: &Tensor, num_experts: usize) -> Self {
        let (flat, top_k) = (chosen_nk.reshape([-1]), chosen_nk.size()[1]);
        let counts: Vec<i64> = Vec::try_from(flat.bincount::<Tensor>(None, num_experts as i64)).unwrap_or_default();
        let rows: Vec<i64> = counts.iter().map(|count| (count + ROWS_MULTIPLE - 1) / ROWS_MULTIPLE * ROWS_MULTIPLE).collect();
        let (mut places, mut start) = (Vec::with_capacity(flat.numel()), 0);
        for (count, rows) in counts.iter().zip(&rows) {
            places.extend(start..start + count);
            start += rows;
        }
        let (sorted, places) = (flat.argsort_stable(true, 0, false), on_device(&places, flat.device()));
        let none = |len: i64| Tensor::zeros([len], (Kind::Int64, flat.device()));
        let place = none(flat.numel() as i64).index_copy(0, &sorted, &places);
        Self { choice: none(start).index_copy(0, &places, &sorted), place, top_k, rows }
    }

    /// A copy of each token `(N, E)` for each of its experts, sorted by expert `(P, E)`.
    pub fn spread(&self, x_ne: &Tensor) -> Tensor {
        let token = self.choice.floor_divide_scalar(self.top_k);
        let spread = no_grad(|| x_ne.detach().index_select(0, &token));
        let (place, top_k) = (self.place.shallow_clone(), self.top_k);
        // Each token adds up its own copies: no order of additions is left to chance.
        differentiable([x_ne], spread, move |dy, _| {
            let by_token = dy.index_select(0, &place).view([-1, top_k, dy.size()[1]]);
            [Some(by_token.sum_dim_intlist(&[1i64][..], false, dy.kind()))]
        })
    }

    /// What the experts made of the copies of a token `(P, E)`, weighted by `(N, k)` and added up `(N, E)`.
    pub fn gather(&self, y: &Tensor, weight_nk: &Tensor) -> Tensor {
        let (y_kept, weight_kept) = (y.detach(), weight_nk.detach().to_kind(y.kind()).unsqueeze(-1));
        let top_k = self.top_k;
        let by_token = move |y: &Tensor, place: &Tensor| y.index_select(0, place).view([-1, top_k, y.size()[1]]);
        let out = no_grad(|| (by_token(&y_kept, &self.place) * &weight_kept).sum_dim_intlist(&[1i64][..], false, y.kind()));
        let (place, weight_kind) = (self.place.shallow_clone(), weight_nk.kind());
        differentiable([y, weight_nk], out, move |dout, needs| {
            let dout = dout.unsqueeze(1);
            // Pads have no gradient.
            let dy = || y_kept.zeros_like().index_copy_(0, &place, &(&dout * &weight_kept).view([-1, dout.size()[2]]));
            let dweight = || {
                let wide = accumulation_kind(weight_kind);
                (by_token(&y_kept, &place).to_kind(wide) * &dout).sum_dim_intlist(&[-1i64][..], false, wide).to_kind(weight_kind)
            };
            [needs[0].then(dy), needs[1].then(dweight)]
        })
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::native;

    const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

    #[test]
    fn tokens_are_sorted_by_expert_in_their_own_order() {
        let chosen = Tensor::from_slice(&[2i64, 0, 0, 3, 2, 3]).view([3, 2]);
        let grouping = Grouping::new(&chosen, 5);
        assert_eq!(grouping.rows, [8, 0, 8, 8, 0]);
        let spread = grouping.spread(&Tensor::from_slice(&[10.0, 11.0, 12.0]).view([3, 1]));
        let first_two = spread.view([3, 8]).narrow(1, 0, 2).contiguous().view(-1);
        assert_eq!(Vec::<f64>::try_from(first_two).unwrap(), [10.0, 11.0, 10.0, 12.0, 11.0, 12.0]);
    }

    #[test]
    fn there_and_back_equals_a_loop_over_tokens_and_its_gradient() {
        tch::manual_seed(1);
        let (tokens, experts, width) = (7, 4, 3);
        let chosen = Tensor::rand([tokens, experts], F64).argsort(-1, false).narrow(1, 0, 2);
        let leaf = |size: &[i64]| Tensor::randn(size, F64).set_requires_grad(true);
        let (x, weight, matrices) = (leaf(&[tokens, width]), leaf(&[tokens, 2]), leaf(&[experts, width, width]));
        let grouping = Grouping::new(&chosen, experts as usize);
        let spread = grouping.spread(&x);
        let mut start = 0;
        let parts = grouping.rows.iter().enumerate().map(|(expert, &count)| {
            start += count;
            spread.narrow(0, start - count, count).matmul(&matrices.get(expert as i64))
        });
        let ours = grouping.gather(&Tensor::cat(&parts.collect::<Vec<_>>(), 0), &weight);
        let of_token = |token: i64| {
            let of_choice = |rank: i64| {
                let matrix = matrices.get(chosen.int64_value(&[token, rank]));
                x.get(token).unsqueeze(0).matmul(&matrix) * weight.get(token).get(rank)
            };
            of_choice(0) + of_choice(1)
        };
        let plain = Tensor::cat(&(0..tokens).map(of_token).collect::<Vec<_>>(), 0);
        assert!(ours.allclose(&plain, 0.0, 1e-13, false));
        let dy = Tensor::randn([tokens, width], F64);
        let gradients = |y: &Tensor| native::gradients_of(&[y], &[&dy], &[&x, &weight, &matrices]).unwrap();
        for (ours, plain) in gradients(&ours).into_iter().zip(gradients(&plain)) {
            assert!(ours.unwrap().allclose(&plain.unwrap(), 0.0, 1e-13, false));
        }
    }

    #[test]
    fn no_tokens_are_none() {
        let grouping = Grouping::new(&Tensor::zeros([0, 2], (Kind::Int64, Device::Cpu)), 3);
        let out = grouping.gather(&grouping.spread(&Tensor::zeros([0, 4], F64)), &Tensor::zeros([0, 2], F64));
        assert_eq!((grouping.rows, out.size()), (vec![0, 0, 0], vec![0, 4]));
    }
}
