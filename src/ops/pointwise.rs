//! What is made element by element: a soft cap, and the gated activations between an MLP's projections (Shazeer 2020, arXiv 2002.05202), of two
//! tensors of one shape. These are rounded as the published models were run. For the backward gate and up are kept; it is computed in f32 (f64
//! for f64) and rounded once.

use tch::{Scalar, Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::{differentiable, is_fused};
use crate::native;

/// `silu(gate) · up`; the former is rounded to the dtype before the product.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Tensor {
    let (kept_gate, kept_up) = (gate.detach(), up.detach());
    let gated = no_grad(|| forward(&kept_gate, &kept_up));
    differentiable([gate, up], gated, move |dy, needs| {
        let (dgate, dup) = backward(dy, &kept_gate, &kept_up);
        [needs[0].then_some(dgate), needs[1].then_some(dup)]
    })
}

fn forward(gate: &Tensor, up: &Tensor) -> Tensor {
    if is_fused(gate, up) {
        return native::swiglu(gate, up);
    }
    native::cuda::swiglu(gate, up).unwrap_or_else(|| forward_of_tensors(gate, up))
}

fn backward(dy: &Tensor, gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    if is_fused(gate, up) {
        return native::swiglu_backward(dy, gate, up);
    }
    native::cuda::swiglu_backward(dy, gate, up).unwrap_or_else(|| backward_of_tensors(dy, gate, up))
}

fn forward_of_tensors(gate: &Tensor, up: &Tensor) -> Tensor {
    gate.silu() * up
}

fn backward_of_tensors(dy: &Tensor, gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    let kind = gate.kind();
    let wide = |t: &Tensor| t.to_kind(accumulation_kind(kind));
    let wide_gate = wide(gate);
    let dgate = wide_gate.silu_backward(&(wide(dy) * up)).to_kind(kind);
    (dgate, wide_gate.silu().g_mul_(dy).to_kind(kind))
}

/// The approximation by `½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, by libtorch's name.
const TANH: &str = "tanh";

/// `gelu(gate) · up` (Hendrycks and Gimpel 2016, arXiv 1606.08415), approximated by a hyperbolic tangent; the former is rounded first.
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

const STEEPNESS: f64 = 1.702;
/// What the gate does not exceed, and what goes through it on neither side.
const LIMIT: f64 = 7.0;

/// `(up + 1) · gate · sigmoid(1.702 gate)` with the gate at most 7 and up in ±7, rounded after each operation (gpt-oss, arXiv 2508.10925).
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
            ((up + 1.0) * slope * dy).masked_fill(&kept_gate.gt(LIMIT), 0.0).to_kind(kind)
        });
        let dup = needs[1].then(|| (&gate * &sigmoid * dy).masked_fill(&kept_up.abs().gt(LIMIT), 0.0).to_kind(kind));
        [dgate, dup]
    })
}

fn clamped(gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    (gate.clamp_max(Scalar::from(LIMIT)), up.clamp(-LIMIT, LIMIT))
}

/// `cap · tanh(x / cap)`: what is small stays nearly as it is, and nothing exceeds the cap (Gemma 2, arXiv 2408.00118, section 2). For the
/// backward the result is kept, and nothing else.
pub fn soft_cap(x: &Tensor, cap: f64) -> Tensor {
    let capped = no_grad(|| (x.detach() / cap).tanh_().g_mul_scalar_(cap));
    let kept = capped.detach();
    differentiable([x], capped, move |dy, _| {
        // The derivative of c · tanh(x / c) is 1 − tanh²(x / c).
        let mut slope = (kept / cap).square_().g_mul_scalar_(-1.0).g_add_scalar_(1.0);
        [Some(slope.g_mul_(dy))]
    })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn gradients(y: &Tensor, dy: &Tensor, [gate, up]: [&Tensor; 2]) -> [Tensor; 2] {
        let mut gradients = native::gradients_of(&[y], &[dy], &[gate, up]).unwrap().into_iter();
        [(); 2].map(|()| gradients.next().unwrap().unwrap())
    }

    #[test]
    fn a_gate_of_zero_closes_and_a_large_one_passes_itself_on() {
        let gate = Tensor::from_slice(&[0.0f64, 40.0, -40.0]);
        let out = Vec::<f64>::try_from(swiglu(&gate, &Tensor::from_slice(&[5.0f64, 2.0, 2.0]))).unwrap();
        assert!(out[0].abs() < 1e-12 && (out[1] - 80.0).abs() < 1e-12 && out[2].abs() < 1e-12);
    }

    #[test]
    fn output_and_gradients_equal_plain_autograd() {
        tch::manual_seed(1);
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5)] {
            for size in [vec![1, 1, 1], vec![2, 3, 7], vec![1, 5, 688], vec![], vec![0, 7]] {
                let leaf = |factor: f64| (Tensor::randn(&size[..], (kind, Device::Cpu)) * factor).set_requires_grad(true);
                let (gate, up, dy) = (leaf(4.0), leaf(1.0), leaf(1.0).detach());
                let (ours, plain) = (swiglu(&gate, &up), gate.silu() * &up);
                assert!(ours.allclose(&plain, bound, bound, false));
                let taken = |y: &Tensor| gradients(y, &dy, [&gate, &up]);
                let (ours, plain) = (taken(&ours), taken(&plain));
                let of_tensors = backward_of_tensors(&dy, &gate.detach(), &up.detach());
                for ours in [ours, [of_tensors.0, of_tensors.1]] {
                    for (i, (ours, plain)) in ours.iter().zip(&plain).enumerate() {
                        assert!(ours.allclose(plain, bound, bound, false), "gradient {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn inputs_may_lie_anywhere_and_only_one_may_be_trained() {
        let wide = Tensor::randn([5, 14], (Kind::Double, Device::Cpu));
        let (gate, up) = (wide.narrow(1, 0, 7), wide.narrow(1, 7, 7).set_requires_grad(true));
        let transposed = Tensor::randn([7, 5], (Kind::Double, Device::Cpu)).tr();
        let (ours, plain) = (swiglu(&gate, &up), gate.silu() * &up);
        assert!(ours.allclose(&plain, 0.0, 1e-13, false));
        let taken = |y: &Tensor| native::gradients_of(&[y], &[&transposed], &[&up]).unwrap().remove(0).unwrap();
        assert!(taken(&ours).allclose(&taken(&plain), 0.0, 1e-13, false));
    }

    #[test]
    fn half_precision_is_close_to_the_wide_result_rounded() {
        let sample = |factor| Tensor::randn([9, 33], (Kind::BFloat16, Device::Cpu)) * factor;
        let (gate, up, dy) = (sample(3.0), sample(1.0), sample(1.0));
        let [wide_gate, wide_up, wide_dy] = [&gate, &up, &dy].map(|t| t.to_kind(Kind::Double));
        let near = |ours: &Tensor, wide: &Tensor, rounded: f64| {
            assert_eq!(ours.kind(), Kind::BFloat16);
            // One rounding is at most 2^-8 of a value.
            assert!(ours.to_kind(Kind::Double).allclose(wide, rounded * 1.01 / 256.0, 1e-6, false));
        };
        let exact = forward(&wide_gate, &wide_up);
        let (dgate, dup) = backward(&wide_dy, &wide_gate, &wide_up);
        for (y, grads) in [
            (forward(&gate, &up), backward(&dy, &gate, &up)),
            (forward_of_tensors(&gate, &up), backward_of_tensors(&dy, &gate, &up)),
        ] {
            near(&y, &exact, 2.0);
            near(&grads.0, &dgate, 1.0);
            near(&grads.1, &dup, 1.0);
        }
        assert_eq!(forward(&gate, &up), gate.silu() * &up);
    }

    #[test]
    fn extreme_gates_are_as_in_libtorch_and_what_is_no_number_stays_none() {
        let values =
            [100.0, -100.0, 1e4, -1e4, 87.0, -87.0, 708.0, -708.0, 1e-30, 0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            let gate = Tensor::from_slice(&values).to_kind(kind).set_requires_grad(true);
            let up = gate.ones_like().set_requires_grad(true);
            let (ours, plain) = (swiglu(&gate, &up), gate.silu() * &up);
            let close = |a: &Tensor, b: &Tensor| {
                let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
                a.allclose(&b, if kind == Kind::BFloat16 { 1e-2 } else { 1e-6 }, 1e-30, true)
            };
            assert!(close(&ours, &plain), "{kind:?}: {ours} {plain}");
            let seed = ours.ones_like();
            let [ours, plain] = [ours, plain].map(|y| gradients(&y, &seed, [&gate, &up]));
            for (ours, plain) in ours.iter().zip(&plain) {
                assert!(close(ours, plain), "{kind:?}: {ours} {plain}");
            }
            let unknown = gate.detach().full_like(f64::NAN);
            let (one, other) = backward(&unknown, &up.detach(), &up.detach());
            assert!(bool::try_from((one + other).isnan().all()).unwrap());
            assert!(bool::try_from(swiglu(&up, &unknown).isnan().all()).unwrap());
        }
    }

    #[test]
    fn the_sigmoid_is_right_to_some_roundings_at_every_size() {
        let gate = Tensor::linspace(-86.0, 86.0, 100_001, (Kind::Double, Device::Cpu)).to_kind(Kind::Float);
        let one = gate.ones_like();
        let exact = gate.to_kind(Kind::Double).silu();
        let error = (swiglu(&gate, &one).to_kind(Kind::Double) - &exact).abs() / exact.abs().clamp_min(1e-300);
        assert!(error.max().double_value(&[]) < 5e-7, "{error}");
    }

    #[test]
    fn nothing_is_kept_without_autograd_and_threads_do_not_matter() {
        let gate = Tensor::randn([300, 700], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        assert!(!no_grad(|| swiglu(&gate, &gate)).requires_grad() && !swiglu(&gate.detach(), &gate.detach()).requires_grad());
        let x = gate.detach();
        let threads = tch::get_num_threads();
        let results = [1, 2, 3].map(|count| {
            tch::set_num_threads(count);
            (swiglu(&x, &x), backward(&x, &x, &x))
        });
        tch::set_num_threads(threads);
        assert!(results[0] == results[1] && results[0] == results[2]);
    }
}

#[cfg(test)]
mod tests_of_geglu {
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

#[cfg(test)]
mod tests_of_clamped_swiglu {
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

#[cfg(test)]
mod tests_of_soft_cap {
    use tch::{Device, Kind};

    use super::*;
    use crate::native;

    #[test]
    fn values_and_gradients_equal_plain_autograd_and_nothing_exceeds_the_cap() {
        tch::manual_seed(1);
        let options = (Kind::Double, Device::Cpu);
        let (x, dy) = ((Tensor::randn([7, 50], options) * 9.0).set_requires_grad(true), Tensor::randn([7, 50], options));
        let (ours, plain) = (soft_cap(&x, 8.0), (&x / 8.0).tanh() * 8.0);
        assert!(ours.allclose(&plain, 0.0, 1e-14, false) && ours.abs().max().double_value(&[]) <= 8.0);
        let [ours, plain] = [ours, plain].map(|y| native::gradients_of(&[&y], &[&dy], &[&x]).unwrap().remove(0).unwrap());
        assert!(ours.allclose(&plain, 0.0, 1e-14, false));
        assert!(!soft_cap(&x.detach(), 8.0).requires_grad());
        assert_eq!(soft_cap(&x.to_kind(Kind::BFloat16), 8.0).kind(), Kind::BFloat16);
    }
}
