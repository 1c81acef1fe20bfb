//! Clipping by the global norm.

use tch::{Device, Kind, Tensor, no_grad};

use crate::native::or_panic;

/// Numbers of a gradient that are squared at a time: in f64 they and their squares take 256 MiB.
pub(super) const SQUARED_AT_ONCE: i64 = 1 << 24;

/// Scales all gradients so that their common norm is at most `max_norm`; returns the norm before. Summed in f64.
pub fn clip_grad_norm(gradients: &mut [(String, Tensor)], max_norm: f64) -> f64 {
    no_grad(|| {
        let slices = gradients.iter().flat_map(|(_, gradient)| gradient.reshape([-1]).split(SQUARED_AT_ONCE, 0));
        let squares = slices.map(|slice| slice.to_kind(Kind::Double).square().sum(Kind::Double));
        let squares = in_one_place(squares.collect());
        // One wait for the device, not one for each; added up on the host, in the order of the names.
        let norm = read(&squares).into_iter().sum::<f64>().sqrt();
        if norm > max_norm {
            for (_, gradient) in gradients {
                let _ = gradient.g_mul_scalar_(max_norm / norm);
            }
        }
        norm
    })
}

/// Moves tensors on the host to the device on which others are.
pub fn in_one_place(tensors: Vec<Tensor>) -> Vec<Tensor> {
    let device = tensors.iter().map(Tensor::device).find(|device| device.is_cuda()).unwrap_or(Device::Cpu);
    tensors.into_iter().map(|tensor| tensor.to_device(device)).collect()
}

/// The values of tensors of one element, f64.
fn read(values: &[Tensor]) -> Vec<f64> {
    if values.is_empty() {
        return Vec::new();
    }
    or_panic(Vec::try_from(Tensor::stack(values, 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_gradient_is_cut_to_length_and_a_short_one_is_left() {
        let make = || vec![("a".to_owned(), Tensor::from_slice(&[3.0f32])), ("b".to_owned(), Tensor::from_slice(&[4.0f32]))];
        let mut gradients = make();
        assert!((clip_grad_norm(&mut gradients, 1.0) - 5.0).abs() < 1e-12);
        assert!((gradients[1].1.double_value(&[0]) - 0.8).abs() < 1e-6);
        let mut gradients = make();
        clip_grad_norm(&mut gradients, 5.5);
        assert!((gradients[0].1.double_value(&[0]) - 3.0).abs() < 1e-12);
    }
}
