//! Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).

use tch::{Tensor, no_grad};

use super::attention::accumulation_kind;
use super::differentiable::{differentiable, is_fused};
use crate::native;

/// `weight · x / sqrt(mean(x²) + eps)` over the last dimension; the statistics in f32, or f64 for f64 inputs. For the backward x and
/// one number a row are kept.
///
/// The normalised value is rounded to the input's dtype *before* the weight multiplies it, as the published models were run. The
/// backward is computed in f32 (f64) and rounded once.
///
/// # Shapes
/// `x (…, E)`, `weight (E)` in, `(…, E)` out.
pub fn rms_norm(x: &Tensor, weight_e: &Tensor, eps: f64) -> Tensor {
    let (kept_x, kept_weight_e) = (x.detach(), weight_e.detach());
    let (normed, rstd) = no_grad(|| forward(&kept_x, &kept_weight_e, eps));
    differentiable([x, weight_e], normed, move |dy, needs| backward(dy, [&kept_x, &kept_weight_e, &rstd], needs))
}

/// `(1 + weight) · x / sqrt(mean(x²) + eps)`, as in [`rms_norm`], but everything in f32 (f64) and rounded once, the sum with 1 too: this is
/// how models with such weights, which are near 0, were run. For the backward x and one number a row are kept.
pub fn rms_norm_about_one(x: &Tensor, weight_e: &Tensor, eps: f64) -> Tensor {
    let (kept_x, kept_weight_e) = (x.detach(), weight_e.detach());
    let kinds = [x.kind(), weight_e.kind()];
    let wide = move |t: &Tensor| t.to_kind(accumulation_kind(kinds[0]));
    let (normed, rstd) = no_grad(|| forward(&wide(&kept_x), &(wide(&kept_weight_e) + 1.0), eps));
    differentiable([x, weight_e], normed.to_kind(kinds[0]), move |dy, needs| {
        let [dx, dweight_e] = backward(&wide(dy), [&wide(&kept_x), &(wide(&kept_weight_e) + 1.0), &rstd], needs);
        [dx.map(|dx| dx.to_kind(kinds[0])), dweight_e.map(|dweight_e| dweight_e.to_kind(kinds[1]))]
    })
}

/// The normalised x, and one over the root of each row `(…, 1)`.
fn forward(x: &Tensor, weight_e: &Tensor, eps: f64) -> (Tensor, Tensor) {
    if is_fused(x, weight_e) {
        return native::rms_norm(x, weight_e, eps);
    }
    native::cuda::rms_norm(x, weight_e, eps).unwrap_or_else(|| forward_of_tensors(x, weight_e, eps))
}

/// Gradients of x and of the weight, as far as they are needed.
fn backward(dy: &Tensor, saved: [&Tensor; 3], needs: [bool; 2]) -> [Option<Tensor>; 2] {
    if is_fused(saved[0], saved[1]) {
        return native::rms_norm_backward(dy, saved, needs);
    }
    let dx = needs[0].then(|| native::cuda::rms_norm_backward(dy, saved)).flatten();
    let [other_dx, dweight_e] = backward_of_tensors(dy, saved, [needs[0] && dx.is_none(), needs[1]]);
    [dx.or(other_dx), dweight_e]
}

fn forward_of_tensors(x: &Tensor, weight_e: &Tensor, eps: f64) -> (Tensor, Tensor) {
    let wide = x.to_kind(accumulation_kind(x.kind()));
    let rstd = (wide.square().mean_dim([-1].as_slice(), true, None) + eps).rsqrt();
    ((wide * &rstd).to_kind(x.kind()) * weight_e, rstd)
}

/// With x̂ = x · rstd and g = dy · weight: dx = (g − x̂ · mean(g · x̂)) · rstd, and dweight the sum of dy · x̂ over all rows.
fn backward_of_tensors(dy: &Tensor, [x, weight_e, rstd]: [&Tensor; 3], needs: [bool; 2]) -> [Option<Tensor>; 2] {
    if needs == [false; 2] {
        return [None, None];
    }
    let wide = |t: &Tensor| t.to_kind(accumulation_kind(x.kind()));
    let (dy, normed) = (wide(dy), wide(x) * rstd);
    let dweight_e = needs[1].then(|| {
        let rounded = wide(&normed.to_kind(x.kind()));
        (&dy * rounded).reshape([-1, weight_e.size()[0]]).sum_dim_intlist([0].as_slice(), false, None).to_kind(weight_e.kind())
    });
    let dx = needs[0].then(|| {
        let g = dy * wide(weight_e);
        let along = (&g * &normed).mean_dim([-1].as_slice(), true, None);
        ((g - normed * along) * rstd).to_kind(x.kind())
    });
    [dx, dweight_e]
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn naive(x: &Tensor, weight_e: &Tensor, eps: f64) -> Tensor {
        let wide = x.to_kind(accumulation_kind(x.kind()));
        let root = (wide.square().mean_dim([-1].as_slice(), true, None) + eps).rsqrt();
        (wide * root).to_kind(x.kind()) * weight_e
    }

    fn gradients(y: &Tensor, dy: &Tensor, inputs: [&Tensor; 2]) -> Vec<Tensor> {
        let wanted: Vec<&Tensor> = inputs.into_iter().filter(|t| t.requires_grad()).collect();
        native::gradients_of(&[y], &[dy], &wanted).unwrap().into_iter().flatten().collect()
    }

    #[test]
    fn output_and_gradients_equal_plain_autograd() {
        tch::manual_seed(1);
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5)] {
            for (size, needs) in [
                ([1, 1, 1], [true, true]),
                ([2, 3, 7], [true, false]),
                ([2, 3, 7], [false, true]),
                ([1, 200, 688], [true, true]),
                ([3, 65, 16], [true, true]),
            ] {
                let leaf = |size: &[i64], needs| Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(needs);
                let (x, weight, dy) = (leaf(&size, needs[0]), leaf(&size[2..], needs[1]), leaf(&size, false));
                let (ours, plain) = (rms_norm(&x, &weight, 1e-6), naive(&x, &weight, 1e-6));
                assert!(ours.allclose(&plain, 0.0, bound, false));
                let taken = |y: &Tensor| gradients(y, &dy, [&x, &weight]);
                let (kept_x, kept_weight) = (x.detach(), weight.detach());
                let (y, rstd) = forward_of_tensors(&kept_x, &kept_weight, 1e-6);
                assert!(y.allclose(&plain, 0.0, bound, false));
                let of_tensors = backward_of_tensors(&dy, [&kept_x, &kept_weight, &rstd], needs);
                let of_tensors: Vec<_> = of_tensors.into_iter().flatten().collect();
                let (ours, plain) = (taken(&ours), taken(&plain));
                for ours in [ours, of_tensors] {
                    for (i, (ours, plain)) in ours.iter().zip(&plain).enumerate() {
                        assert!(ours.allclose(plain, bound, 10.0 * bound, false), "gradient {i} of {size:?}");
                    }
                    assert_eq!(ours.len(), needs.iter().filter(|&&needed| needed).count());
                }
            }
        }
    }

    #[test]
    fn a_weight_about_one_is_added_to_it_before_anything_is_rounded() {
        tch::manual_seed(2);
        for (kind, bound) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5)] {
            let leaf = |size: &[i64]| Tensor::randn(size, (kind, Device::Cpu)).set_requires_grad(true);
            let (x, weight, dy) = (leaf(&[2, 9, 33]), leaf(&[33]), leaf(&[2, 9, 33]).detach());
            let (ours, plain) = (rms_norm_about_one(&x, &weight, 1e-6), naive(&x, &(&weight + 1.0), 1e-6));
            assert!(ours.allclose(&plain, 0.0, bound, false));
            let [ours, plain] = [ours, plain].map(|y| gradients(&y, &dy, [&x, &weight]));
            assert!(ours.iter().zip(&plain).all(|(ours, plain)| ours.allclose(plain, bound, 10.0 * bound, false)));
        }
        let sample =
            |size: &[i64], factor: f64| (Tensor::randn(size, (Kind::BFloat16, Device::Cpu)) * factor).set_requires_grad(true);
        let (x, weight) = (sample(&[70, 33], 1.0), sample(&[33], 0.05));
        let ours = rms_norm_about_one(&x, &weight, 1e-6);
        let exact = naive(&x.to_kind(Kind::Double), &(weight.to_kind(Kind::Double) + 1.0), 1e-6);
        assert_eq!(ours.kind(), Kind::BFloat16);
        assert!(ours.to_kind(Kind::Double).allclose(&exact, 1.01 / 256.0, 0.0, false), "one rounding");
        let made = gradients(&ours, &ours.ones_like(), [&x, &weight]);
        assert!(made.iter().all(|gradient| gradient.kind() == Kind::BFloat16));
    }

    #[test]
    fn inputs_may_lie_anywhere() {
        let options = (Kind::Double, Device::Cpu);
        let x = Tensor::randn([6, 5, 8], options).transpose(0, 2).narrow(2, 1, 4).set_requires_grad(true);
        let weight = Tensor::randn([4, 2], options).select(1, 0).set_requires_grad(true);
        let dy = Tensor::randn([8, 5, 1], options).expand([8, 5, 4], false);
        let (ours, plain) = (rms_norm(&x, &weight, 1e-6), naive(&x, &weight, 1e-6));
        assert!(ours.allclose(&plain, 0.0, 1e-13, false));
        let taken = |y: &Tensor| gradients(y, &dy, [&x, &weight]);
        for (ours, plain) in taken(&ours).iter().zip(&taken(&plain)) {
            assert!(ours.allclose(plain, 0.0, 1e-12, false));
        }
    }

    #[test]
    fn the_backward_in_half_precision_is_the_wide_one_rounded() {
        let sample = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, Device::Cpu));
        let (x, weight, dy) = (sample(&[70, 33]), sample(&[33]), sample(&[70, 33]));
        let (y, rstd) = forward(&x, &weight, 1e-6);
        // A last bit of a sum may tip a rounding over.
        assert!(y.allclose(&naive(&x, &weight, 1e-6), 1.0 / 128.0, 0.0, false));
        let wide = [&dy, &x, &weight].map(|t| t.to_kind(Kind::Double));
        let exact = backward_of_tensors(&wide[0], [&wide[1], &wide[2], &rstd.to_kind(Kind::Double)], [true, true]);
        let saved = [&x, &weight, &rstd];
        for ours in [backward(&dy, saved, [true, true]), backward_of_tensors(&dy, saved, [true, true])] {
            // The weight's is a sum of products with values that were rounded before.
            for ((ours, exact), bound) in ours.iter().flatten().zip(exact.iter().flatten()).zip([1e-5, 5e-2]) {
                assert_eq!(ours.kind(), Kind::BFloat16);
                assert!(ours.to_kind(Kind::Double).allclose(exact, 1.01 / 256.0, bound, false));
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_rows_of_zeros_stay_zero() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            let x = Tensor::zeros([3, 7], (kind, Device::Cpu));
            let _ = x.get(1).get(2).fill_(f64::NAN);
            let _ = x.get(2).get(2).fill_(f64::INFINITY);
            let weight = Tensor::ones([7], (kind, Device::Cpu));
            let (ours, plain) = (rms_norm(&x, &weight, 1e-6), naive(&x, &weight, 1e-6));
            assert!(ours.allclose(&plain, 0.0, 0.0, true), "{ours}");
            let (y, rstd) = forward(&x.zeros_like(), &weight, 1e-6);
            assert_eq!(y, x.zeros_like());
            let [dx, _] = backward(&x, [&x.zeros_like(), &weight, &rstd], [true, false]);
            assert!(bool::try_from(dx.unwrap().get(1).isnan().any()).unwrap());
        }
    }

    #[test]
    fn nothing_is_kept_without_autograd_and_threads_do_not_matter() {
        let x = Tensor::randn([1000, 300], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let weight = Tensor::randn([300], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        assert!(!no_grad(|| rms_norm(&x, &weight, 1e-6)).requires_grad());
        let (x, weight) = (x.detach(), weight.detach());
        assert!(!rms_norm(&x, &weight, 1e-6).requires_grad());
        let threads = tch::get_num_threads();
        let results = [1, 2, 3].map(|count| {
            tch::set_num_threads(count);
            let (y, rstd) = forward(&x, &weight, 1e-6);
            let gradients = backward(&x, [&x, &weight, &rstd], [true, true]);
            (y, rstd, gradients)
        });
        tch::set_num_threads(threads);
        assert!(results[0] == results[1] && results[0] == results[2]);
    }

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
