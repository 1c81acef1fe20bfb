//! The learning rate of each step: linear warm-up, then cosine, linear or constant.

use std::f64::consts::PI;

use crate::recipe::{LearningRateSchedule, OptimizerRecipe, Warmup};

/// The learning rate of update `step` (from 0) of `total`. Warm-up ends at the peak, the cosine and the line at `min_lr_ratio` of it.
pub fn learning_rate(recipe: &OptimizerRecipe, step: u64, total: u64) -> f64 {
    let warmup = match recipe.warmup {
        Warmup::Steps(steps) => steps.min(total),
        Warmup::Ratio(ratio) => (ratio * total as f64).ceil() as u64,
    };
    if step < warmup {
        return recipe.learning_rate * (step + 1) as f64 / warmup as f64;
    }
    // The last update still moves: progress reaches one only after it.
    let progress = (step - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
    let falls_to = |part: f64| recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * part;
    let factor = match recipe.schedule {
        LearningRateSchedule::Cosine => falls_to(0.5 * (1.0 + (PI * progress.min(1.0)).cos())),
        LearningRateSchedule::Linear => falls_to(1.0 - progress.min(1.0)),
        LearningRateSchedule::Constant => 1.0,
    };
    recipe.learning_rate * factor
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::recipe::Recipe;

    fn usual() -> OptimizerRecipe {
        let text = "model.path = '.'\nlora.r = 1\ndata = {format = 'tokens', train = 'none'}\nkv_cache = {policy = 'lastrec', cache_length = 8, \
                    chunk_size = 4}\n";
        Recipe::parse(text.to_owned(), Path::new("recipe.toml"), &[]).unwrap().recipe.optimizer
    }

    fn rate(schedule: LearningRateSchedule, step: u64) -> f64 {
        let recipe = OptimizerRecipe { learning_rate: 2.0, schedule, warmup: Warmup::Steps(4), ..usual() };
        learning_rate(&recipe, step, 12)
    }

    #[test]
    fn warms_up_to_the_peak_and_falls_towards_zero() {
        assert!((rate(LearningRateSchedule::Cosine, 0) - 0.5).abs() < 1e-12);
        assert!((rate(LearningRateSchedule::Cosine, 3) - 2.0).abs() < 1e-12);
        assert!((rate(LearningRateSchedule::Cosine, 4) - 2.0).abs() < 1e-12);
        assert!((rate(LearningRateSchedule::Cosine, 8) - 1.0).abs() < 1e-12);
        assert!((rate(LearningRateSchedule::Linear, 10) - 0.5).abs() < 1e-12);
        assert!((rate(LearningRateSchedule::Constant, 11) - 2.0).abs() < 1e-12);
        assert!(rate(LearningRateSchedule::Cosine, 11) > 0.0);
        let longer = OptimizerRecipe { learning_rate: 2.0, warmup: Warmup::Steps(99), ..usual() };
        assert!((learning_rate(&longer, 11, 12) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn a_schedule_may_end_above_zero() {
        let least = OptimizerRecipe { learning_rate: 2.0, min_lr_ratio: 0.1, warmup: Warmup::Steps(0), ..usual() };
        for (schedule, expected) in
            [(LearningRateSchedule::Cosine, 1.1), (LearningRateSchedule::Linear, 1.1), (LearningRateSchedule::Constant, 2.0)]
        {
            assert!((learning_rate(&OptimizerRecipe { schedule, ..least.clone() }, 6, 12) - expected).abs() < 1e-12);
        }
        assert!((learning_rate(&least, 12, 12) - 0.2).abs() < 1e-12);
    }
}
