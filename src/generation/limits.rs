//! What a prompt must keep to, so that the model can go on from it.

use super::{GenerationError, GenerationRules};
use crate::model::ModelConfig;

/// What a model can read.
#[derive(Clone, Copy, Debug)]
pub struct PromptLimits {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Tokens of prompt and answer together that the model is made for.
    pub longest: usize,
    pub most: usize,
}

impl PromptLimits {
    pub fn of(config: &ModelConfig) -> Self {
        Self { vocab_size: config.vocab_size, longest: config.longest_sequence(), most: config.most_positions() }
    }

    /// The new tokens at most that `rules` allow behind a prompt, or why the model can not go on from it.
    pub fn check(self, prompt: &[u32], rules: &GenerationRules) -> Result<usize, GenerationError> {
        let Self { vocab_size, most: longest, .. } = self;
        if prompt.is_empty() {
            return Err(GenerationError::EmptyPrompt);
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
            return Err(GenerationError::UnknownToken { token, vocab_size });
        }
        let (asked, room) = (rules.new_tokens(prompt.len()), longest.saturating_sub(prompt.len()));
        // What nobody has asked for may be cut short; the reason of the end says so.
        let limit = if rules.max_new_tokens.is_none() { asked.min(room) } else { asked };
        if limit == 0 || limit > room {
            return Err(GenerationError::TooLong { prompt: prompt.len(), new_tokens: limit.max(1), longest });
        }
        Ok(limit)
    }
}
