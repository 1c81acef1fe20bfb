//! Random numbers keyed by seed and tensor name, so that they don't depend on the order in which tensors are drawn.

use std::f64::consts::TAU;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use tch::Tensor;

/// Draws from `[-bound, bound)`: `shape` out, f32 on the CPU.
pub(super) fn uniform(seed: u64, name: &str, shape: &[i64], bound: f64) -> Tensor {
    let mut rng = stream(seed, name);
    filled(shape, || bound * (2.0 * rng.random::<f64>() - 1.0))
}

/// Draws from the normal distribution around 0: `shape` out, f32 on the CPU.
pub(super) fn normal(seed: u64, name: &str, shape: &[i64], std: f64) -> Tensor {
    let mut rng = stream(seed, name);
    let mut spare = None;
    filled(shape, || {
        spare.take().unwrap_or_else(|| {
            // Box and Muller: two uniform numbers make two normal ones. 1 - u is never 0, whose logarithm is infinite.
            let radius = std * (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
            let (sin, cos) = (TAU * rng.random::<f64>()).sin_cos();
            spare = Some(radius * sin);
            radius * cos
        })
    })
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut key = blake3::Hasher::new();
    key.update(&seed.to_le_bytes());
    key.update(name.as_bytes());
    ChaCha8Rng::from_seed(*key.finalize().as_bytes())
}

fn filled(shape: &[i64], mut draw: impl FnMut() -> f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let numbers: Vec<f32> = (0..count).map(|_| draw() as f32).collect();
    Tensor::from_slice(&numbers).view(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(t: Tensor) -> f64 {
        f64::try_from(t).unwrap()
    }

    #[test]
    fn normal_numbers_have_their_mean_and_spread() {
        let x = normal(1, "w", &[400, 500], 0.02);
        assert!(number(x.mean(None)).abs() < 5.0 * 0.02 / 200_000f64.sqrt());
        assert!((number(x.std(true)) / 0.02 - 1.0).abs() < 0.01);
        let far = number(x.abs().gt(0.04).to_kind(tch::Kind::Double).mean(None));
        assert!((far - 0.0455).abs() < 0.003, "beyond two standard deviations: {far}");
    }

    #[test]
    fn seed_and_name_make_the_numbers() {
        let x = uniform(1, "w", &[64], 0.5);
        assert_eq!(x, uniform(1, "w", &[64], 0.5));
        assert_ne!(x, uniform(2, "w", &[64], 0.5));
        assert_ne!(x, uniform(1, "v", &[64], 0.5));
        assert!(number(x.abs().max()) <= 0.5);
    }
}
