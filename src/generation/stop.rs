//! Text that comes token by token: bytes become characters, and stop strings are seen wherever tokens end.

use std::ops::RangeInclusive;

use crate::data::Tokenizer;
use crate::units::Fault;

/// Text up to the first stop string.
///
/// Tokens become text as soon as it is sure: the bytes of a character may be spread over tokens, and some tokenizers treat the first token
/// of a text differently. So what is new is read behind a few tokens that came before, whole characters where there are some, as vLLM does.
#[derive(Clone, Debug)]
pub struct StoppedText {
    ids: Vec<u32>,
    /// The first token of the window that is decoded.
    window: usize,
    /// The first token whose text was not sure yet.
    read: usize,
    stops: Vec<String>,
    /// Text that may still become a stop string.
    held: String,
    /// Whether a stop string has come.
    pub has_stopped: bool,
}

/// Tokens without the end of a character, after which their text is handed out all the same.
const MAX_WAIT: usize = 16;
/// Tokens of the prompt that the first new one is read behind: the fewest that are whole characters.
const PROMPT_TOKENS: RangeInclusive<usize> = 5..=23;

impl StoppedText {
    /// The text that follows `prompt`.
    pub fn new(stops: Vec<String>, tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> Self {
        let last = |count: usize| &prompt[prompt.len().saturating_sub(count)..];
        let text = |ids: &[u32]| tokenizer.and_then(|tokenizer| tokenizer.decode(ids).ok());
        let is_whole = |ids: &&[u32]| text(ids).is_some_and(|text| !text.contains(char::REPLACEMENT_CHARACTER));
        let ids = PROMPT_TOKENS.map(last).find(is_whole).unwrap_or(last(*PROMPT_TOKENS.start())).to_vec();
        Self { window: 0, read: ids.len(), ids, stops, held: String::new(), has_stopped: false }
    }

    /// The text that one more token adds for good. The text ends before the stop string that is complete first, of several the longest;
    /// what may still become one waits.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, Fault> {
        self.ids.push(id);
        let new = self.unread(tokenizer, false)?;
        Ok(self.take(&new, false))
    }

    /// What is left when no more tokens come.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, Fault> {
        let new = self.unread(tokenizer, true)?;
        Ok(self.take(&new, true))
    }

    /// The text of the tokens that have not been handed out, as far as it is sure; all of it at the end. It is what the window's text has behind
    /// that of the others. One byte that begins no character can make a tokenizer give up the characters before it, too: the new tokens are
    /// then read alone.
    fn unread(&mut self, tokenizer: &Tokenizer, is_end: bool) -> Result<String, Fault> {
        if self.read == self.ids.len() {
            return Ok(String::new());
        }
        let text = tokenizer.decode(&self.ids[self.window..])?;
        if !is_end && text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.read <= MAX_WAIT {
            return Ok(String::new());
        }
        let told = tokenizer.decode(&self.ids[self.window..self.read])?;
        let new = match text.strip_prefix(&told) {
            Some(new) => new.to_owned(),
            None => tokenizer.decode(&self.ids[self.read..])?,
        };
        (self.window, self.read) = (self.read, self.ids.len());
        Ok(new)
    }

    fn take(&mut self, new: &str, is_end: bool) -> String {
        if self.has_stopped {
            return String::new();
        }
        for c in new.chars() {
            self.held.push(c);
            let stop = self.stops.iter().filter(|stop| self.held.ends_with(*stop)).map(String::len).max();
            if let Some(len) = stop {
                self.has_stopped = true;
                self.held.truncate(self.held.len() - len);
                return std::mem::take(&mut self.held);
            }
        }
        let waits = if is_end { 0 } else { self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0) };
        let rest = self.held.split_off(self.held.len() - waits);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Bytes at the end of `text` that a stop string may begin with.
fn overlap(text: &str, stop: &str) -> usize {
    let mut ends = stop.char_indices().map(|(end, _)| end).filter(|&end| end > 0 && end <= text.len());
    ends.rfind(|&end| text.ends_with(&stop[..end])).unwrap_or(0)
}
