//! A soft cap: what is small stays nearly as it is, and nothing exceeds the cap (Gemma 2, arXiv 2408.00118, section 2).

use tch::{Tensor, no_grad};

use super::differentiable::differentiable;

/// `cap · tanh(x / cap)`, element by element. For the backward the result is kept, and nothing else.
///
/// # Shapes
/// Any shape in, the same out.
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
