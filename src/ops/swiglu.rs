//! The gated activation between an MLP's projections (Shazeer 2020, arXiv 2002.05202).

use tch::{Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::differentiable;
use crate::native;

/// `silu(gate) · up`, element by element; the former is rounded to the dtype before the product, as the published models were run. For
/// the backward gate and up are kept; it is computed in f32 (f64 for f64) and rounded once.
///
/// # Shapes
/// Two tensors of one shape in, the same shape out.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Tensor {
    let (kept_gate, kept_up) = (gate.detach(), up.detach());
    let gated = no_grad(|| forward(&kept_gate, &kept_up));
    differentiable([gate, up], gated, move |dy, needs| {
        let (dgate, dup) = backward(dy, &kept_gate, &kept_up);
        [needs[0].then_some(dgate), needs[1].then_some(dup)]
    })
}

fn is_fused(gate: &Tensor, up: &Tensor) -> bool {
    native::computes(gate.device(), gate.kind()) && up.kind() == gate.kind()
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
    let dgate = {
        let dsilu = wide(dy) * up;
        wide_gate.silu_backward(&dsilu).to_kind(kind)
    };
    (dgate, wide_gate.silu().g_mul_(dy).to_kind(kind))
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
