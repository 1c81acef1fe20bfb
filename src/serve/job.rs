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
        /// Tokens of its prompt that a held session had read.
        reused: usize,
    },
    Failed(ApiError),
}

/// What is told about the prompts of a request, each with its number there.
pub(super) struct Answers {
    pub(super) events: UnboundedReceiver<(usize, TextEvent)>,
    pub(super) line: Arc<LogLine>,
    /// How many prompts there are, and texts of each.
    pub(super) prompts: usize,
    pub(super) samples: usize,
}

impl TextEvent {
    /// The part of its text that it brings.
    pub(super) fn part(&self) -> &str {
        match self {
            Self::Token { text, .. } | Self::Finished { text, .. } => text,
            Self::Prompt(_) | Self::Failed(_) => "",
        }
    }
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

#[derive(Clone, Debug, Default)]
pub(super) struct PromptTexts {
    /// Log-probabilities of the prompt's tokens but the first, where they are asked for.
    pub(super) likelihoods: Vec<TokenLikelihood>,
    pub(super) texts: Vec<WholeText>,
}

impl PromptTexts {
    /// Those of a prompt that nothing has been told of.
    pub(super) fn none_yet(samples: usize) -> Self {
        Self { likelihoods: Vec::new(), texts: vec![WholeText::default(); samples] }
    }

    /// Adds what is told; true where one of the texts has ended.
    pub(super) fn add(&mut self, event: TextEvent) -> Result<bool, ApiError> {
        match event {
            TextEvent::Prompt(likelihoods) => self.likelihoods = likelihoods,
            TextEvent::Token { sample, id, text, likelihood } => {
                let own = &mut self.texts[sample];
                own.ids.push(id);
                own.text.push_str(&text);
                own.likelihoods.extend(likelihood);
            }
            TextEvent::Finished { sample, text, reason, evicted, reused } => {
                let own = &mut self.texts[sample];
                own.text.push_str(&text);
                (own.reason, own.evicted, own.reused) = (Some(reason), evicted, reused);
                return Ok(true);
            }
            TextEvent::Failed(error) => return Err(error),
        }
        Ok(false)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct WholeText {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    pub(super) likelihoods: Vec<TokenLikelihood>,
    pub(super) reason: Option<Finish>,
    pub(super) evicted: usize,
    pub(super) reused: usize,
}

/// The error for a text that the engine's thread never ended.
pub(super) fn gone() -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
}

/// Waits for all texts of all prompts.
pub(super) async fn gather(mut answers: Answers) -> Result<Vec<PromptTexts>, ApiError> {
    let mut all = vec![PromptTexts::none_yet(answers.samples); answers.prompts];
    let mut left = answers.prompts * answers.samples;
    while left > 0 {
        let (prompt, event) = answers.recv().await.ok_or_else(gone)?;
        left -= usize::from(all[prompt].add(event)?);
    }
    Ok(all)
}
