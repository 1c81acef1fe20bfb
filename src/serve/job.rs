//! What the HTTP side asks of the engine's thread, and what it is told.

use std::sync::Arc;

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
