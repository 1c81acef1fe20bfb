//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864): queries and keys turned by angles that grow with the position.
//!
//! Channel `i` is paired with channel `i + F` of the 2F first ones, which are turned (the layout of the published checkpoints, not
//! neighbouring channels).

use tch::{Kind, Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::{differentiable, is_fused};
use super::frequencies::Frequencies;
use crate::native::{self, RotationDirection};

/// The cosines and sines for the positions of one chunk.
#[derive(Debug)]
pub struct Rotation {
    /// `(B, 1, n, F)`, or `(1, 1, n, F)` where all sequences share their positions and frequencies.
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// The rotation at true positions, computed in the dtype of the frequencies and then rounded to `kind`.
    ///
    /// # Shapes
    /// `position_bn` is `(B, n)`, or `(1, n)` or `(n)` where all sequences share their positions; int64.
    pub fn at(position_bn: &Tensor, frequencies: &Frequencies, kind: Kind) -> Self {
        let Frequencies { inverse_bf, attention_factor_b } = frequencies;
        let angle = position_bn.atleast_2d().to_kind(inverse_bf.kind()).unsqueeze(-1) * inverse_bf.unsqueeze(1);
        // (B, n, F) -> (B, 1, n, F).
        let angle = angle.unsqueeze(-3);
        let scaled =
            |x: Tensor| attention_factor_b.as_ref().map_or_else(|| x.shallow_clone(), |of_b| &x * of_b.view([-1, 1, 1, 1]));
        Self { cos: scaled(angle.cos()).to_kind(kind), sin: scaled(angle.sin()).to_kind(kind) }
    }

    /// An uninitialised rotation of the same size.
    pub fn empty_like(&self) -> Self {
        Self { cos: self.cos.empty_like(), sin: self.sin.empty_like() }
    }

    /// Takes over the angles of another one, in the memory that it has.
    pub fn copy_(&mut self, from: &Self) {
        self.cos.copy_(&from.cos);
        self.sin.copy_(&from.sin);
    }

    /// Turns the first 2F channels of each head vector `(B, heads, n, D)`. For the backward, which turns them back, nothing of it is kept.
    pub fn apply(&self, x_bhnd: &Tensor) -> Tensor {
        let turned = no_grad(|| self.turn(&x_bhnd.detach(), RotationDirection::Forth));
        let kept = Self { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() };
        differentiable([x_bhnd], turned, move |dy_bhnd, _| [Some(kept.turn(dy_bhnd, RotationDirection::Back))])
    }

    fn turn(&self, x_bhnd: &Tensor, turn: RotationDirection) -> Tensor {
        let (rotary, width) = (2 * self.cos.size()[3], x_bhnd.size()[3]);
        if rotary == width {
            return self.turn_all(x_bhnd, turn);
        }
        let parts = [self.turn_all(&x_bhnd.narrow(3, 0, rotary), turn), x_bhnd.narrow(3, rotary, width - rotary)];
        match turn {
            RotationDirection::Forth => Tensor::cat(&parts, 3),
            RotationDirection::Back => Tensor::cat(&parts.map(|x_bhnr| x_bhnr.transpose(1, 2)), 3).transpose(1, 2),
        }
    }

    fn turn_all(&self, x_bhnr: &Tensor, turn: RotationDirection) -> Tensor {
        if is_fused(x_bhnr, &self.cos) {
            return native::rotate(x_bhnr, &self.cos, &self.sin, turn);
        }
        native::cuda::rotate(x_bhnr, [&self.cos, &self.sin], turn).unwrap_or_else(|| self.turn_tensors(x_bhnr, turn))
    }

    fn turn_tensors(&self, x_bhnd: &Tensor, turn: RotationDirection) -> Tensor {
        let wide = |t: &Tensor| t.to_kind(accumulation_kind(x_bhnd.kind()));
        let (cos, sin) = (wide(&self.cos), wide(&self.sin));
        match turn {
            RotationDirection::Forth => turned(&wide(x_bhnd), &cos, &sin).to_kind(x_bhnd.kind()),
            RotationDirection::Back => {
                let [x_bnhd, cos, sin] = [wide(x_bhnd), cos, -sin].map(|t| t.transpose(1, 2));
                turned(&x_bnhd, &cos, &sin).to_kind(x_bhnd.kind()).transpose(1, 2)
            }
        }
    }
}

fn turned(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let halves = x.chunk(2, -1);
    let (low, high) = (&halves[0], &halves[1]);
    let turned = [(low * cos).addcmul_(high, &-sin), (high * cos).addcmul_(low, sin)];
    Tensor::cat(&turned, -1)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::ops::frequencies::RopeSpec;

    /// With base 10 000, of all channels.
    fn rotation(position: &Tensor, head_dim: usize, kind: Kind) -> Rotation {
        Rotation::at(position, &RopeSpec::plain(1e4, head_dim).frequencies(&[], kind, Device::Cpu), kind)
    }

    fn sample(n: i64) -> Tensor {
        tch::manual_seed(1);
        Tensor::randn([1, 2, n, 8], (Kind::Double, Device::Cpu))
    }

    #[test]
    fn position_zero_turns_nothing_and_every_turn_keeps_lengths() {
        let x = sample(5);
        let turned = rotation(&Tensor::arange(5, (Kind::Int64, Device::Cpu)), 8, Kind::Double).apply(&x);
        assert_eq!(turned.narrow(2, 0, 1), x.narrow(2, 0, 1));
        let length = |t: &Tensor| t.square().sum_dim_intlist([-1].as_slice(), false, None);
        assert!(f64::try_from((length(&turned) - length(&x)).abs().max()).unwrap() < 1e-12);
    }

    #[test]
    fn products_depend_on_the_difference_of_positions_alone() {
        let (q, k) = (sample(1), sample(2).narrow(2, 1, 1));
        let product = |p: i64, s: i64| {
            let at = |position: i64| rotation(&Tensor::from_slice(&[position]), 8, Kind::Double);
            (at(p).apply(&q) * at(s).apply(&k)).sum_dim_intlist([-1].as_slice(), false, None)
        };
        assert!(f64::try_from((product(9, 4) - product(105, 100)).abs().max()).unwrap() < 1e-12);
    }

    #[test]
    fn rows_may_stand_at_positions_of_their_own() {
        let x = sample(3).expand([2, -1, -1, -1], false);
        let position = Tensor::from_slice(&[0i64, 1, 2, 7, 8, 9]).view([2, 3]);
        let both = rotation(&position, 8, Kind::Double).apply(&x);
        let second = rotation(&position.get(1), 8, Kind::Double).apply(&x.narrow(0, 1, 1));
        assert_eq!(both.narrow(0, 1, 1), second);
    }

    #[test]
    fn channels_behind_the_first_stay_and_a_factor_lengthens_those() {
        let (x, position) = (sample(5), Tensor::arange(5, (Kind::Int64, Device::Cpu)));
        let frequencies = RopeSpec::plain(1e4, 4).frequencies(&[], Kind::Double, Device::Cpu);
        let part = Rotation::at(
            &position,
            &Frequencies { attention_factor_b: Some(Tensor::from(1.5).view(1)), ..frequencies },
            Kind::Double,
        );
        let leaf = x.copy().set_requires_grad(true);
        let turned = part.apply(&leaf);
        let first = rotation(&position, 4, Kind::Double).apply(&x.narrow(3, 0, 4)) * 1.5;
        assert!(turned.narrow(3, 0, 4).allclose(&first, 0.0, 1e-14, false));
        assert!(turned.narrow(3, 4, 4).equal(&x.narrow(3, 4, 4)) && turned.is_contiguous());
        let ours = gradient(&turned, &sample(5), &leaf);
        let by_hand = Tensor::cat(&[naive(&part, &leaf.narrow(3, 0, 4)), leaf.narrow(3, 4, 4)], 3);
        assert!(ours.allclose(&gradient(&by_hand, &sample(5), &leaf), 0.0, 1e-14, false));
        assert!(ours.transpose(1, 2).is_contiguous());
    }

    fn naive(rotation: &Rotation, x_bhnd: &Tensor) -> Tensor {
        let halves = x_bhnd.chunk(2, -1);
        let (low, high) = (&halves[0], &halves[1]);
        let turned = [low * &rotation.cos - high * &rotation.sin, high * &rotation.cos + low * &rotation.sin];
        Tensor::cat(&turned, -1)
    }

    fn gradient(y: &Tensor, dy: &Tensor, x: &Tensor) -> Tensor {
        native::gradients_of(&[y], &[dy], &[x]).unwrap().remove(0).unwrap()
    }

    #[test]
    fn output_and_gradient_equal_plain_autograd_in_any_layout() {
        tch::manual_seed(2);
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 1e-6)] {
            for (position_rows, d) in [(1, 8), (2, 8), (2, 2), (1, 14), (2, 64)] {
                let options = (kind, Device::Cpu);
                let position = Tensor::arange(position_rows * 5, (Kind::Int64, Device::Cpu)).view([position_rows, 5]) * 3;
                let rotation = rotation(&position, d as usize, kind);
                // As projections lie, as attention reads, and with channels apart.
                let layouts = [
                    Tensor::randn([2, 5, 3, d], options).transpose(1, 2),
                    Tensor::randn([2, 3, 5, d], options),
                    Tensor::randn([2, 3, d, 5], options).transpose(2, 3),
                ];
                for (x, dy) in layouts.iter().zip(layouts.iter().rev()) {
                    let x = x.set_requires_grad(true);
                    let (ours, plain) = (rotation.apply(&x), naive(&rotation, &x));
                    assert!(ours.allclose(&plain, 0.0, bound, false) && ours.is_contiguous());
                    let (ours, plain) = (gradient(&ours, dy, &x), gradient(&plain, dy, &x));
                    assert!(ours.allclose(&plain, 0.0, bound, false) && ours.transpose(1, 2).is_contiguous());
                    for turn in [RotationDirection::Forth, RotationDirection::Back] {
                        let (fused, tensors) = (rotation.turn(dy, turn), rotation.turn_tensors(dy, turn));
                        assert!(fused.allclose(&tensors, 0.0, bound, false));
                    }
                }
            }
        }
    }

    #[test]
    fn half_precision_is_the_wide_result_rounded_once() {
        let position = Tensor::arange_start(90, 97, (Kind::Int64, Device::Cpu));
        let rotation = rotation(&position, 16, Kind::BFloat16);
        let wide = Rotation { cos: rotation.cos.to_kind(Kind::Double), sin: rotation.sin.to_kind(Kind::Double) };
        let x = Tensor::randn([2, 3, 7, 16], (Kind::BFloat16, Device::Cpu));
        for turn in [RotationDirection::Forth, RotationDirection::Back] {
            let exact = wide.turn(&x.to_kind(Kind::Double), turn);
            for ours in [rotation.turn(&x, turn), rotation.turn_tensors(&x, turn)] {
                assert_eq!(ours.kind(), Kind::BFloat16);
                assert!(ours.to_kind(Kind::Double).allclose(&exact, 4e-3, 1e-5, false));
            }
        }
    }

    #[test]
    fn nothing_is_kept_without_autograd_and_what_is_no_number_stays_none() {
        let rotation = rotation(&Tensor::arange(5, (Kind::Int64, Device::Cpu)), 8, Kind::Double);
        let x = sample(5);
        assert!(!rotation.apply(&x).requires_grad());
        let leaf = x.copy().set_requires_grad(true);
        assert!(!no_grad(|| rotation.apply(&leaf)).requires_grad() && rotation.apply(&leaf).requires_grad());
        let _ = x.get(0).get(1).get(3).fill_(f64::NAN);
        assert_eq!(rotation.apply(&x).isnan(), x.isnan());
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let rotation = rotation(&Tensor::arange(700, (Kind::Int64, Device::Cpu)), 64, Kind::Float);
        let x = Tensor::randn([2, 3, 700, 64], (Kind::Float, Device::Cpu));
        let threads = tch::get_num_threads();
        let results = [1, 2, 3].map(|count| {
            tch::set_num_threads(count);
            rotation.turn(&x, RotationDirection::Back)
        });
        tch::set_num_threads(threads);
        assert!(results[0] == results[1] && results[0] == results[2]);
    }
}
