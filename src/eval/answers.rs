//! Answers to the samples of a dataset: generated side by side, scored and handed on in the samples' order.

use std::collections::{BTreeMap, VecDeque};

use serde_json::Value;

use super::{AnswerFile, ScoredAnswer};
use crate::data::{Dataset, Question};
use crate::dist::ProcessGroup;
use crate::files;
use crate::generation::{Finish, GenerationEvent, GenerationRules, Generator, Request, RequestId, WholeText};
use crate::metrics::Metric;
use crate::units::Fault;

#[derive(Clone, Debug, PartialEq)]
pub struct AnswerSpec {
    pub rules: GenerationRules,
    pub metrics: Vec<Metric>,
    /// Texts that are written at the same time.
    pub width: usize,
    /// What the answers depend on beside the sample, as a file that keeps them has it.
    pub settings: Value,
}

/// Tokens of the longest thoughts, as `LongBench` v2 has it.
const MAX_THOUGHTS: usize = 1024;

/// So many answers for each that is written at the same time does a rank make between two exchanges, or keep waiting for a longer one.
const ROUND: usize = 8;

struct Pending {
    request: RequestId,
    question: Question,
    written: WholeText,
    prompt_hash: String,
    /// What came before the answer was asked for.
    thoughts: Option<String>,
}

/// Answers all samples of `dataset` in file order. With a file, which the first rank has, those that it holds already are taken from there,
/// and the others are added as they come. The ranks of `world` share them round by round, and all return all.
pub fn answer(
    mut generator: Generator<'_>,
    dataset: &Dataset,
    spec: &AnswerSpec,
    mut file: Option<&mut AnswerFile>,
    world: &ProcessGroup,
    wants_to_stop: &dyn Fn() -> bool,
) -> Result<Vec<ScoredAnswer>, Fault> {
    let (rank, ranks) = (world.rank(), world.size());
    let mut answers = world.of_first("reading answers", || kept(dataset, spec, &mut file))?;
    let round = if ranks == 1 { dataset.len() } else { ROUND * spec.width * ranks };
    while answers.len() < dataset.len() {
        let (begin, mut made) = (answers.len(), Vec::new());
        let own = (begin + rank..dataset.len().min(begin + round)).step_by(ranks);
        let done = write(&mut generator, dataset, own, spec, wants_to_stop, &mut |answer| {
            // One rank alone keeps each as soon as those before it are done.
            let keeps = file.as_mut().filter(|_| ranks == 1);
            keeps.map_or(Ok(()), |file| file.append(&spec.settings, &answer))?;
            made.push(answer);
            Ok(())
        });
        let shares = world.agree("answering", done.map(|()| made))?;
        let mut shares: Vec<_> = shares.into_iter().map(Vec::into_iter).collect();
        for answer in (0..round).map_while(|index| shares[index % ranks].next()) {
            let keeps = file.as_mut().filter(|_| ranks > 1);
            keeps.map_or(Ok(()), |file| file.append(&spec.settings, &answer))?;
            answers.push(answer);
        }
    }
    Ok(answers)
}

/// The answers that a file holds already: those to the first samples.
fn kept(dataset: &Dataset, spec: &AnswerSpec, file: &mut Option<&mut AnswerFile>) -> Result<Vec<ScoredAnswer>, Fault> {
    let mut answers = Vec::with_capacity(dataset.len());
    let Some(file) = file else { return Ok(answers) };
    while answers.len() < dataset.len() {
        let question = dataset.question(answers.len())?;
        let Some(answer) = file.take(&spec.settings, question.sample, &prompt_hash(&question))? else { break };
        answers.push(answer);
    }
    Ok(answers)
}

/// Generates answers to some samples, and hands each on in their order.
fn write(
    generator: &mut Generator<'_>,
    dataset: &Dataset,
    samples: impl Iterator<Item = usize>,
    spec: &AnswerSpec,
    wants_to_stop: &dyn Fn() -> bool,
    hand_on: &mut dyn FnMut(ScoredAnswer) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut questions = samples.map(|sample| dataset.question(sample));
    let mut pending: VecDeque<Pending> = VecDeque::new();
    loop {
        // Some wait, so that a text that ends early leaves no gap. Those that have ended wait for a longer one before them, but not all of them:
        // what waits is lost with the process.
        while pending.len() < ROUND * spec.width
            && pending.iter().filter(|pending| pending.written.reason.is_none()).count() < 2 * spec.width
            && let Some(question) = questions.next().transpose()?
        {
            pending.push_back(submit(generator, question, spec)?);
        }
        if pending.is_empty() {
            return Ok(());
        }
        if wants_to_stop() {
            return Err(Fault::interrupted());
        }
        for (request, event) in generator.step() {
            take(request, event, &mut pending)?;
        }
        for thinking in pending.iter_mut().filter(|pending| pending.written.reason.is_some()) {
            if let Some(question) = dataset.following(&thinking.question, &thinking.written.text)? {
                let (text, hash) = (std::mem::take(&mut thinking.written.text), std::mem::take(&mut thinking.prompt_hash));
                *thinking = Pending { thoughts: Some(text), prompt_hash: hash, ..submit(generator, question, spec)? };
            }
        }
        while pending.front().is_some_and(|first| first.written.reason.is_some()) {
            let Some(done) = pending.pop_front() else { break };
            hand_on(scored(done, spec)?)?;
        }
    }
}

/// Fails where a sample of `dataset` has no question, or one that cannot be answered; nothing is generated.
pub fn check_answers(mut generator: Generator<'_>, dataset: &Dataset, spec: &AnswerSpec) -> Result<(), Fault> {
    (0..dataset.len()).try_for_each(|sample| submit(&mut generator, dataset.question(sample)?, spec).map(drop))
}

fn submit(generator: &mut Generator<'_>, question: Question, spec: &AnswerSpec) -> Result<Pending, Fault> {
    let mut rules = spec.rules.clone();
    if question.follow_up.is_some() {
        rules.max_new_tokens = Some(MAX_THOUGHTS);
    }
    let request = Request { initial: question.initial, ..Request::new(question.prompt.clone(), rules) };
    let failed = |error| unanswered(question.sample, error);
    let request = generator.submit(request).map_err(failed)?;
    let prompt_hash = prompt_hash(&question);
    Ok(Pending { request, question, written: WholeText::default(), prompt_hash, thoughts: None })
}

fn unanswered(sample: u64, error: Fault) -> Fault {
    let told = Fault::new(error.exit(), format!("sample {sample} (counted from 0) can't be answered"));
    let told = if let Some(hint) = error.hint() { told.with_hint(hint) } else { told };
    told.caused_by(error)
}

fn take(request: RequestId, event: GenerationEvent, pending: &mut VecDeque<Pending>) -> Result<(), Fault> {
    let own = pending.iter_mut().find(|pending| pending.request == request);
    match (own, event) {
        (Some(own), GenerationEvent::Failed(error)) => return Err(unanswered(own.question.sample, error)),
        (None, GenerationEvent::Failed(error)) => return Err(error),
        (Some(own), event) => {
            own.written.add(event);
        }
        (None, _) => {}
    }
    Ok(())
}

fn scored(done: Pending, spec: &AnswerSpec) -> Result<ScoredAnswer, Fault> {
    let Pending { question, written, prompt_hash, thoughts, .. } = done;
    // What of the prompt the first token has brought is no part of the answer.
    let text = written.text.strip_prefix(&question.border).unwrap_or(&written.text).to_owned();
    let mut scores = BTreeMap::new();
    for &metric in &spec.metrics {
        // What the prompt has begun belongs to the reply in which the choice is looked for.
        let reply = if metric == Metric::LongBenchV2 { format!("{}{text}", question.reply_prefix) } else { text.clone() };
        let failed = |error| {
            let (sample, why) = (question.sample, "can't be scored: its reference is not what the metric needs");
            let message = format!("the answer to sample {sample} (counted from 0) {why}");
            Fault::data(message, "leave the metric out, or choose samples that it is made for").caused_by(error)
        };
        let score = metric.score(&reply, &question.references).map_err(failed)?;
        scores.insert(metric.name().to_owned(), score);
    }
    Ok(ScoredAnswer {
        sample: question.sample,
        prompt_hash,
        thoughts,
        prediction: text,
        references: question.references,
        token_ids: written.ids,
        finish_reason: written.reason.map_or("", Finish::name).to_owned(),
        scores,
        groups: question.groups,
    })
}

fn prompt_hash(question: &Question) -> String {
    files::hash_bytes(&question.prompt.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
}
