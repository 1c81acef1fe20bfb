//! `kvtune generate --chat`: a conversation, of which each turn goes on from what has been read.

use std::io::{BufRead, IsTerminal};

use serde_json::Value;

use super::LoadedModel;
use super::prompts::{ConversationReader, TemplateArguments};
use crate::data::{self, Conversation};
use crate::engine::Session;
use crate::generation::{Continued, Finish, GenerationEvent, GenerationRules, Generator, Request, shared_tokens};
use crate::report::console;
use crate::train::Interrupt;
use crate::units::{Fault, counted};

pub(super) struct Chat<'a> {
    used: &'a LoadedModel,
    reader: ConversationReader<'a>,
    rules: GenerationRules,
    system: Option<Value>,
    messages: Vec<Value>,
    /// The session of the conversation, and the text that it has read, up to the end of the last answer.
    kept: Option<(Continued, String)>,
}

const HELP: &str = "!clear   forget the conversation\n!status  how long it is\n!exit    end (or Ctrl-D); Ctrl-C ends an answer";

impl<'a> Chat<'a> {
    pub(super) fn new(
        used: &'a LoadedModel,
        rules: GenerationRules,
        template: &TemplateArguments,
        system: Option<&str>,
    ) -> Result<Self, Fault> {
        let reader = template.reader(used)?;
        let system = system.map(|text| data::message("system", text));
        Ok(Self { used, reader, rules, messages: system.iter().cloned().collect(), system, kept: None })
    }

    pub(super) fn run(mut self, interrupt: &Interrupt) -> Result<(), Fault> {
        let is_terminal = std::io::stdin().is_terminal();
        if is_terminal {
            console::note("!help says what there is beside talking");
        }
        for line in std::io::stdin().lock().lines() {
            let line =
                line.map_err(|error| Fault::usage(format!("standard input cannot be read: {error}"), "write UTF-8 text"))?;
            match line.trim() {
                "" => {}
                "!exit" => break,
                "!help" => console::note(HELP),
                "!clear" => {
                    self.messages = self.system.iter().cloned().collect();
                    self.kept = None;
                }
                "!status" => self.tell_status(),
                word if word.starts_with('!') => console::warning(&format!("there is no `{word}`\n{HELP}")),
                text => {
                    // A signal before the answer has begun was for the one before.
                    interrupt.reset();
                    self.answer(text, interrupt)?;
                }
            }
        }
        Ok(())
    }

    fn ends(&self, token: Option<&u32>) -> bool {
        token.is_some_and(|token| self.rules.eos.contains(token))
    }

    fn tell_status(&self) {
        let lengths = self.kept.as_ref().map(|(kept, _)| (kept.ids.len(), kept.session.entries()));
        let (tokens, (held, evicted)) = lengths.unwrap_or_default();
        let messages = counted(self.messages.len(), "message");
        console::note(&format!("{messages}, {tokens} tokens; the caches hold {held} entries, {evicted} have been evicted"));
    }

    fn answer(&mut self, text: &str, interrupt: &Interrupt) -> Result<(), Fault> {
        self.messages.push(data::message("user", text));
        let conversation = Conversation { messages: self.messages.clone(), ..self.reader.told.clone() };
        let rendered = match self.reader.template.render(&conversation, true) {
            Ok(rendered) => rendered,
            Err(error) => {
                // The conversation goes on without what the template refuses.
                self.messages.pop();
                console::warning(&error.to_string());
                return Ok(());
            }
        };
        let mut generator = self.used.generator(1);
        let submitted = self.request(&rendered, &generator).and_then(|request| generator.submit(request));
        let id = match submitted {
            Ok(id) => id,
            Err(error) => {
                self.messages.pop();
                console::error(&error);
                return Ok(());
            }
        };
        let (mut answer, mut session) = (String::new(), None);
        while !generator.is_idle() {
            if interrupt.signal().is_some() {
                session = generator.stop(id);
                break;
            }
            for (_, event) in generator.step() {
                match event {
                    GenerationEvent::Prompt(_) | GenerationEvent::Border(_) => {}
                    GenerationEvent::Token { text, .. } => show(&mut answer, &text)?,
                    GenerationEvent::Finished { text, session: kept, reason, .. } => {
                        show(&mut answer, &text)?;
                        // What follows a stop string has been read, and is not in the conversation.
                        let is_whole = |kept: &Continued| reason == Finish::Length || self.ends(kept.ids.last());
                        session = kept.map(|kept| *kept).filter(is_whole);
                    }
                    GenerationEvent::Failed(error) => return Err(error),
                }
            }
        }
        console::outcome("", &serde_json::json!({ "role": "assistant", "content": answer }))?;
        interrupt.reset();
        self.kept = session.map(|session| (session, format!("{rendered}{answer}")));
        self.messages.push(data::message("assistant", &answer));
        Ok(())
    }

    /// The conversation as a prompt: what follows the part that has been read, where the template leaves that as it was. What is kept of the
    /// conversation stays if the prompt is refused.
    fn request(&mut self, rendered: &str, generator: &Generator) -> Result<Request, Fault> {
        let unread = self.kept.as_ref().and_then(|(kept, read)| Some((kept, rendered.strip_prefix(read)?)));
        let is_continued = unread.is_some();
        let prompt = match unread {
            Some((kept, rest)) => {
                let mut ids = kept.ids.clone();
                // The template writes the end of the answer itself.
                ids.pop_if(|last| self.ends(Some(last)));
                ids.extend(self.reader.tokenizer.encode(rest)?);
                ids
            }
            None => self.reader.tokenizer.encode(rendered)?,
        };
        let keeps_session = generator.longest_kept();
        let mut request = Request { keeps_session, ..Request::new(prompt, self.rules.clone()) };
        generator.limits.check(&request.prompt, &request.rules)?;
        let had_session = self.kept.is_some();
        request.session = self.kept.take().and_then(|(Continued { mut session, ids }, _)| {
            if is_continued {
                return Some(session);
            }
            let tokens = shared_tokens(self.used.engine.settings(), &ids[..session.num_tokens()], &request.prompt);
            session.crop(tokens).then_some(session)
        });
        if !is_continued && had_session {
            let from = request.session.as_ref().map_or(0, Session::num_tokens);
            console::note(&format!(
                "the conversation is read again from token {from} on: the template writes earlier messages otherwise"
            ));
        }
        Ok(request)
    }
}

fn show(answer: &mut String, text: &str) -> Result<(), Fault> {
    answer.push_str(text);
    if console::speech().is_json { Ok(()) } else { console::part(text) }
}
