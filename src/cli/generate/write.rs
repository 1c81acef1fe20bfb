//! What `kvtune generate` prints: one text as it comes; several, or JSON lines, in their order, each as soon as it and those before it have ended.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use serde_json::json;

use super::code_of_signal;
use crate::generation::{GenerationEvent, Generator, Request, RequestId, WholeText};
use crate::report::console;
use crate::train::Interrupt;
use crate::units::{Fault, counted};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// The only one, as it comes.
    Streamed,
    Texts,
    Json,
}

pub(super) struct WrittenTexts {
    shown: Shown,
    /// Whether there is text beside the tokens.
    has_text: bool,
    /// The samples of each prompt, prompt after prompt.
    texts: Vec<WrittenText>,
    places: BTreeMap<RequestId, Range<usize>>,
    num_printed: usize,
    /// The first of the requests that could not be carried out.
    pub(super) failed: Option<Fault>,
}

struct WrittenText {
    prompt: usize,
    sample: usize,
    prompt_tokens: usize,
    written: WholeText,
    /// Why it has ended, in a word, or the error that has ended it.
    end: Option<Result<&'static str, String>>,
}

impl WrittenTexts {
    pub(super) fn new(shown: Shown, has_text: bool) -> Self {
        Self { shown, has_text, texts: Vec::new(), places: BTreeMap::new(), num_printed: 0, failed: None }
    }

    /// Has all requests carried out, and prints the texts. What fails ends its request at once, and the command when all others are written.
    /// Ctrl-C ends all where they are.
    pub(super) fn all(
        mut self,
        mut generator: Generator<'_>,
        requests: impl Iterator<Item = (Request, Option<Fault>)>,
        interrupt: &Interrupt,
    ) -> Result<i32, Fault> {
        let (begin, mut read, mut requests) = (Instant::now(), None, requests.peekable());
        while interrupt.signal().is_none() {
            // Requests hold sessions: they are made when their turn comes.
            while generator.load().0 == 0
                && let Some((request, failed)) = requests.next()
            {
                self.submit(&mut generator, request, failed);
            }
            if !generator.is_idle() {
                for (request, event) in generator.step() {
                    if matches!(event, GenerationEvent::Prompt(_)) {
                        read.get_or_insert_with(|| begin.elapsed());
                    }
                    self.take(request, event)?;
                }
            }
            self.print_ended()?;
            if generator.is_idle() && requests.peek().is_none() {
                break;
            }
        }
        // Those that a signal has kept from being begun would have had a text, too.
        for (request, failed) in requests {
            let place = self.add(&request);
            if let Some(error) = failed {
                self.fail(place, error);
            }
        }
        self.texts.iter_mut().filter(|text| text.end.is_none()).for_each(|text| text.end = Some(Ok("cancelled")));
        self.print_ended()?;
        if let Some(first) = read {
            let (whole, first) = (begin.elapsed().as_secs_f64(), first.as_secs_f64());
            let prompts = self.texts.iter().filter(|text| text.sample == 0).map(|text| text.prompt_tokens);
            let (prompt, new) =
                (counted(prompts.sum(), "token"), self.texts.iter().map(|text| text.written.ids.len()).sum::<usize>());
            let speed = new as f64 / (whole - first).max(1e-9);
            console::note(&format!("{prompt} read, the first prompt in {first:.2} s; {new} written, {speed:.1} per second"));
        }
        match (interrupt.signal(), self.failed) {
            (Some(signal), _) => Ok(code_of_signal(signal)),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(0),
        }
    }

    pub(super) fn submit(&mut self, generator: &mut Generator<'_>, request: Request, failed: Option<Fault>) {
        let place = self.add(&request);
        match failed.map_or_else(|| generator.submit(request), Err) {
            Ok(id) => drop(self.places.insert(id, place)),
            Err(error) => self.fail(place, error),
        }
    }

    /// Adds the texts of a request, of which nothing has come.
    fn add(&mut self, request: &Request) -> Range<usize> {
        let (first, prompt) = (self.texts.len(), self.texts.last().map_or(0, |text| text.prompt + 1));
        let prompt_tokens = request.prompt.len();
        let empty = |sample| WrittenText { prompt, sample, prompt_tokens, written: WholeText::default(), end: None };
        self.texts.extend((0..request.samples).map(empty));
        first..self.texts.len()
    }

    fn take(&mut self, request: RequestId, event: GenerationEvent) -> Result<(), Fault> {
        let Some(place) = self.places.get(&request).cloned() else { return Ok(()) };
        match event {
            GenerationEvent::Prompt(_) | GenerationEvent::Border(_) => {}
            GenerationEvent::Failed(error) => self.fail(place, error),
            GenerationEvent::Token { sample, .. } | GenerationEvent::Finished { sample, .. } => {
                let own = &mut self.texts[place.start + sample];
                let new = own.written.add(event);
                if self.shown == Shown::Streamed {
                    console::part(new)?;
                }
                own.end = own.written.reason.map(|reason| Ok(reason.name()));
            }
        }
        Ok(())
    }

    /// Ends those texts of a request that have not ended.
    fn fail(&mut self, place: Range<usize>, error: Fault) {
        let open = self.texts[place].iter_mut().filter(|text| text.end.is_none());
        open.for_each(|text| text.end = Some(Err(error.to_string())));
        self.failed.get_or_insert(error);
    }

    /// Prints the texts that have ended, up to the first that has not.
    fn print_ended(&mut self) -> Result<(), Fault> {
        while let Some((text, end)) = self.texts.get(self.num_printed).and_then(|text| Some((text, text.end.as_ref()?))) {
            self.num_printed += 1;
            if let Some(line) = self.line(text, end) {
                console::result(&line)?;
            }
        }
        Ok(())
    }

    /// What is printed at the end of a text.
    fn line(&self, text: &WrittenText, end: &Result<&'static str, String>) -> Option<String> {
        let WrittenText { prompt, sample, prompt_tokens, written: WholeText { ids, text: words, .. }, .. } = text;
        let reason = end.as_ref().map_or("error", |reason| reason);
        Some(match (self.shown, end) {
            // The error says it all.
            (Shown::Streamed, Err(_)) if ids.is_empty() => return None,
            (Shown::Streamed, _) => String::new(),
            (Shown::Texts, _) => {
                let words = match end {
                    Err(error) => error.clone(),
                    Ok(_) if !self.has_text => format!("{ids:?}"),
                    Ok(_) => words.clone(),
                };
                format!("== prompt {}, text {} ({reason}) ==\n{words}", prompt + 1, sample + 1)
            }
            (Shown::Json, _) => {
                let mut line = json!({
                    "prompt": prompt, "sample": sample, "prompt_tokens": prompt_tokens, "token_ids": ids, "text": words,
                    "finish_reason": reason,
                });
                if let Err(error) = end {
                    line["error"] = json!(error);
                }
                line.to_string()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_shown_only_without_a_tokenizer() {
        let written = WholeText { ids: vec![7], ..WholeText::default() };
        let text = WrittenText { prompt: 0, sample: 0, prompt_tokens: 1, written, end: None };
        let line = |has_text| WrittenTexts::new(Shown::Texts, has_text).line(&text, &Ok("stop")).unwrap();
        assert_eq!(line(true), "== prompt 1, text 1 (stop) ==\n");
        assert_eq!(line(false), "== prompt 1, text 1 (stop) ==\n[7]");
    }
}
