//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864): queries and keys turned by angles that grow with the position.
//!
//! Channel `i` is paired with channel `i + D/2` (the layout of the published checkpoints, not neighbouring channels).

use tch::{Device, Kind, Tensor};

/// The cosines and sines for the positions of one chunk.
#[derive(Debug)]
pub struct Rotation {
    /// `(B, 1, n, D/2)`, or `(1, 1, n, D/2)` where all rows share their positions.
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    /// The rotation at true positions, computed in f32 (f64 for `kind` f64) and then rounded to `kind`.
    ///
    /// # Shapes
    /// `position_bn` is `(B, n)`, or `(1, n)` or `(n)` where all rows share their positions; int64.
    pub fn at(position_bn: &Tensor, head_dim: usize, theta: f64, kind: Kind) -> Self {
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let frequency = inverse_frequencies(head_dim, theta, wide, position_bn.device());
        let angle = position_bn.to_kind(wide).unsqueeze(-1) * frequency;
        // (B, n, D/2) -> (B, 1, n, D/2); (n, D/2) -> (1, n, D/2), which broadcasts over the rows.
        let angle = angle.unsqueeze(-3);
        Self { cos: angle.cos().to_kind(kind), sin: angle.sin().to_kind(kind) }
    }

    /// Turns each head vector of `x`.
    ///
    /// # Shapes
    /// `(B, heads, n, D)` in and out.
    pub fn apply(&self, x_bhnd: &Tensor) -> Tensor {
        let halves = x_bhnd.chunk(2, -1);
        let (low, high) = (&halves[0], &halves[1]);
        let turned = [low * &self.cos - high * &self.sin, high * &self.cos + low * &self.sin];
        Tensor::cat(&turned, -1)
    }
}

/// `theta^(-2i/D)` for `i = 0 .. D/2`, by the very operations (and in the dtype) in which other programs compute them: at
/// position 100 000 one rounding of a frequency would already turn a vector by another 0.006.
fn inverse_frequencies(head_dim: usize, theta: f64, kind: Kind, device: Device) -> Tensor {
    let exponent = Tensor::arange_start_step(0, head_dim as i64, 2, (Kind::Int64, device)).to_kind(kind) / head_dim as f64;
    Tensor::pow_scalar(theta, &exponent).reciprocal()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: i64) -> Tensor {
        tch::manual_seed(1);
        Tensor::randn([1, 2, n, 8], (Kind::Double, Device::Cpu))
    }

    #[test]
    fn position_zero_turns_nothing_and_every_turn_keeps_lengths() {
        let x = sample(5);
        let turned = Rotation::at(&Tensor::arange(5, (Kind::Int64, Device::Cpu)), 8, 1e4, Kind::Double).apply(&x);
        assert_eq!(turned.narrow(2, 0, 1), x.narrow(2, 0, 1));
        let length = |t: &Tensor| t.square().sum_dim_intlist([-1].as_slice(), false, None);
        assert!(f64::try_from((length(&turned) - length(&x)).abs().max()).unwrap() < 1e-12);
    }

    #[test]
    fn products_depend_on_the_difference_of_positions_alone() {
        let (q, k) = (sample(1), sample(2).narrow(2, 1, 1));
        let product = |p: i64, s: i64| {
            let at = |position: i64| Rotation::at(&Tensor::from_slice(&[position]), 8, 1e4, Kind::Double);
            (at(p).apply(&q) * at(s).apply(&k)).sum_dim_intlist([-1].as_slice(), false, None)
        };
        assert!(f64::try_from((product(9, 4) - product(105, 100)).abs().max()).unwrap() < 1e-12);
    }

    #[test]
    fn rows_may_stand_at_positions_of_their_own() {
        let x = sample(3).expand([2, -1, -1, -1], false);
        let position = Tensor::from_slice(&[0i64, 1, 2, 7, 8, 9]).view([2, 3]);
        let both = Rotation::at(&position, 8, 1e4, Kind::Double).apply(&x);
        let second = Rotation::at(&position.get(1), 8, 1e4, Kind::Double).apply(&x.narrow(0, 1, 1));
        assert_eq!(both.narrow(0, 1, 1), second);
    }
}
