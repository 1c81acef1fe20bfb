//! How the scores of a layer's attention come about.

use tch::Tensor;

use crate::native::Scoring;

/// What decides scores besides queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreRule {
    /// The factor on `q · k`.
    pub scale: f64,
    /// The most keys that a query sees, its own among them: those of positions p − window < k ≤ p. `None` without a limit.
    pub window: Option<usize>,
    /// What no score exceeds, above 0: scores s become cap · tanh(s / cap), before anything is hidden (Gemma 2, arXiv 2408.00118,
    /// section 2). `None` without a cap.
    pub soft_cap: Option<f64>,
}

impl ScoreRule {
    /// Scores that are scaled, and nothing else.
    pub fn scaled(scale: f64) -> Self {
        Self { scale, window: None, soft_cap: None }
    }

    /// What a kernel must know of it.
    pub(super) fn scoring(self) -> Scoring {
        Scoring { scale: self.scale, soft_cap: self.soft_cap }
    }

    /// Scaled scores, capped in place.
    pub(super) fn capped(self, mut scores: Tensor) -> Tensor {
        if let Some(cap) = self.soft_cap {
            scores = scores.g_div_scalar_(cap).tanh_().g_mul_scalar_(cap);
        }
        scores
    }
}
