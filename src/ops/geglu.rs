//! A gated activation with `GELU` (Hendrycks and Gimpel 2016, arXiv 1606.08415; Shazeer 2020, arXiv 2002.05202).

use tch::{Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::differentiable;

/// The approximation by `½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, by libtorch's name.
const TANH: &str = "tanh";

/// `gelu(gate) · up`, element by element, with the approximation by a hyperbolic tangent; the former is rounded to the dtype before the
/// product, as the published models were run. For the backward gate and up are kept; it is computed in f32 (f64 for f64) and rounded once.
///
/// # Shapes
/// Two tensors of one shape in, the same shape out.
pub fn geglu(gate: &Tensor, up: &Tensor) -> Tensor {
    let (kept_gate, kept_up) = (gate.detach(), up.detach());
    let gated = no_grad(|| kept_gate.gelu(TANH) * &kept_up);
    differentiable([gate, up], gated, move |dy, needs| {
        let kind = kept_gate.kind();
        let wide = |t: &Tensor| t.to_kind(accumulation_kind(kind));
        let (gate, dy) = (wide(&kept_gate), wide(dy));
        let dgate = needs[0].then(|| gate.gelu_backward(&(&dy * &kept_up), TANH).to_kind(kind));
        let dup = needs[1].then(|| (gate.gelu(TANH) * &dy).to_kind(kind));
        [dgate, dup]
    })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::native;

    #[test]
    fn output_and_gradients_equal_the_formula_under_autograd() {
        tch::manual_seed(1);
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5)] {
            let leaf = |factor: f64| (Tensor::randn([2, 5, 33], (kind, Device::Cpu)) * factor).set_requires_grad(true);
            let (gate, up, dy) = (leaf(3.0), leaf(1.0), leaf(1.0).detach());
            let inner = (&gate + gate.pow_tensor_scalar(3) * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
            let plain = &gate * 0.5 * (inner.tanh() + 1.0) * &up;
            let ours = geglu(&gate, &up);
            assert!(ours.allclose(&plain, bound, bound, false));
            let taken = |y: &Tensor| native::gradients_of(&[y], &[&dy], &[&gate, &up]).unwrap();
            for (ours, plain) in taken(&ours).iter().zip(&taken(&plain)) {
                assert!(ours.as_ref().unwrap().allclose(plain.as_ref().unwrap(), bound, 10.0 * bound, false));
            }
        }
    }

    #[test]
    fn half_precision_is_close_to_the_wide_result_rounded() {
        let sample = || Tensor::randn([9, 33], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
        let (gate, up) = (sample(), sample());
        let [wide_gate, wide_up] = [&gate, &up].map(|t| t.detach().to_kind(Kind::Double).set_requires_grad(true));
        let (narrow, wide) = (geglu(&gate, &up), geglu(&wide_gate, &wide_up));
        let near = |ours: &Tensor, wide: &Tensor| {
            assert_eq!(ours.kind(), Kind::BFloat16);
            assert!(ours.to_kind(Kind::Double).allclose(wide, 2.02 / 256.0, 1e-5, false));
        };
        near(&narrow, &wide);
        let of_narrow = native::gradients_of(&[&narrow], &[&narrow.ones_like()], &[&gate, &up]).unwrap();
        let of_wide = native::gradients_of(&[&wide], &[&wide.ones_like()], &[&wide_gate, &wide_up]).unwrap();
        of_narrow.iter().zip(&of_wide).for_each(|(ours, wide)| near(ours.as_ref().unwrap(), wide.as_ref().unwrap()));
    }
}
