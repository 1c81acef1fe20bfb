//! Answers of the engine's thread become whole texts.

use axum::http::StatusCode;

use super::ApiError;
use super::job::{Answers, TextEvent};
use crate::generation::{Finish, TokenLikelihood};

#[derive(Clone, Debug, Default)]
pub(super) struct PromptTexts {
    /// Log-probabilities of the prompt's tokens but the first, where they are asked for.
    pub(super) likelihoods: Vec<TokenLikelihood>,
    pub(super) texts: Vec<WholeText>,
}

/// A text that has ended.
#[derive(Clone, Debug, Default)]
pub(super) struct WholeText {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    pub(super) likelihoods: Vec<TokenLikelihood>,
    pub(super) reason: Option<Finish>,
    pub(super) evicted: usize,
}

/// The error for a text that the engine's thread never ended.
pub(super) fn gone() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
}

/// Waits for all texts of so many prompts.
pub(super) async fn gather(mut answers: Answers, prompts: usize, samples: usize) -> Result<Vec<PromptTexts>, ApiError> {
    let mut all = vec![PromptTexts { likelihoods: Vec::new(), texts: vec![WholeText::default(); samples] }; prompts];
    let mut left = prompts * samples;
    while left > 0 {
        let (prompt, answer) = answers.recv().await.ok_or_else(gone)?;
        match answer {
            TextEvent::Prompt(likelihoods) => all[prompt].likelihoods = likelihoods,
            TextEvent::Token { sample, id, text, likelihood } => {
                let own = &mut all[prompt].texts[sample];
                own.ids.push(id);
                own.text.push_str(&text);
                own.likelihoods.extend(likelihood);
            }
            TextEvent::Finished { sample, text, reason, evicted } => {
                let own = &mut all[prompt].texts[sample];
                own.text.push_str(&text);
                (own.reason, own.evicted) = (Some(reason), evicted);
                left -= 1;
            }
            TextEvent::Failed(error) => return Err(error),
        }
    }
    Ok(all)
}
