//! The rate of plain matrix multiplication, by the library that the model's projections use, on the same device and threads.

use serde::Serialize;
use tch::{Device, Kind, Tensor, no_grad};

use super::Spent;
use super::clock::time_of;
use crate::native::product;

/// The rate of matrix products in operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GemmRate {
    /// The rate in wall-clock time.
    pub per_second: f64,
    /// The rate in the CPU time of all threads together.
    pub per_cpu_second: f64,
}

impl GemmRate {
    pub(super) fn of(flops: f64, spent: Spent) -> Self {
        Self { per_second: flops / spent.seconds, per_cpu_second: flops / spent.cpu_seconds }
    }
}

/// Seconds that the measurement lasts, at least.
const SECONDS: f64 = 0.1;
/// Side of the matrices: large enough for the rate, small enough to leave memory as it was.
const SIDE_CPU: i64 = 1024;
const SIDE_CUDA: i64 = 4096;

/// The rate of a product of two square matrices of the kind.
pub fn gemm_rate(kind: Kind, device: Device) -> GemmRate {
    let side = if device.is_cuda() { SIDE_CUDA } else { SIDE_CPU };
    // Drawn: where all numbers are the same, few wires change, and a GPU that is short of power computes faster than it ever would.
    let [x, w] = [(); 2].map(|()| Tensor::randn([side, side], (kind, device)));
    let multiply = || no_grad(|| drop(product(&x, &w)));
    multiply();
    let (mut flops, mut spent) = (0.0, Spent::default());
    while spent.seconds < SECONDS {
        spent.add(time_of(device, multiply));
        flops += 2.0 * side.pow(3) as f64;
    }
    GemmRate::of(flops, spent)
}
