//! Norms of head vectors, and how much each resembles the others. For the choices of policies: no gradient goes through them.

use tch::{Device, Tensor};

use super::attention::accumulation_kind;
use crate::native::{cosines_on_cpu, norms_on_cpu};

/// Below every norm that matters.
const TINY: f64 = 1e-12;

/// The Euclidean norm of each head vector, computed in f32 (f64 for f64): in bf16 many norms would be the same.
///
/// # Shapes
/// `x (B, G, n, D)` in, `(B, G, n)` out.
pub fn norms(x_bgnd: &Tensor) -> Tensor {
    let x_bgnd = wide(x_bgnd);
    if x_bgnd.device() == Device::Cpu { norms_on_cpu(&x_bgnd) } else { norms_of_tensors(&x_bgnd) }
}

/// The cosine of each head vector with the mean of all directions, `x · m / (|x| |m|)` with `m = Σ x / |x|`, computed in f32 (f64 for f64): in
/// bf16 most cosines near 1 would be the same. A vector whose position is negative does not count in the mean.
///
/// # Shapes
/// `x (B, G, n, D)` and `position (B, G, n)`, i64, in, `(B, G, n)` out.
pub fn cosines_with_mean(x_bgnd: &Tensor, position_bgn: &Tensor) -> Tensor {
    let x_bgnd = wide(x_bgnd);
    if x_bgnd.device() == Device::Cpu {
        return cosines_on_cpu(&x_bgnd, position_bgn);
    }
    cosines_of_tensors(&x_bgnd, position_bgn)
}

fn wide(x: &Tensor) -> Tensor {
    x.to_kind(accumulation_kind(x.kind()))
}

fn norms_of_tensors(x_bgnd: &Tensor) -> Tensor {
    x_bgnd.norm_scalaropt_dim(2.0, [-1i64], false)
}

fn cosines_of_tensors(x_bgnd: &Tensor, position_bgn: &Tensor) -> Tensor {
    let norm_bgn1 = norms_of_tensors(x_bgnd).clamp_min(TINY).unsqueeze(-1);
    // The sum of the directions, as a product: the directions themselves are never written down.
    let weight_bgn1 = norm_bgn1.reciprocal().masked_fill(&position_bgn.lt(0).unsqueeze(-1), 0.0);
    let mean_bg1d = weight_bgn1.transpose(-1, -2).matmul(x_bgnd);
    let length_bg11 = norms_of_tensors(&mean_bg1d).clamp_min(TINY).unsqueeze(-1);
    (x_bgnd.matmul(&(mean_bg1d / length_bg11).transpose(-1, -2)) / norm_bgn1).squeeze_dim(-1)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    /// The largest difference: of few and many vectors, of widths of which 16 is a divisor or not, whose rows follow each other or not, and
    /// which are one and the same.
    fn differ(kernel: impl Fn(&Tensor) -> Tensor, tensors: impl Fn(&Tensor) -> Tensor, kind: Kind) -> f64 {
        tch::manual_seed(1);
        let vectors = [(1, 1), (7, 5), (4, 16), (9, 32), (10, 40), (700, 64)].map(|(n, width)| {
            let x = Tensor::randn([2, 3, n + 2, width], (kind, Device::Cpu));
            let _ = x.get(1).get(1).get(0).zero_();
            x.narrow(2, 1, n)
        });
        let by_token = |x: &Tensor| x.transpose(1, 2).contiguous().transpose(1, 2);
        let expanded = |x: &Tensor| x.narrow(1, 1, 1).expand(x.size(), false);
        let forms: [&dyn Fn(&Tensor) -> Tensor; 3] = [&Tensor::shallow_clone, &by_token, &expanded];
        let all = forms.into_iter().flat_map(|form| vectors.iter().map(form));
        all.map(|x| (kernel(&x) - tensors(&x)).abs().max().double_value(&[])).fold(0.0, f64::max)
    }

    #[test]
    fn the_kernels_agree_with_tensors() {
        let position = |x: &Tensor| {
            let size = x.size();
            Tensor::arange(size[2], (Kind::Int64, Device::Cpu)).expand(&size[..3], false) - 1
        };
        for (kind, most) in [(Kind::Float, 1e-6), (Kind::Double, 1e-15)] {
            let norms = differ(norms_on_cpu, norms_of_tensors, kind);
            let cosines = differ(|x| cosines_on_cpu(x, &position(x)), |x| cosines_of_tensors(x, &position(x)), kind);
            assert!(norms <= 8.0 * most && cosines <= 8.0 * most, "{kind:?}: {norms:.1e}, {cosines:.1e}");
        }
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
