//! What the HTTP side asks of the engine's thread, and what it is told, which becomes whole texts.

use std::sync::Arc;

use axum::http::StatusCode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use super::ApiError;
use super::access_log::LogLine;
use super::counters::add;
use crate::generation::{GenerationEvent, Request, TokenLikelihood, WholeText};

/// A prompt to go on from. Whose client has gone, is let go of: its sender says so.
pub(super) struct PromptJob {
    pub(super) request: Request,
    /// The number of the prompt in its request.
    pub(super) index: usize,
    pub(super) answers: UnboundedSender<(usize, GenerationEvent)>,
}

/// What is told about the prompts of a request, each with its number there.
pub(super) struct Answers {
    pub(super) events: UnboundedReceiver<(usize, GenerationEvent)>,
    pub(super) line: Arc<LogLine>,
    /// How many prompts there are, and texts of each.
    pub(super) prompts: usize,
    pub(super) samples: usize,
}

impl Answers {
    /// What is told next; fails with a prompt that has failed, and where the server shuts down before.
    pub(super) async fn recv(&mut self) -> Result<(usize, GenerationEvent), ApiError> {
        match self.events.recv().await {
            Some((_, GenerationEvent::Failed(error))) => Err(ApiError::from(&error)),
            Some(next) => {
                if matches!(next.1, GenerationEvent::Token { .. }) {
                    add(&self.line.new_tokens, 1);
                }
                Ok(next)
            }
            None => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, SHUTTING_DOWN)),
        }
    }
}

pub(super) const SHUTTING_DOWN: &str = "the server is shutting down";

#[derive(Clone, Debug)]
pub(super) struct PromptTexts {
    /// Log-probabilities of the prompt's tokens but the first, where they are asked for.
    pub(super) likelihoods: Vec<TokenLikelihood>,
    pub(super) texts: Vec<WholeText>,
}

pub(super) async fn gather(mut answers: Answers) -> Result<Vec<PromptTexts>, ApiError> {
    let none_yet = PromptTexts { likelihoods: Vec::new(), texts: vec![WholeText::default(); answers.samples] };
    let mut all = vec![none_yet; answers.prompts];
    let mut left = answers.prompts * answers.samples;
    while left > 0 {
        let (prompt, event) = answers.recv().await?;
        left -= usize::from(matches!(event, GenerationEvent::Finished { .. }));
        match event {
            GenerationEvent::Prompt(likelihoods) => all[prompt].likelihoods = likelihoods,
            GenerationEvent::Token { sample, .. } | GenerationEvent::Finished { sample, .. } => {
                all[prompt].texts[sample].add(event);
            }
            GenerationEvent::Border(_) | GenerationEvent::Failed(_) => {}
        }
    }
    Ok(all)
}
