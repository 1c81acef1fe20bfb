//! How the scores of a layer's attention come about.

/// What decides scores besides queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreRule {
    /// The factor on `q · k`.
    pub scale: f64,
    /// So many keys a query sees at most, its own among them: those of positions p − window < k ≤ p. `None` without a limit.
    pub window: Option<usize>,
}

impl ScoreRule {
    /// Scores that are scaled, and nothing else.
    pub fn scaled(scale: f64) -> Self {
        Self { scale, window: None }
    }
}
