//! Norms of head vectors, and how much each resembles the others. For the choices of policies: no gradient goes through them.

use tch::Tensor;

use super::attention::accumulation_kind;

/// Below every norm that matters.
const TINY: f64 = 1e-12;

/// The Euclidean norm of each head vector, `(B, G, n, D)`, computed in f32 (f64 for f64): in bf16 many norms would be the same.
pub fn norms(x_bgnd: &Tensor) -> Tensor {
    wide(x_bgnd).norm_scalaropt_dim(2.0, [-1i64], false)
}

/// The cosine of each head vector with the mean of all directions, `x · m / (|x| |m|)` with `m = Σ x / |x|`, computed in f32 (f64 for f64): in
/// bf16 most cosines near 1 would be the same. A vector whose position is negative counts as zero, whatever its slot holds.
///
/// # Shapes
/// `x (B, G, n, D)` and `position (B, G, n)`, i64, in, `(B, G, n)` out.
pub fn cosines_with_mean(x_bgnd: &Tensor, position_bgn: &Tensor) -> Tensor {
    let (x_bgnd, is_empty_bgn1) = (wide(x_bgnd), position_bgn.lt(0).unsqueeze(-1));
    let norm_bgn1 = norms(&x_bgnd).clamp_min(TINY).unsqueeze(-1);
    // The sum of the directions, as a product: these are never written down. What a slot without an entry holds may be no number.
    let weight_bgn1 = norm_bgn1.reciprocal().masked_fill(&is_empty_bgn1, 0.0);
    let mean_bg1d = weight_bgn1.transpose(-1, -2).matmul(&x_bgnd.masked_fill(&is_empty_bgn1, 0.0));
    let length_bg11 = norms(&mean_bg1d).clamp_min(TINY).unsqueeze(-1);
    (x_bgnd.matmul(&(mean_bg1d / length_bg11).transpose(-1, -2)) / norm_bgn1).squeeze_dim(-1)
}

fn wide(x: &Tensor) -> Tensor {
    x.to_kind(accumulation_kind(x.kind()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn cosines_are_those_with_the_sum_of_directions() {
        tch::manual_seed(1);
        let x = Tensor::randn([2, 3, 9, 16], (Kind::Double, Device::Cpu));
        let position = Tensor::arange(9, (Kind::Int64, Device::Cpu)).expand([2, 3, 9], false) - 1;
        let length = |x: &Tensor| x.square().sum_dim_intlist([-1].as_slice(), true, None).sqrt();
        let directions = &x / length(&x);
        let mean = directions.narrow(2, 1, 8).sum_dim_intlist([2].as_slice(), true, None);
        let cosines = (&directions * &mean).sum_dim_intlist([-1].as_slice(), false, None) / length(&mean).squeeze_dim(-1);
        assert!(cosines_with_mean(&x, &position).allclose(&cosines, 0.0, 1e-14, false));
        assert!(norms(&x).allclose(&length(&x).squeeze_dim(-1), 1e-14, 0.0, false));
    }

    #[test]
    fn vectors_of_no_length_resemble_nothing() {
        let zero = Tensor::zeros([1, 1, 3, 8], (Kind::Float, Device::Cpu));
        let position = Tensor::from_slice(&[0i64, 1, -1]).view([1, 1, 3]);
        assert_eq!(Vec::<f32>::try_from(cosines_with_mean(&zero, &position).view(-1)).unwrap(), [0.0; 3]);
    }

    #[test]
    fn what_a_slot_without_an_entry_holds_does_not_count() {
        let x = Tensor::from_slice(&[1f32, 0.0, f32::NAN, 3.0]).view([1, 1, 2, 2]);
        let position = Tensor::from_slice(&[5i64, -1]).view([1, 1, 2]);
        assert_eq!(cosines_with_mean(&x, &position).double_value(&[0, 0, 0]).to_bits(), 1f64.to_bits());
        assert_eq!(cosines_with_mean(&x.narrow(2, 0, 0), &position.narrow(2, 0, 0)).size(), [1, 1, 0]);
    }

    #[test]
    fn bf16_is_computed_in_f32() {
        let x = Tensor::ones([1, 1, 1, 3], (Kind::BFloat16, Device::Cpu));
        let norm = norms(&x);
        assert_eq!((norm.kind(), Vec::<f32>::try_from(norm.view(-1)).unwrap()), (Kind::Float, vec![3f32.sqrt()]));
    }
}
