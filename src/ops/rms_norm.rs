//! Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).

use tch::{Kind, Tensor};

/// `weight · x / sqrt(mean(x²) + eps)` over the last dimension; the statistics in f32, or f64 for f64 inputs.
///
/// The normalised value is rounded to the input's dtype *before* the weight multiplies it, as the published models were run.
///
/// # Shapes
/// `x (…, E)`, `weight (E)` in, `(…, E)` out.
pub fn rms_norm(x: &Tensor, weight_e: &Tensor, eps: f64) -> Tensor {
    let kind = x.kind();
    let wide = x.to_kind(if kind == Kind::Double { Kind::Double } else { Kind::Float });
    let mean_square = wide.square().mean_dim([-1].as_slice(), true, None);
    let normed = wide * (mean_square + eps).rsqrt();
    normed.to_kind(kind) * weight_e
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn a_vector_of_root_mean_square_two_is_halved() {
        let x = Tensor::from_slice(&[2.0f64, -2.0, 2.0, -2.0]);
        let weight = Tensor::from_slice(&[1.0f64, 1.0, 3.0, 0.5]);
        let normed = Vec::<f64>::try_from(rms_norm(&x, &weight, 0.0)).unwrap();
        assert_eq!(normed, [1.0, -1.0, 3.0, -0.5]);
    }

    #[test]
    fn half_precision_inputs_keep_their_dtype_and_do_not_overflow() {
        let x = Tensor::full([2, 8], 3e4, (Kind::BFloat16, Device::Cpu));
        let normed = rms_norm(&x, &Tensor::ones([8], (Kind::BFloat16, Device::Cpu)), 1e-6);
        assert_eq!(normed.kind(), Kind::BFloat16);
        assert_eq!(normed, Tensor::ones([2, 8], (Kind::BFloat16, Device::Cpu)));
    }
}
