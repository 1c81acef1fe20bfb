//! The rate of plain matrix multiplication, by the library that the model's projections use, on the same device and threads.

use serde::Serialize;
use tch::{Device, Kind};

use super::Spent;
use super::clock::time_of;
use crate::plan::square_product;

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

/// The rate of a product of two square matrices of the kind.
pub fn gemm_rate(kind: Kind, device: Device) -> GemmRate {
    let (multiply, operations) = square_product(kind, device);
    multiply();
    let (mut flops, mut spent) = (0.0, Spent::default());
    while spent.seconds < SECONDS {
        spent.add(time_of(device, &multiply));
        flops += operations;
    }
    GemmRate::of(flops, spent)
}
