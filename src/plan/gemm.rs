//! The rate of plain matrix multiplication, by the library that the model's projections use, on the same device and threads.

use serde::Serialize;
use tch::{Device, Kind, Tensor, no_grad};

use super::clock::{Spent, time_of};
use super::projection::Projection;
use crate::model::ModelConfig;
use crate::native::product;

/// Operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rate {
    /// By the clock on the wall.
    pub per_second: f64,
    /// By the time that all threads together have computed.
    pub per_cpu_second: f64,
}

impl Rate {
    /// The rate of `flops` in the time of `spent`.
    pub(crate) fn of(flops: f64, spent: Spent) -> Self {
        Self { per_second: flops / spent.seconds, per_cpu_second: flops / spent.cpu_seconds }
    }
}

/// Rates of two kinds of products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Gemm {
    /// A chunk through the projections of a layer, one after the other.
    pub chunk: Rate,
    /// A large square matrix with another.
    pub square: Rate,
}

/// Measured for so long, at least, in each kind.
const SECONDS: f64 = 0.1;
/// Side of the square matrices: large enough for the rate, small enough to leave memory as it was.
const SIDE_CPU: i64 = 1024;
const SIDE_CUDA: i64 = 4096;

/// Measures both kinds for chunks of `rows` tokens.
pub(crate) fn measure(config: &ModelConfig, rows: usize, options: (Kind, Device)) -> Gemm {
    let side = if options.1.is_cuda() { SIDE_CUDA } else { SIDE_CPU };
    Gemm { chunk: chunk_rate(config, rows, options), square: rate(&[[side; 3]], options) }
}

/// The first kind alone.
pub(super) fn chunk_rate(config: &ModelConfig, rows: usize, options: (Kind, Device)) -> Rate {
    let of_projection = |projection: Projection| {
        let [out, inner] = projection.shape(&config.layers[0], config.hidden_size).map(|size| size as i64);
        [rows as i64, inner, out]
    };
    rate(&Projection::ALL.map(of_projection), options)
}

/// The rate of products `(m, k) · (n, k)ᵀ`, which is how a projection multiplies.
fn rate(shapes: &[[i64; 3]], options: (Kind, Device)) -> Rate {
    // Drawn: where all numbers are the same, few wires change, and a GPU that is short of power computes faster than it ever would.
    let pair = |&[m, k, n]: &[i64; 3]| (Tensor::randn([m, k], options), Tensor::randn([n, k], options));
    let pairs: Vec<(Tensor, Tensor)> = shapes.iter().map(pair).collect();
    let once: f64 = shapes.iter().map(|[m, k, n]| 2.0 * (m * k * n) as f64).sum();
    let multiply = || no_grad(|| pairs.iter().for_each(|(x, w)| drop(product(x, w))));
    multiply();
    let (mut flops, mut spent) = (0.0, Spent::default());
    while spent.seconds < SECONDS {
        spent.add(time_of(options.1, multiply));
        flops += once;
    }
    Rate::of(flops, spent)
}
