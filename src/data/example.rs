//! One sample as its file gives it, before tokenisation.

use super::chat::ChatSample;
use super::question::{FollowUp, SampleGroups};

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Example {
    pub(super) content: Content,
    pub(super) groups: Option<SampleGroups>,
    /// The right answers, where they are others than the completion alone.
    pub(super) references: Vec<String>,
    pub(super) follow_up: Option<FollowUp>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    Text { prompt: String, completion: String },
    TextClass { prompt: String, class: usize },
    Chat(Box<ChatSample>),
    Tokens { ids: Vec<u32>, is_trained: Vec<bool> },
    TokensClass { ids: Vec<u32>, class: usize },
}

impl Example {
    pub(super) fn new(content: impl Into<Content>) -> Self {
        Self { content: content.into(), groups: None, references: Vec::new(), follow_up: None }
    }
}

impl From<ChatSample> for Content {
    fn from(sample: ChatSample) -> Self {
        Self::Chat(Box::new(sample))
    }
}

impl Content {
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Text { prompt, completion } => prompt.len() + completion.len(),
            Self::Chat(sample) => sample.conversation.size(),
            Self::TextClass { prompt, .. } => prompt.len(),
            Self::Tokens { ids, .. } | Self::TokensClass { ids, .. } => 4 * ids.len(),
        }
    }
}
