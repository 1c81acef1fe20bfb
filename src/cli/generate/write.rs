//! What `kvtune generate` prints: text as it comes where there is one, texts or JSON lines in their order where there are several.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::json;

use super::Ending;
use crate::error::Error;
use crate::generation::{GenerationEvent, Generator, Request, RequestId};
use crate::report::console;
use crate::train::Interrupt;

/// Texts that are being written.
pub(super) struct WrittenTexts {
    texts: BTreeMap<(RequestId, usize), WrittenText>,
    /// Tokens of each prompt.
    prompts: Vec<usize>,
    is_json: bool,
}

#[derive(Default)]
struct WrittenText {
    ids: Vec<u32>,
    words: String,
    finish: Option<&'static str>,
}

/// The word for a text that was not written to its end.
const CANCELLED: &str = "cancelled";

impl WrittenTexts {
    /// Nothing yet.
    pub(super) fn of(requests: &[Request], is_json: bool) -> Self {
        let prompts = requests.iter().map(|request| request.prompt.len()).collect();
        Self { texts: BTreeMap::new(), prompts, is_json }
    }

    /// Has all requests carried out, and prints the texts. Ctrl-C ends them where they are.
    pub(super) fn all(
        mut self,
        mut generator: Generator<'_>,
        requests: Vec<Request>,
        interrupt: &Interrupt,
    ) -> Result<Ending, Error> {
        let begin = Instant::now();
        let streams = !self.is_json && generator.writes_text() && requests.len() == 1 && requests[0].samples == 1;
        let mut ids = Vec::new();
        for request in requests {
            let samples = request.samples;
            let id = generator.submit(request)?;
            self.texts.extend((0..samples).map(|sample| ((id, sample), WrittenText::default())));
            ids.push(id);
        }
        let mut read = None;
        while !generator.is_idle() && interrupt.signal().is_none() {
            for event in generator.step() {
                if matches!(event, GenerationEvent::Prompt { .. }) {
                    read.get_or_insert_with(|| begin.elapsed());
                }
                self.take(event, streams)?;
            }
        }
        self.print(&ids, streams)?;
        let (new, prompt): (usize, usize) = (self.texts.values().map(|text| text.ids.len()).sum(), self.prompts.iter().sum());
        let (whole, first) = (begin.elapsed().as_secs_f64(), read.unwrap_or_default().as_secs_f64());
        let speed = new as f64 / (whole - first).max(1e-9);
        console::note(&format!("{prompt} tokens read, the first prompt in {first:.2} s; {new} written, {speed:.1} per second"));
        Ok(interrupt.signal().map_or(Ending::Done, Ending::Interrupted))
    }

    fn take(&mut self, event: GenerationEvent, streams: bool) -> Result<(), Error> {
        match event {
            GenerationEvent::Prompt { .. } | GenerationEvent::Border { .. } => {}
            GenerationEvent::Token { request, sample, id, text, .. } => {
                let own = self.texts.entry((request, sample)).or_default();
                own.ids.push(id);
                add(own, &text, streams)?;
            }
            GenerationEvent::Finished { request, sample, text, reason, .. } => {
                let own = self.texts.entry((request, sample)).or_default();
                own.finish = Some(reason.name());
                add(own, &text, streams)?;
            }
            GenerationEvent::Failed { error, .. } => return Err(error.into()),
        }
        Ok(())
    }

    fn print(&self, ids: &[RequestId], streams: bool) -> Result<(), Error> {
        if streams {
            return Ok(console::result("")?);
        }
        for ((request, sample), text) in &self.texts {
            let prompt = ids.iter().position(|id| id == request).unwrap_or(0);
            let finish = text.finish.unwrap_or(CANCELLED);
            let line = if self.is_json {
                let prompt_tokens = self.prompts[prompt];
                json!({
                    "prompt": prompt, "sample": sample, "prompt_tokens": prompt_tokens, "token_ids": text.ids,
                    "text": text.words, "finish_reason": finish,
                })
                .to_string()
            } else {
                let words = if text.words.is_empty() { format!("{:?}", text.ids) } else { text.words.clone() };
                format!("== prompt {}, text {} ({finish}) ==\n{words}", prompt + 1, sample + 1)
            };
            console::result(&line)?;
        }
        Ok(())
    }
}

/// Adds what has come, and shows it where one text streams.
fn add(text: &mut WrittenText, new: &str, streams: bool) -> Result<(), Error> {
    text.words.push_str(new);
    if streams {
        console::part(new)?;
    }
    Ok(())
}
