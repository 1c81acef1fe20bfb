//! The gated activation of gpt-oss (arXiv 2508.10925): a steeper `SiLU` on a gate that is clamped, and the rest clamped too.

use tch::{Scalar, Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::differentiable;

const STEEPNESS: f64 = 1.702;
/// What the gate does not exceed, and what goes through it on neither side.
const LIMIT: f64 = 7.0;

/// `(up + 1) · gate · sigmoid(1.702 gate)`, element by element, with the gate at most 7 and up in ±7, rounded after each operation as the
/// published models were run. For the backward gate and up are kept; it is computed in f32 (f64 for f64) and rounded once.
///
/// # Shapes
/// Two tensors of one shape in, the same shape out.
pub fn clamped_swiglu(gate: &Tensor, up: &Tensor) -> Tensor {
    let (kept_gate, kept_up) = (gate.detach(), up.detach());
    let gated = no_grad(|| {
        let (gate, up) = clamped(&kept_gate, &kept_up);
        (up + 1.0) * (&gate * (&gate * STEEPNESS).sigmoid_())
    });
    differentiable([gate, up], gated, move |dy, needs| {
        let kind = kept_gate.kind();
        let wide = |t: &Tensor| t.to_kind(accumulation_kind(kind));
        let (gate, up) = clamped(&wide(&kept_gate), &wide(&kept_up));
        let sigmoid = (&gate * STEEPNESS).sigmoid_();
        let dgate = needs[0].then(|| {
            let slope: Tensor = &sigmoid * (1.0 + (&gate * STEEPNESS) * (1.0 - &sigmoid));
            let dgate = (up + 1.0) * slope * dy;
            dgate.masked_fill(&kept_gate.gt(LIMIT), 0.0).to_kind(kind)
        });
        let dup = needs[1].then(|| (&gate * &sigmoid * dy).masked_fill(&kept_up.abs().gt(LIMIT), 0.0).to_kind(kind));
        [dgate, dup]
    })
}

fn clamped(gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    (gate.clamp_max(Scalar::from(LIMIT)), up.clamp(-LIMIT, LIMIT))
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
            let leaf = || (Tensor::randn([2, 5, 33], (kind, Device::Cpu)) * 8.0).set_requires_grad(true);
            let (gate, up, dy) = (leaf(), leaf(), leaf().detach());
            let (low, between) = (gate.clamp_max(7.0), up.clamp(-7.0, 7.0));
            let plain = (between + 1.0) * &low * (&low * 1.702).sigmoid();
            let ours = clamped_swiglu(&gate, &up);
            assert!(gate.max().double_value(&[]) > 7.0 && up.min().double_value(&[]) < -7.0, "all clamps are met");
            assert!(ours.allclose(&plain, bound, bound, false));
            let taken = |y: &Tensor| native::gradients_of(&[y], &[&dy], &[&gate, &up]).unwrap();
            for (ours, plain) in taken(&ours).iter().zip(&taken(&plain)) {
                assert!(ours.as_ref().unwrap().allclose(plain.as_ref().unwrap(), bound, 10.0 * bound, false));
            }
        }
    }
}
