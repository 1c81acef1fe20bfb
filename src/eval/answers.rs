//! Answers to the samples of a dataset: generated side by side, scored and handed on in the samples' order.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{AnswerFile, EvalError};
use crate::data::{Dataset, Question, SampleGroups};
use crate::files;
use crate::generation::{Finish, GenerationEvent, GenerationRules, Generator, Request, RequestId};
use crate::metrics::{LongBenchV2, Metric};

/// How answers are generated and scored.
#[derive(Clone, Debug, PartialEq)]
pub struct AnswerSpec {
    /// How a text is generated.
    pub rules: GenerationRules,
    /// What is computed of it.
    pub metrics: Vec<Metric>,
    /// Texts that are written at the same time.
    pub width: usize,
}

/// An answer with its scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoredAnswer {
    /// Index of the sample in its file, counted from 0.
    pub sample: u64,
    /// Of the prompt's token ids.
    pub prompt_hash: String,
    /// What was generated.
    pub prediction: String,
    /// What might have been.
    pub references: Vec<String>,
    /// The generated tokens.
    pub token_ids: Vec<u32>,
    /// Why the text ended, as other programs write it.
    pub finish_reason: String,
    /// By metric, from 0 to 1.
    pub scores: BTreeMap<String, f64>,
    /// What the sample is reported under.
    #[serde(flatten)]
    pub groups: Option<SampleGroups>,
}

/// Means over answers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AnswerScores {
    /// Samples.
    pub samples: usize,
    /// By metric, from 0 to 1.
    pub means: BTreeMap<String, f64>,
    /// As `LongBench` v2 reports, where its metric is asked for and the data say what samples are reported under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longbench_v2: Option<LongBenchV2>,
}

impl AnswerScores {
    /// Of some answers with the same metrics.
    pub fn of(answers: &[ScoredAnswer]) -> Self {
        let mut means = BTreeMap::new();
        for (name, score) in answers.iter().flat_map(|answer| &answer.scores) {
            *means.entry(name.clone()).or_insert(0.0) += score;
        }
        means.values_mut().for_each(|sum| *sum /= answers.len() as f64);
        let mut longbench_v2 = None;
        for answer in answers {
            if let (Some(groups), Some(&credit)) = (&answer.groups, answer.scores.get(Metric::LongBenchV2.name())) {
                longbench_v2.get_or_insert_with(LongBenchV2::default).add_credit(groups.by(), credit);
            }
        }
        Self { samples: answers.len(), means, longbench_v2 }
    }
}

/// A question whose answer is being written.
struct Pending {
    request: RequestId,
    question: Question,
    ids: Vec<u32>,
    text: String,
    finish: Option<Finish>,
}

/// Answers all samples of `dataset` in file order. With a file, those that it holds already are taken from there, and the others are added
/// as they come; `settings` is what they depend on beside the sample.
pub fn answer(
    mut generator: Generator<'_>,
    dataset: &Dataset,
    spec: &AnswerSpec,
    mut file: Option<(&mut AnswerFile, &serde_json::Value)>,
) -> Result<Vec<ScoredAnswer>, EvalError> {
    let mut answers = Vec::with_capacity(dataset.len());
    let mut questions = (0..dataset.len()).map(|sample| dataset.question(sample)).peekable();
    if let Some((file, settings)) = &mut file {
        while let Some(Ok(question)) = questions.peek() {
            let Some(answer) = file.take(settings, (question.sample, &prompt_hash(question)))? else { break };
            answers.push(answer);
            questions.next();
        }
    }
    let mut pending: VecDeque<Pending> = VecDeque::new();
    loop {
        // Some wait, so that a text that ends early leaves no gap.
        while pending.len() < 2 * spec.width
            && let Some(question) = questions.next().transpose()?
        {
            pending.push_back(submit(&mut generator, question, spec)?);
        }
        if pending.is_empty() {
            return Ok(answers);
        }
        for event in generator.step() {
            take(event, &mut pending)?;
        }
        while pending.front().is_some_and(|first| first.finish.is_some()) {
            let Some(done) = pending.pop_front() else { break };
            let answer = scored(done, spec)?;
            if let Some((file, settings)) = &mut file {
                file.append(settings, &answer)?;
            }
            answers.push(answer);
        }
    }
}

fn submit(generator: &mut Generator<'_>, question: Question, spec: &AnswerSpec) -> Result<Pending, EvalError> {
    let request = Request { initial: question.initial, ..Request::new(question.prompt.clone(), spec.rules.clone()) };
    let failed = |source| EvalError::Answer { sample: question.sample, source };
    let request = generator.submit(request).map_err(failed)?;
    Ok(Pending { request, question, ids: Vec::new(), text: String::new(), finish: None })
}

fn take(event: GenerationEvent, pending: &mut VecDeque<Pending>) -> Result<(), EvalError> {
    let of = |id: RequestId| move |pending: &&mut Pending| pending.request == id;
    match event {
        GenerationEvent::Prompt { .. } => {}
        GenerationEvent::Token { request, id, text, .. } => {
            if let Some(own) = pending.iter_mut().find(of(request)) {
                own.ids.push(id);
                own.text.push_str(&text);
            }
        }
        GenerationEvent::Finished { request, text, reason, .. } => {
            if let Some(own) = pending.iter_mut().find(of(request)) {
                own.text.push_str(&text);
                own.finish = Some(reason);
            }
        }
        GenerationEvent::Failed { request, error } => {
            let sample = pending.iter_mut().find(of(request)).map_or(0, |own| own.question.sample);
            return Err(EvalError::Answer { sample, source: error });
        }
    }
    Ok(())
}

fn scored(done: Pending, spec: &AnswerSpec) -> Result<ScoredAnswer, EvalError> {
    let Pending { question, ids, text, finish, .. } = done;
    let mut scores = BTreeMap::new();
    for &metric in &spec.metrics {
        // What the prompt has begun belongs to the reply in which the choice is looked for.
        let reply = if metric == Metric::LongBenchV2 { format!("{}{text}", question.opening) } else { text.clone() };
        let failed = |source| EvalError::Reference { sample: question.sample, source };
        let score = metric.score(&reply, &question.references).map_err(failed)?;
        scores.insert(metric.name().to_owned(), score);
    }
    Ok(ScoredAnswer {
        sample: question.sample,
        prompt_hash: prompt_hash(&question),
        prediction: text,
        references: question.references,
        token_ids: ids,
        finish_reason: finish.map_or("", Finish::name).to_owned(),
        scores,
        groups: question.groups,
    })
}

fn prompt_hash(question: &Question) -> String {
    files::hash_bytes(&question.prompt.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())
}
