//! What the HTTP side asks of the engine's thread, and what it is told, which becomes whole texts.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::ApiError;
use super::access_log::LogLine;
use crate::generation::{Finish, GenerationRules, LikelihoodsOf, TokenLikelihood};

/// A prompt to go on from. Whose client has gone, is let go of: its sender says so.
#[derive(Debug)]
pub(super) struct PromptJob {
    pub(super) prompt: Vec<u32>,
    pub(super) rules: GenerationRules,
    pub(super) samples: usize,
    pub(super) likelihoods: LikelihoodsOf,
    /// The number of the prompt in its request.
    pub(super) index: usize,
    pub(super) answers: UnboundedSender<(usize, TextEvent)>,
}

#[derive(Debug)]
pub(super) enum TextEvent {
    Prompt(Vec<TokenLikelihood>),
    Token {
        sample: usize,
        id: u32,
        text: String,
        likelihood: Option<TokenLikelihood>,
    },
    /// The end of one of its texts.
    Finished {
        sample: usize,
        text: String,
        reason: Finish,
        evicted: usize,
    },
    /// It can not be carried out.
    Failed(ApiError),
}

/// What is told about the prompts of a request, each with its number there.
pub(super) struct Answers {
    pub(super) events: UnboundedReceiver<(usize, TextEvent)>,
    pub(super) line: Arc<LogLine>,
}

impl Answers {
    pub(super) async fn recv(&mut self) -> Option<(usize, TextEvent)> {
        let next = self.events.recv().await;
        if let Some((_, TextEvent::Token { .. })) = next {
            self.line.add_new_token();
        }
        next
    }
}

/// What has become of a prompt.
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
