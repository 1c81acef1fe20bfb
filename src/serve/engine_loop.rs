//! The engine's thread: it takes prompts from the queue, writes tokens, and tells who has asked.

use std::cmp::Reverse;
use std::collections::HashMap;

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{Receiver, UnboundedSender};

use super::counters::{Counters, add, set};
use super::job::PromptJob;
use crate::engine::{Session, Settings};
use crate::generation::{Continued, GenerationEvent, Generator, RequestId, shared_tokens};
use crate::native::give_free_memory_back;

struct OpenPrompt {
    index: usize,
    answers: UnboundedSender<(usize, GenerationEvent)>,
    /// Texts that have not ended.
    texts: usize,
}

pub(super) struct EngineLoop<'a> {
    generator: Generator<'a>,
    counters: &'a Counters,
    prefixes: PrefixCache,
    /// Whether a session serves a prompt that begins with what it has read, whatever it has read.
    keeps_all: bool,
    /// The most tokens of a session that is held; `None` where none is.
    longest: Option<usize>,
    open: HashMap<RequestId, OpenPrompt>,
}

impl<'a> EngineLoop<'a> {
    pub(super) fn new(generator: Generator<'a>, keep: usize, counters: &'a Counters) -> Self {
        let longest = generator.longest_kept().filter(|_| keep > 0);
        let prefixes = PrefixCache { sessions: Vec::new(), capacity: keep };
        // Entries of an answer were rounded one by one; read as a prompt, they would have been seen exact by their chunk.
        let keeps_all = generator.settings().keeps_all_exactly();
        Self { generator, counters, prefixes, keeps_all, longest, open: HashMap::new() }
    }

    /// Works until nobody can ask any more, and all is answered.
    pub(super) fn run(mut self, mut jobs: Receiver<PromptJob>) {
        let mut is_open = true;
        loop {
            while is_open && self.generator.load().0 == 0 {
                match jobs.try_recv() {
                    Ok(job) => self.begin(job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => is_open = false,
                }
            }
            if self.generator.is_idle() {
                self.show(jobs.len());
                if jobs.is_empty() {
                    // Nobody may ask for hours.
                    give_free_memory_back();
                }
                match is_open.then(|| jobs.blocking_recv()).flatten() {
                    Some(job) => self.begin(job),
                    None => return,
                }
                continue;
            }
            for (request, event) in self.generator.step() {
                self.tell(request, event);
            }
            self.let_go();
            self.show(jobs.len());
        }
    }

    fn show(&self, waiting: usize) {
        let (reading, running) = self.generator.load();
        set(&self.counters.queued, waiting + reading);
        set(&self.counters.running, running);
        set(&self.counters.entries, self.generator.entries());
        set(&self.counters.held, self.prefixes.sessions.len());
    }

    fn begin(&mut self, job: PromptJob) {
        let PromptJob { mut request, index, answers } = job;
        if answers.is_closed() {
            add(&self.counters.cancelled, 1);
            return;
        }
        // Who reads likelihoods of the prompt has it read.
        if request.likelihoods.prompt.is_none() {
            request.session = self.prefixes.find(&request.prompt, self.generator.settings());
        }
        (request.keeps_session, request.keeps_border) = (self.longest, self.longest.is_some() && !self.keeps_all);
        let (prompt_tokens, open) = (request.prompt.len(), OpenPrompt { index, answers, texts: request.samples });
        match self.generator.submit(request) {
            Ok(id) => {
                add(&self.counters.requests, 1);
                add(&self.counters.prompt_tokens, prompt_tokens);
                add(&self.counters.reused_tokens, self.generator.num_read(id));
                self.open.insert(id, open);
            }
            Err(error) => {
                add(&self.counters.refused, 1);
                let _ = open.answers.send((index, GenerationEvent::Failed(error)));
            }
        }
    }

    fn tell(&mut self, request: RequestId, mut event: GenerationEvent) {
        let Some(open) = self.open.get_mut(&request) else { return };
        if let GenerationEvent::Border(border) = event {
            return self.prefixes.hold(*border);
        }
        match &mut event {
            GenerationEvent::Prompt(_) | GenerationEvent::Border(_) => {}
            GenerationEvent::Token { .. } => add(&self.counters.new_tokens, 1),
            GenerationEvent::Finished { evicted, session, .. } => {
                add(&self.counters.finished, 1);
                add(&self.counters.evicted, *evicted);
                if let Some(continued) = session.take().filter(|_| self.keeps_all) {
                    self.prefixes.hold(*continued);
                }
                open.texts -= 1;
            }
            GenerationEvent::Failed(_) => {
                add(&self.counters.failed, 1);
                open.texts = 0;
            }
        }
        // A client that has gone is let go of below.
        let _ = open.answers.send((open.index, event));
        if open.texts == 0 {
            self.open.remove(&request);
        }
    }

    /// Lets go of the prompts of clients that have gone.
    fn let_go(&mut self) {
        let gone: Vec<RequestId> = self.open.iter().filter(|(_, open)| open.answers.is_closed()).map(|(id, _)| *id).collect();
        for request in gone {
            self.generator.cancel(request);
            self.open.remove(&request);
            add(&self.counters.cancelled, 1);
        }
    }
}

/// Sessions that wait for a prompt which begins with what they have read: those that were used last.
struct PrefixCache {
    /// Each with the tokens that it has read, and no others.
    sessions: Vec<Continued>,
    capacity: usize,
}

impl PrefixCache {
    /// A copy of the one that has read most of the beginning of a prompt, as it stood there.
    fn find(&mut self, prompt: &[u32], settings: &Settings) -> Option<Session> {
        let shared = self.sessions.iter().map(|held| shared_tokens(settings, &held.ids, prompt)).enumerate();
        let mut shared: Vec<(usize, usize)> = shared.filter(|&(_, tokens)| tokens > 0).collect();
        shared.sort_by_key(|&(at, tokens)| Reverse((tokens, at)));
        // Where a window has dropped entries, only another one may stand there.
        let (at, tokens) = shared.into_iter().find(|&(at, tokens)| self.sessions[at].session.can_crop(tokens))?;
        let mut copy = self.sessions[at].session.fork().ok()?;
        if !copy.crop(tokens) {
            return None;
        }
        // The one that was used last is the last to go.
        self.sessions[at..].rotate_left(1);
        Some(copy)
    }

    /// Holds a session, in place of one that has read the same, of an older one that has read the beginning of exactly one
    /// other's tokens, or of the one that was not used for longest.
    fn hold(&mut self, mut last: Continued) {
        last.ids.truncate(last.session.num_tokens());
        self.sessions.retain(|held| held.ids != last.ids);
        self.sessions.push(last);
        while self.sessions.len() > self.capacity {
            let goes_on =
                |held: &Continued, other: &Continued| other.ids.len() > held.ids.len() && other.ids.starts_with(&held.ids);
            let is_left = |held| self.sessions.iter().filter(|other| goes_on(held, other)).count() == 1;
            let older = &self.sessions[..self.sessions.len() - 1];
            self.sessions.remove(older.iter().position(is_left).unwrap_or(0));
        }
    }
}
