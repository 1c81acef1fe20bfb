//! The gated activation between an MLP's projections (Shazeer 2020, arXiv 2002.05202).

use tch::Tensor;

/// `silu(gate) · up`, element by element.
///
/// # Shapes
/// Two tensors of one shape in, the same shape out.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Tensor {
    gate.silu() * up
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_of_zero_closes_and_a_large_one_passes_itself_on() {
        let gate = Tensor::from_slice(&[0.0f64, 40.0, -40.0]);
        let out = Vec::<f64>::try_from(swiglu(&gate, &Tensor::from_slice(&[5.0f64, 2.0, 2.0]))).unwrap();
        assert!(out[0].abs() < 1e-12 && (out[1] - 80.0).abs() < 1e-12 && out[2].abs() < 1e-12);
    }
}
