//! What is asked of a generator, and what it tells.

use super::{GenerationRules, TokenLikelihood};
use crate::engine::{Session, Settings};
use crate::units::{Fault, named};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A prompt that is to be continued.
pub struct Request {
    /// All tokens of the prompt: those that a session has read, too.
    pub prompt: Vec<u32>,
    /// The first position of its initial part, and the one behind it, for a policy that keeps that.
    pub initial: Option<(usize, usize)>,
    pub rules: GenerationRules,
    /// So many texts, which share what is computed of the prompt.
    pub samples: usize,
    pub likelihoods: LikelihoodsOf,
    /// A session that has read the beginning of the prompt, and less than all.
    pub session: Option<Session>,
    /// The most tokens of the session that is handed back at the end; `None` hands none back.
    pub keeps_session: Option<usize>,
    /// Whether to hand out a session that has read the prompt up to its last column border that prompts with the same beginning have, too.
    pub keeps_border: bool,
}

impl Request {
    /// Asks for one text after `prompt`.
    pub fn new(prompt: Vec<u32>, rules: GenerationRules) -> Self {
        Self {
            prompt,
            initial: None,
            rules,
            samples: 1,
            likelihoods: LikelihoodsOf::default(),
            session: None,
            keeps_session: None,
            keeps_border: false,
        }
    }
}

/// Tells for which tokens likelihoods are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LikelihoodsOf {
    /// New tokens, each with so many of the most likely ones.
    pub new_tokens: Option<usize>,
    /// Tokens of the prompt, likewise.
    pub prompt: Option<usize>,
}

pub enum GenerationEvent {
    /// The prompt has been read. Has the likelihoods of all its tokens but the first, where they are asked for.
    Prompt(Vec<TokenLikelihood>),
    /// The prompt has been read up to a border that longer prompts with the same beginning have, too, at which a session of its own stands.
    Border(Box<Continued>),
    Token {
        /// The index of the text among those of the request.
        sample: usize,
        id: u32,
        /// The text that the token adds for good; empty without a tokenizer.
        text: String,
        /// Where it is asked for.
        likelihood: Option<TokenLikelihood>,
    },
    Finished {
        sample: usize,
        /// The end of the text that no token event has brought.
        text: String,
        reason: Finish,
        /// Entries that have left its caches, by KV head and layer.
        evicted: usize,
        /// Tokens of its prompt that a session had read before.
        reused: usize,
        session: Option<Box<Continued>>,
    },
    /// The request could not be carried out; nothing more comes of it.
    Failed(Fault),
}

named! {
    /// Why a text has ended, by the `finish_reason` of OpenAI's API.
    pub enum Finish {
        /// An end token or a stop string has come.
        Stop = "stop",
        /// There are as many tokens as were asked for.
        Length = "length",
    }
}

/// A text, as far as it has been told.
#[derive(Clone, Debug, Default)]
pub struct WholeText {
    pub ids: Vec<u32>,
    pub text: String,
    pub likelihoods: Vec<TokenLikelihood>,
    pub reason: Option<Finish>,
    pub evicted: usize,
    pub reused: usize,
}

impl WholeText {
    /// Adds a token of it, or its end; returns the text that this brings.
    pub fn add(&mut self, event: GenerationEvent) -> &str {
        let told = self.text.len();
        match event {
            GenerationEvent::Token { id, text, likelihood, .. } => {
                self.ids.push(id);
                self.text.push_str(&text);
                self.likelihoods.extend(likelihood);
            }
            GenerationEvent::Finished { text, reason, evicted, reused, .. } => {
                self.text.push_str(&text);
                (self.reason, self.evicted, self.reused) = (Some(reason), evicted, reused);
            }
            GenerationEvent::Prompt(_) | GenerationEvent::Border(_) | GenerationEvent::Failed(_) => {}
        }
        &self.text[told..]
    }
}

pub struct Continued {
    pub session: Session,
    /// The tokens that the session has read; of a text also the last, which it is yet to read.
    pub ids: Vec<u32>,
}

/// How many tokens of a prompt need not be read by a session that has read `read`: all of these, if the prompt begins with them and goes on.
/// Where nothing leaves a cache, a session that has read something else behind the common beginning goes back to the last whole chunk.
pub fn shared_tokens(settings: &Settings, read: &[u32], prompt: &[u32]) -> usize {
    let before_last = &prompt[..prompt.len().saturating_sub(1)];
    let shared = read.iter().zip(before_last).take_while(|(read, asked)| read == asked).count();
    match shared {
        all if all == read.len() => all,
        some if settings.keeps_all_exactly() => some - some % settings.chunk_size(),
        _ => 0,
    }
}
