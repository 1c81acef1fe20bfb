//! The learning rate of each step: linear warm-up, then cosine, linear or constant.

use std::f64::consts::PI;

use crate::recipe::{OptimizerRecipe, Schedule, Warmup};

/// The learning rate of update `step` (from 0) of `total`. Warm-up ends at the peak, the cosine and the line at zero.
pub fn learning_rate(recipe: &OptimizerRecipe, step: u64, total: u64) -> f64 {
    let warmup = match recipe.warmup {
        Warmup::Steps(steps) => steps,
        Warmup::Ratio(ratio) => (ratio * total as f64).ceil() as u64,
    };
    if step < warmup {
        return recipe.learning_rate * (step + 1) as f64 / warmup as f64;
    }
    // The last update still moves: progress reaches one only after it.
    let progress = (step - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
    let factor = match recipe.schedule {
        Schedule::Cosine => 0.5 * (1.0 + (PI * progress.min(1.0)).cos()),
        Schedule::Linear => 1.0 - progress.min(1.0),
        Schedule::Constant => 1.0,
    };
    recipe.learning_rate * factor
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(schedule: Schedule, step: u64) -> f64 {
        let recipe = OptimizerRecipe {
            learning_rate: 2.0,
            weight_decay: 0.0,
            betas: (0.9, 0.999),
            eps: 1e-8,
            schedule,
            warmup: Warmup::Steps(4),
        };
        learning_rate(&recipe, step, 12)
    }

    #[test]
    fn warms_up_to_the_peak_and_falls_towards_zero() {
        assert!((rate(Schedule::Cosine, 0) - 0.5).abs() < 1e-12);
        assert!((rate(Schedule::Cosine, 3) - 2.0).abs() < 1e-12);
        assert!((rate(Schedule::Cosine, 4) - 2.0).abs() < 1e-12);
        assert!((rate(Schedule::Cosine, 8) - 1.0).abs() < 1e-12);
        assert!((rate(Schedule::Linear, 10) - 0.5).abs() < 1e-12);
        assert!((rate(Schedule::Constant, 11) - 2.0).abs() < 1e-12);
        assert!(rate(Schedule::Cosine, 11) > 0.0);
    }
}
