//! Many requests through one model: a prompt is read column by column, its texts go on token by token, side by side with others; who has
//! finished leaves, who waits enters.

use std::collections::VecDeque;
use std::rc::Rc;

use tch::{Device, Tensor};

use super::likelihood::{likelihoods, next_logits};
use super::request::{Continued, GenerationEvent, Request, RequestId};
use super::sample::{Prefill, Sample};
use super::{GenerationRules, PromptLimits, StoppedText, empty_prompt, rotates_by_length};
use crate::data::{InitialPartFinder, Tokenizer};
use crate::engine::{Engine, HiddenSink, Session, SessionSpec, Settings, decode_step, guarded};
use crate::model::{CapturedLayers, Model};
use crate::native::cuda::on_device;
use crate::units::Fault;

pub struct Generator<'a> {
    engine: &'a Engine,
    model: &'a Model,
    tokenizer: Option<&'a Tokenizer>,
    /// What a prompt must keep to.
    pub limits: PromptLimits,
    /// What finds the initial part of a prompt, for a policy that keeps it.
    initial_parts: Option<&'a InitialPartFinder>,
    /// Texts that go on at the same time.
    width: usize,
    waiting: VecDeque<Prefill>,
    running: Vec<Sample>,
    next_request: u64,
    /// What carries tokens through the model, once there are some.
    layers: Option<CapturedLayers>,
}

impl<'a> Generator<'a> {
    /// `width` texts go on at the same time.
    pub fn new(engine: &'a Engine, model: &'a Model, tokenizer: Option<&'a Tokenizer>, width: usize) -> Self {
        Self {
            engine,
            model,
            tokenizer,
            limits: PromptLimits::of(model.config(), engine.settings(), tokenizer.is_some()),
            initial_parts: None,
            width: width.max(1),
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_request: 0,
            layers: None,
        }
    }

    /// The same, for a policy that keeps the initial part of a prompt.
    pub fn finding(self, initial_parts: Option<&'a InitialPartFinder>) -> Self {
        Self { initial_parts, ..self }
    }

    fn initial_part(&self, prompt: &[u32]) -> Result<Option<(usize, usize)>, Fault> {
        let found = self.initial_parts.map(|finder| finder.of(prompt)).transpose()?;
        Ok(found.map(|range| (range.start, range.end)))
    }

    pub fn submit(&mut self, mut request: Request) -> Result<RequestId, Fault> {
        let limit = self.limits.check(&request.prompt, &request.rules)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        if request.session.as_ref().is_some_and(|session| session.num_tokens() >= request.prompt.len()) {
            return Err(empty_prompt());
        }
        if request.initial.is_none() {
            request.initial = self.initial_part(&request.prompt)?;
        }
        // One that keeps another part of the prompt is of no use.
        request.session.take_if(|session| session.spec().initial.first() != request.initial.as_ref());
        let reused = request.session.as_ref().map_or(0, Session::num_tokens);
        self.waiting.push_back(Prefill { id, request, limit, reused, likelihoods: Vec::new(), last_column: 0 });
        Ok(id)
    }

    /// Tokens of the prompt of a request that waits which a session had read before.
    pub fn num_read(&self, id: RequestId) -> usize {
        self.waiting.iter().find(|prefill| prefill.id == id).map_or(0, |prefill| prefill.reused)
    }

    /// Lets go of a request, wherever it stands.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|prefill| prefill.id != id);
        self.running.retain(|sample| sample.of.id != id);
    }

    /// Ends a text where it stands, and hands its session back.
    pub fn stop(&mut self, id: RequestId) -> Option<Continued> {
        let at = self.running.iter().position(|sample| sample.of.id == id)?;
        let Sample { session, ids, .. } = self.running.remove(at);
        self.cancel(id);
        Some(Continued { session, ids })
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Requests whose prompts have not been read, and texts that are being written.
    pub fn load(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Entries that the caches of all texts hold.
    pub fn entries(&self) -> usize {
        self.running.iter().map(|sample| sample.session.entries().0).sum()
    }

    /// Reads a column of the prompt that is next in line, if there is room, and writes a token of every text that is under way. Tells what came
    /// of it, each time of which request.
    pub fn step(&mut self) -> Vec<(RequestId, GenerationEvent)> {
        let mut events = Vec::new();
        if let Some(prefill) = self.waiting.front() {
            let fits = self.running.len() + prefill.request.samples <= self.width;
            if fits || self.running.is_empty() {
                self.read_on(&mut events);
            }
        }
        if !self.running.is_empty()
            && let Err(error) = self.write_on(&mut events)
        {
            self.fail_all(error, &mut events);
        }
        events
    }

    /// Reads on in the first prompt that waits.
    fn read_on(&mut self, events: &mut Vec<(RequestId, GenerationEvent)>) {
        let Some(mut prefill) = self.waiting.pop_front() else { return };
        let request = prefill.id;
        let read = self.border(&mut prefill, events).and_then(|()| self.read_column(&mut prefill)).and_then(|is_read| {
            if is_read {
                self.begin(prefill, events)
            } else {
                self.waiting.push_front(prefill);
                Ok(())
            }
        });
        if let Err(error) = read {
            events.push((request, GenerationEvent::Failed(error)));
        }
    }

    /// Hands out where a prompt stands, if it is wanted and about to be read to its end. Chunks that end before the last one do not depend on
    /// where the prompt ends, once all caches that evict are full.
    fn border(&self, prefill: &mut Prefill, events: &mut Vec<(RequestId, GenerationEvent)>) -> Result<(), Fault> {
        let Some(session) = prefill.request.session.as_ref().filter(|_| prefill.request.keeps_border) else { return Ok(()) };
        let (done, last) = (session.num_tokens(), prefill.request.prompt.len() - 1);
        // Prompts that begin alike differ in their ends: a chunk is left to them at least.
        let (rest, chunk) = (last.saturating_sub(done), self.engine.settings().chunk_size());
        let is_near_end = rest >= chunk && rest < chunk + prefill.last_column;
        if is_near_end && self.engine.settings().cuts_the_same_behind(done) {
            let border = Continued { session: session.fork()?, ids: prefill.request.prompt[..done].to_vec() };
            prefill.request.keeps_border = false;
            events.push((prefill.id, GenerationEvent::Border(Box::new(border))));
        }
        Ok(())
    }

    /// Reads a column of a prompt, all of which but the last token is read so; returns whether it is.
    fn read_column(&mut self, prefill: &mut Prefill) -> Result<bool, Fault> {
        let Prefill { request, limit, likelihoods: told, last_column, .. } = prefill;
        let (prompt, last) = (&request.prompt, request.prompt.len() - 1);
        request.session.take_if(|session| has_other_rotations(self.model, session, prompt.len()));
        let session = match &mut request.session {
            Some(session) => session,
            none => {
                let at_most = request.keeps_session.unwrap_or(prompt.len() + *limit);
                none.insert(self.session(prompt.len(), at_most, Some(last.max(1)), request.initial.into_iter().collect())?)
            }
        };
        let done = session.num_tokens();
        if done >= last {
            return Ok(true);
        }
        let model = self.model;
        let mut sink = request.likelihoods.prompt.map(|top| {
            move |start: usize, hidden_1ne: &Tensor| {
                let hidden_ne = hidden_1ne.squeeze_dim(0);
                let next = &prompt[start + 1..start + 1 + hidden_ne.size()[0] as usize];
                told.extend(likelihoods(model, &hidden_ne, next, top));
            }
        });
        let ids_1n = row(&prompt[done..last], model.device());
        let layers = session_layers(&mut self.layers, self.engine, model, self.width)?;
        let sink = sink.as_mut().map(|sink| sink as HiddenSink<'_>);
        let read = session.extend_by_column(self.engine, model, layers, &ids_1n, sink)?;
        *last_column = read;
        Ok(done + read == last)
    }

    /// The most tokens of a session that is kept for texts of any length; `None` where its rotations would be those of another length.
    pub fn longest_kept(&self) -> Option<usize> {
        (!self.model.config().rotates_by_length()).then_some(self.limits.longest)
    }

    pub fn settings(&self) -> &'a Settings {
        self.engine.settings()
    }

    /// A session that has read all of `ids`, to be kept: as the beginning of prompts of any length.
    pub fn read(&self, ids: &[u32]) -> Result<Session, Fault> {
        self.limits.check(ids, &GenerationRules { max_new_tokens: Some(1), ..GenerationRules::default() })?;
        let longest = self.longest_kept().ok_or_else(rotates_by_length)?;
        let mut session = self.session(ids.len(), longest, None, self.initial_part(ids)?.into_iter().collect())?;
        session.extend(self.engine, self.model, &row(ids, self.model.device()), None)?;
        Ok(session)
    }

    /// A session for a text of so many tokens and what follows, `at_most` in all. The prefill span ends with `prompt` at the latest, where
    /// the end of the prompt is known.
    fn session(
        &self,
        so_far: usize,
        at_most: usize,
        prompt: Option<usize>,
        initial: Vec<(usize, usize)>,
    ) -> Result<Session, Fault> {
        let rope_length = self.model.config().length_under_way(so_far, at_most);
        let spec = SessionSpec { prompt, rope_length, initial, keeps_log: false, ..SessionSpec::new(1, at_most) };
        Session::new(self.engine, self.model, &spec)
    }

    /// The texts of a prompt that has been read begin.
    fn begin(&mut self, mut prefill: Prefill, events: &mut Vec<(RequestId, GenerationEvent)>) -> Result<(), Fault> {
        let Some(session) = prefill.request.session.take() else { return Ok(()) };
        let likelihoods = std::mem::take(&mut prefill.likelihoods);
        let (of, tokenizer) = (Rc::new(prefill), self.tokenizer);
        let Request { prompt, rules, samples: count, .. } = &of.request;
        let sample = |index, session| {
            let text = StoppedText::new(rules.stop.clone(), tokenizer, prompt);
            Sample { of: of.clone(), index, session, ids: prompt.clone(), text }
        };
        let mut samples = Vec::with_capacity(*count);
        for index in 1..*count {
            samples.push(sample(index, session.fork()?));
        }
        samples.insert(0, sample(0, session));
        self.running.append(&mut samples);
        events.push((of.id, GenerationEvent::Prompt(likelihoods)));
        Ok(())
    }

    /// Writes a token of every text. What fails in one of them ends that request alone.
    fn write_on(&mut self, events: &mut Vec<(RequestId, GenerationEvent)>) -> Result<(), Fault> {
        self.begin_anew_where_rotations_change()?;
        let ids: Vec<u32> = self.running.iter().filter_map(|sample| sample.ids.last().copied()).collect();
        let mut sessions: Vec<&mut Session> = self.running.iter_mut().map(|sample| &mut sample.session).collect();
        let layers = session_layers(&mut self.layers, self.engine, self.model, self.width)?;
        let hidden = decode_step(self.engine, self.model, layers, &mut sessions, &ids, self.width)?;
        // Empty rows are left out behind the product, which has the same bits with them.
        let logits = || next_logits(self.model, &hidden.squeeze_dim(1)).narrow(0, 0, ids.len() as i64).to_device(Device::Cpu);
        let logits_nv = guarded(|| Ok(logits()))?;
        let (mut finished, mut failed) = (Vec::new(), Vec::new());
        for (row, sample) in self.running.iter_mut().enumerate() {
            let written = guarded(|| Ok(sample.write(&logits_nv.get(row as i64), self.tokenizer)));
            match written.flatten() {
                Ok((event, end)) => {
                    events.push((sample.of.id, event));
                    finished.extend(end.map(|reason| (row, reason)));
                }
                Err(error) => failed.push((sample.of.id, error)),
            }
        }
        for (row, reason) in finished.into_iter().rev() {
            let sample = self.running.remove(row);
            let request = sample.of.id;
            match sample.finish(self.tokenizer, reason) {
                Ok(event) => events.push((request, event)),
                Err(error) => failed.push((request, error)),
            }
        }
        // Several texts of a request may fail: it is told once.
        failed.sort_by_key(|(request, _)| *request);
        failed.dedup_by_key(|(request, _)| *request);
        for (request, error) in failed {
            self.cancel(request);
            events.push((request, GenerationEvent::Failed(error)));
        }
        Ok(())
    }

    /// Reads the texts again whose next token makes them so long that other rotations are due from their first token on.
    fn begin_anew_where_rotations_change(&mut self) -> Result<(), Fault> {
        let (engine, model) = (self.engine, self.model);
        for at in 0..self.running.len() {
            let sample = &self.running[at];
            let (tokens, session) = (sample.ids.len(), &sample.session);
            if !has_other_rotations(model, session, tokens) {
                continue;
            }
            let (prompt, initial) = ((tokens - 1).max(1), session.spec().initial.clone());
            let mut session = self.session(tokens, session.spec().max_tokens, Some(prompt), initial)?;
            session.extend(engine, model, &row(&sample.ids[..tokens - 1], model.device()), None)?;
            self.running[at].session = session;
        }
        Ok(())
    }

    fn fail_all(&mut self, error: Fault, events: &mut Vec<(RequestId, GenerationEvent)>) {
        let mut requests: Vec<RequestId> = self.running.drain(..).map(|sample| sample.of.id).collect();
        requests.dedup();
        let told = || Fault::new(error.exit(), error.to_string()).of_kind(error.kind());
        let further: Vec<Fault> = requests.iter().skip(1).map(|_| told()).collect();
        let errors = std::iter::once(error).chain(further);
        events.extend(requests.into_iter().zip(errors).map(|(request, error)| (request, GenerationEvent::Failed(error))));
    }
}

/// What carries tokens through the model, made where there is none yet.
fn session_layers<'a>(
    made: &'a mut Option<CapturedLayers>,
    engine: &Engine,
    model: &Model,
    width: usize,
) -> Result<&'a mut CapturedLayers, Fault> {
    match made {
        Some(layers) => Ok(layers),
        none => Ok(none.insert(engine.settings().session_layers(width, model.device())?)),
    }
}

/// Whether a sequence of so many tokens has other rotations, from the first token on, than a session has that is to read it.
fn has_other_rotations(model: &Model, session: &Session, tokens: usize) -> bool {
    model.config().length_under_way(tokens, session.spec().rope_length) != session.spec().rope_length
}

/// Tokens as a batch of one sequence.
fn row(ids: &[u32], device: Device) -> Tensor {
    let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
    on_device(&ids, device).unsqueeze(0)
}
