//! What a prompt must keep to, so that the model can go on from it.

use super::{GenerationRules, empty_prompt};
use crate::engine::Settings;
use crate::model::ModelConfig;
use crate::units::{Fault, FaultKind};

/// What a model can read.
#[derive(Clone, Copy, Debug)]
pub struct PromptLimits {
    pub vocab_size: usize,
    /// Tokens of prompt and answer together that the model is made for, and that the cache holds.
    pub longest: usize,
    /// Tokens of both that the model can have, and that the cache holds.
    pub most: usize,
    /// Whether `most` is what the cache holds, not what the model can have.
    cache_is_shorter: bool,
    /// Whether there is a tokenizer, so that tokens become text.
    has_text: bool,
}

impl PromptLimits {
    pub fn of(config: &ModelConfig, settings: &Settings, has_text: bool) -> Self {
        let (held, most) = (settings.longest_sequence(), config.computable_positions());
        let longest = config.trained_positions().min(held);
        Self { vocab_size: config.vocab_size, longest, most: most.min(held), cache_is_shorter: held < most, has_text }
    }

    /// The new tokens at most that `rules` allow behind a prompt, or why the model can not go on from it.
    pub fn check(self, prompt: &[u32], rules: &GenerationRules) -> Result<usize, Fault> {
        let Self { vocab_size, most, .. } = self;
        if prompt.is_empty() {
            return Err(empty_prompt());
        }
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
            let message = format!("token {token} of the prompt is not in the vocabulary of {vocab_size}");
            return Err(Fault::data(message, "make the tokens with the model's own tokenizer").of_kind(FaultKind::BadPrompt));
        }
        let (asked, room) = (rules.new_tokens(prompt.len()), most.saturating_sub(prompt.len()));
        // What nobody has asked for may be cut short; the reason of the end says so.
        let limit = if rules.max_new_tokens.is_none() { asked.min(room) } else { asked };
        if limit == 0 || limit > room {
            let (read, new) = (prompt.len(), limit.max(1));
            let (of, remedy) = if self.cache_is_shorter {
                ("slots of a cache that evicts nothing", "raise `kv_cache.cache_length`")
            } else {
                ("positions of the model", "scale the rotary embeddings with `model.rope_scaling`")
            };
            let message = match rules.max_length.filter(|_| asked == 0) {
                Some(length) => format!("a prompt of {read} tokens leaves no token for a text: together they may have {length}"),
                None => format!("a prompt of {read} tokens and {new} new ones are more than the {most} {of}"),
            };
            let hint = format!("shorten the prompt, ask for fewer tokens with `--max-new-tokens`, or {remedy}");
            return Err(Fault::usage(message, hint).of_kind(FaultKind::ContextLength));
        }
        if !self.has_text && !rules.stop.is_empty() {
            let message = "stop strings need text, and the model has no `tokenizer.json`";
            return Err(Fault::usage(message, "use `--eos` with token ids instead"));
        }
        Ok(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_asks_for_is_cut_to_the_room_that_is_left() {
        let limits = PromptLimits { vocab_size: 9, longest: 20, most: 20, cache_is_shorter: false, has_text: true };
        let usual = GenerationRules { usual_new_tokens: Some(16), ..GenerationRules::default() };
        let asked = GenerationRules { max_new_tokens: Some(16), ..usual.clone() };
        let within = GenerationRules { max_length: Some(3), ..usual.clone() };
        for (rules, prompt, expected) in [
            (&usual, 2, Ok(16)),
            (&usual, 15, Ok(5)),
            (&usual, 20, Err("a prompt of 20 tokens and 1 new ones are more than the 20 positions of the model")),
            (&asked, 15, Err("a prompt of 15 tokens and 16 new ones are more than the 20 positions of the model")),
            (&within, 2, Ok(1)),
            (&within, 5, Err("a prompt of 5 tokens leaves no token for a text: together they may have 3")),
        ] {
            let found = limits.check(&vec![1; prompt], rules).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{prompt}");
        }
    }
}
