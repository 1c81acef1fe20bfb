//! Answers at validation: the first held-out samples, generated through the run's own cache and scored.

use serde_json::Value;

use crate::data::{Dataset, Splits, Tokenizer};
use crate::dist::ProcessGroup;
use crate::engine::Engine;
use crate::eval::{self, AnswerScores, AnswerSpec, ScoredAnswer, Scores};
use crate::generation::{GenerationRules, Generator, SamplingRules};
use crate::model::Model;
use crate::recipe::{BestMetric, Recipe};
use crate::units::Fault;

pub(super) struct Validation {
    pub(super) scores: Scores,
    /// Means over answers, where answers are generated, and the answers.
    pub(super) answers: Option<(AnswerScores, Vec<ScoredAnswer>)>,
    pub(super) is_best: bool,
}

impl Validation {
    /// The figure that checkpoints are compared by.
    pub(super) fn value(&self, figure: BestMetric) -> f64 {
        match figure {
            BestMetric::Loss => self.scores.overall.loss,
            BestMetric::Accuracy => self.scores.overall.accuracy,
            // A recipe names no metric that it does not compute.
            BestMetric::Answers(metric) => {
                self.answers.as_ref().and_then(|(means, _)| means.means.get(metric.name())).copied().unwrap_or(f64::NAN)
            }
        }
    }
}

/// The held-out samples that a recipe has answered, if it does.
fn answered(recipe: &Recipe, data: &Splits) -> Result<Option<Dataset>, Fault> {
    let Some(asked) = &recipe.eval.generate else { return Ok(None) };
    let held_out = data.validation.clone().ok_or_else(|| {
        Fault::usage(
            "`eval.generate` is set, and no samples are held out for validation",
            "set `data.validation` or `data.validation_fraction`, or leave `eval.generate` out",
        )
    })?;
    Ok(Some(held_out.first(asked.samples)))
}

/// Refuses answers at validation that a run refuses before its first step, as far as that takes no model.
pub fn check_answers(recipe: &Recipe, data: &Splits) -> Result<(), Fault> {
    let Some(samples) = answered(recipe, data)? else { return Ok(()) };
    (0..samples.len()).try_for_each(|sample| samples.question(sample).map(drop))
}

pub(super) struct ValidationAnswers {
    samples: Dataset,
    spec: AnswerSpec,
    tokenizer: Option<Tokenizer>,
}

impl ValidationAnswers {
    /// The answers that a recipe asks for, if it does; what cannot be answered is refused before anything is trained.
    pub(super) fn new(
        recipe: &Recipe,
        data: &Splits,
        tokenizer: Option<&Tokenizer>,
        engine: &Engine,
        model: &Model,
    ) -> Result<Option<Self>, Fault> {
        let Some((asked, samples)) = recipe.eval.generate.as_ref().zip(answered(recipe, data)?) else { return Ok(None) };
        let (own, _) = GenerationRules::of_model(&recipe.model.path)?;
        let sampling = SamplingRules { do_sample: false, ..own.sampling };
        let rules = GenerationRules { sampling, max_new_tokens: Some(asked.max_new_tokens), ..own };
        // As many side by side as the run's memory was planned for.
        let width = recipe.eval.micro_batch_size.unwrap_or(recipe.train.batch_size.sequences());
        let spec = AnswerSpec { rules, metrics: asked.metrics.clone(), width, settings: Value::Null };
        let answers = Self { samples, spec, tokenizer: tokenizer.cloned() };
        eval::check_answers(answers.generator(engine, model), &answers.samples, &answers.spec)?;
        Ok(Some(answers))
    }

    fn generator<'a>(&'a self, engine: &'a Engine, model: &'a Model) -> Generator<'a> {
        Generator::new(engine, model, self.tokenizer.as_ref(), self.spec.width)
    }

    /// Generates and scores them; ranks share them.
    pub(super) fn answer(
        &self,
        engine: &Engine,
        model: &Model,
        world: &ProcessGroup,
        wants_to_stop: &dyn Fn() -> bool,
    ) -> Result<(AnswerScores, Vec<ScoredAnswer>), Fault> {
        let generator = self.generator(engine, model);
        let answers = eval::answer(generator, &self.samples, &self.spec, None, world, wants_to_stop)?;
        Ok((AnswerScores::of(&answers), answers))
    }
}
