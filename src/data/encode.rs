//! From a sample to its token ids: what is prompt, what is target, where BOS and EOS stand.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::chat::ChatEncoder;
use super::encoded_sample::{Aim, EncodedSample};
use super::example::Content;
use super::faults::{self, RowFault};
use super::initial_part::InitialPartFinder;
use super::question::FollowUp;
use super::sample_place::SamplePlace;
use super::tokenizer::Tokenizer;
use crate::metrics::strip;
use crate::recipe::InitialPart;
use crate::units::{Fault, counted};

#[derive(Clone, Debug)]
pub(super) struct Encoder {
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) chat: ChatEncoder,
    pub(super) vocab_size: usize,
    /// The token that a class is not read at.
    pub(super) pad: Option<u32>,
    pub(super) initial: Option<InitialPartFinder>,
}

impl Encoder {
    /// All that decides what it makes of samples, which may be messages, key by key.
    pub(super) fn identity(&self, has_messages: bool) -> Value {
        let tokenizer = self.tokenizer.as_ref();
        let initial = self.initial.as_ref().map(|finder| {
            let InitialPart { end_regex, include_end_string, pad_id, range_is_prefix } = &finder.rule;
            json!({
                "end_regex": end_regex.written(), "include_end_string": include_end_string, "pad_id": pad_id,
                "range_is_prefix": range_is_prefix,
            })
        });
        json!({
            "tokenizer": tokenizer.map(Tokenizer::hash), "eos": tokenizer.and_then(|tokenizer| tokenizer.eos().ok()),
            "vocab_size": self.vocab_size, "pad": self.pad, "initial": initial, "chat": self.chat.identity(has_messages),
        })
    }

    /// What of a model's folder decides it, by name and hash; with `with_template` also that of chat templates.
    pub(super) fn origins(&self, with_template: bool) -> BTreeMap<String, String> {
        let tokenizer = self.tokenizer.as_ref();
        let own = tokenizer.map(|tokenizer| ("`tokenizer.json`", tokenizer.hash().to_owned()));
        let eos = tokenizer.and_then(|tokenizer| tokenizer.eos().ok());
        // A class is read before the end of a text where that pads.
        let pad = self.pad.filter(|pad| Some(*pad) == eos).map(|pad| ("the token that pads", pad.to_string()));
        let eos = eos.map(|eos| ("the token that ends a text", eos.to_string()));
        let chat = if with_template { self.chat.origins() } else { BTreeMap::new() };
        own.into_iter().chain(eos).chain(pad).chain(chat).map(|(name, hash)| (name.to_owned(), hash)).collect()
    }

    /// Encodes a whole sample, however long, and finds its initial part where that is asked for.
    pub(super) fn encode(&self, content: &Content, place: &SamplePlace) -> Result<EncodedSample, Fault> {
        // What follows the token that is read changes nothing.
        let of_class = |mut ids: Vec<u32>, class: usize| {
            let read = ids.iter().rposition(|&id| Some(id) != self.pad).unwrap_or(0);
            ids.truncate(read + 1);
            EncodedSample::new(ids, read, Aim::Class(class))
        };
        let mut sequence = match content {
            Content::Tokens { ids, is_trained } => {
                let prompt = is_trained.iter().take_while(|&&trained| !trained).count();
                EncodedSample::new(ids.clone(), prompt, Aim::Tokens(is_trained.clone()))
            }
            Content::TokensClass { ids, class } => of_class(ids.clone(), *class),
            Content::Text { prompt, completion } => self.chat.encode_pair(prompt, completion, self.tokenizer()?)?,
            Content::Chat(sample) => self.chat.encode(sample, self.tokenizer()?, place)?,
            Content::TextClass { prompt, class } => {
                // The class is read at the EOS behind the prompt, unless that is what pads.
                let tokenizer = self.tokenizer()?;
                let mut ids = tokenizer.encode_prompt(prompt)?;
                let initial = self.initial.as_ref().map(|finder| finder.of(&ids)).transpose()?;
                ids.push(tokenizer.eos()?);
                EncodedSample { initial, ..of_class(ids, *class) }
            }
        };
        check(&sequence, self.vocab_size, content, place)?;
        self.mark_initial(content, &mut sequence)?;
        Ok(sequence)
    }

    fn mark_initial(&self, content: &Content, sequence: &mut EncodedSample) -> Result<(), Fault> {
        let Some(finder) = &self.initial else { return Ok(()) };
        let prompt = match content {
            // It was found in all of the prompt.
            Content::TextClass { .. } => return Ok(()),
            Content::TokensClass { .. } => sequence.ids.len(),
            // Where nothing but pads stands before the first target, the row is one text.
            Content::Tokens { .. } if !sequence.ids[..sequence.prompt].iter().skip(1).any(|&id| id != finder.rule.pad_id) => {
                sequence.ids.len()
            }
            Content::Tokens { .. } | Content::Text { .. } | Content::Chat(_) => sequence.prompt,
        };
        let found = finder.of(&sequence.ids[..prompt])?;
        sequence.initial = Some(found);
        Ok(())
    }

    /// The text that a sample's tokens were made of; `None` of one that is token ids.
    pub(super) fn source_text(&self, content: &Content, place: &SamplePlace) -> Result<Option<String>, Fault> {
        match content {
            Content::Text { prompt, completion } => Ok(Some([&prompt[..], completion].concat())),
            Content::TextClass { prompt, .. } => Ok(Some(prompt.clone())),
            Content::Chat(sample) => self.chat.text(sample, place).map(Some),
            Content::Tokens { .. } | Content::TokensClass { .. } => Ok(None),
        }
    }

    pub(super) fn follow_up(
        &self,
        FollowUp { before, after, is_message, max_tokens }: &FollowUp,
        thoughts: &str,
    ) -> Result<Vec<u32>, Fault> {
        let tokenizer = self.tokenizer()?;
        let mut text = [before, strip(thoughts), after].concat();
        if let Some(most) = max_tokens {
            text = tokenizer.cut_as_upstream(text, *most)?;
        }
        if *is_message { self.chat.asked(&text, tokenizer) } else { tokenizer.encode_prompt(&text) }
    }

    pub(super) fn text(&self, ids: &[u32]) -> Result<String, Fault> {
        let missing = || {
            let hint = "put `tokenizer.json` into the model directory: answers are compared as texts";
            faults::no_tokenizer("the text of an answer").with_hint(hint)
        };
        let tokenizer = self.tokenizer.as_ref().ok_or_else(missing)?;
        tokenizer.decode(ids)
    }

    fn tokenizer(&self) -> Result<&Tokenizer, Fault> {
        let tokenizer = self.tokenizer.as_ref().ok_or_else(|| faults::no_tokenizer("text data"))?;
        let size = self.vocab_size;
        let Some(id) = tokenizer.ends.iter().find(|&&id| id as usize >= size) else { return Ok(tokenizer) };
        let message = format!("`eos_token_id` has {id}, which is not below the model's `vocab_size` {size}");
        Err(tokenizer.error(&message))
    }
}

fn check(sample: &EncodedSample, vocab_size: usize, content: &Content, place: &SamplePlace) -> Result<(), Fault> {
    if let Some(&id) = sample.ids.iter().find(|&&id| id as usize >= vocab_size) {
        let message = faults::out_of_vocabulary(&place.to_string(), u64::from(id), vocab_size);
        return Err(RowFault::bad(place.clone(), message, faults::OWN_TOKENIZER));
    }
    // The first token has nothing before it that could predict it.
    if !matches!(&sample.aim, Aim::Tokens(is_trained) if is_trained.iter().skip(1).all(|&trained| !trained)) {
        return Ok(());
    }
    let (why, hint) = match content {
        Content::Chat(_) => (
            "no message of the assistant is trained",
            "end the conversation with a message of the assistant, check `train` and `weight` of its messages, set `data.train_on`, \
             or leave such rows out with `data.on_bad_row = \"drop\"`",
        ),
        Content::Tokens { .. } | Content::TokensClass { .. } => (
            "`labels` is -100 behind the first token",
            "remove the sample, or label the tokens to train with their own ids in `labels`, at least one behind the first",
        ),
        Content::Text { .. } | Content::TextClass { .. } => (
            "nothing follows the prompt",
            "write what shall be learned as the completion, or leave such rows out with `data.on_bad_row = \"drop\"`",
        ),
    };
    let message = format!("{place}: {} and none to predict: {why}", counted(sample.ids.len(), "token"));
    Err(RowFault::bad(place.clone(), message, hint))
}
