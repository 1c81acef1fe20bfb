//! Text that comes token by token: bytes become characters, and stop strings are seen wherever tokens end.

use crate::data::Tokenizer;
use crate::units::Fault;

/// Tokens become text as soon as it is sure: the bytes of a character may be spread over tokens.
#[derive(Clone, Debug, Default)]
struct TextStream {
    ids: Vec<u32>,
    /// The first token of the window that is decoded: some tokenizers treat the first token of a text differently.
    window: usize,
    /// The first token that was new when the window was last moved.
    read: usize,
    /// Bytes of the window's text that have been handed out.
    told: usize,
}

/// What stands for bytes that are no character yet. A character has four bytes at most, the first of which tells how many.
const UNFINISHED: char = char::REPLACEMENT_CHARACTER;
const LONGEST: usize = 3;
/// Tokens without the end of a character, after which the window moves all the same.
const LONGEST_WAIT: usize = 16;

impl TextStream {
    /// The text that is sure with one more token.
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, Fault> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids[self.window..])?;
        let sure = text.char_indices().rev().take(LONGEST).take_while(|(_, c)| *c == UNFINISHED).last();
        let sure = sure.map_or(text.len(), |(start, _)| start);
        let new = text.get(self.told..sure).unwrap_or_default().to_owned();
        self.told = self.told.max(sure);
        if sure == text.len() || self.ids.len() - self.read > LONGEST_WAIT {
            (self.window, self.read) = (self.read, self.ids.len());
            let seen = tokenizer.decode(&self.ids[self.window..])?.len();
            self.told = seen.saturating_sub(text.len() - sure);
        }
        Ok(new)
    }

    /// What is left when no more tokens come.
    fn finish(&self, tokenizer: &Tokenizer) -> Result<String, Fault> {
        let text = tokenizer.decode(&self.ids[self.window..])?;
        Ok(text.get(self.told..).unwrap_or_default().to_owned())
    }
}

/// Text up to the first stop string.
#[derive(Clone, Debug)]
pub struct StoppedText {
    stream: TextStream,
    stops: Vec<String>,
    held: String,
    /// Whether a stop string has come.
    pub has_stopped: bool,
}

impl StoppedText {
    pub fn new(stops: Vec<String>) -> Self {
        Self { stream: TextStream::default(), stops, held: String::new(), has_stopped: false }
    }

    /// The text that one more token adds for good. The text ends before the stop string that is complete first, of several the longest;
    /// what may still become one waits.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, Fault> {
        let new = self.stream.push(tokenizer, id)?;
        Ok(self.take(&new, false))
    }

    /// What is left when no more tokens come.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, Fault> {
        let new = self.stream.finish(tokenizer)?;
        Ok(self.take(&new, true))
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
