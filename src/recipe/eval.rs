//! What a recipe says of validation: when and on what, which answers are generated, and which figure chooses the best checkpoint.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use toml::Value;

use super::diagnose::Checked;
use super::table::table;
use super::tree::Document;
use super::value::{COUNT, RecipeValue, Spellings};
use super::words::{forms, words};
use crate::metrics::Metric;

table! {
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct EvalRecipe in "eval" {
        /// Steps from one validation to the next.
        #[also("eval.steps", "eval.eval_steps", "train.eval_steps", "eval_steps")]
        #[rule(COUNT)]
        pub interval: u64 = 100,
        /// Validate before the first step too.
        #[also("eval.initial_validation")]
        pub initial: bool = false,
        /// Metric that selects the best checkpoint. `accuracy` needs a classification head, a metric of answers needs `eval.generate`.
        pub metric: BestMetric = BestMetric::Loss,
        /// Whether a lower (`min`) or a higher (`max`) value is better.
        #[default("by the metric")]
        pub mode: MetricMode = if metric == BestMetric::Loss { MetricMode::Min } else { MetricMode::Max },
        /// Sequences that run together in a validation.
        #[also("eval.batch_size", "eval.per_device_eval_batch_size", "eval_batch_size", "per_device_eval_batch_size")]
        #[rule(COUNT)]
        #[default("that of training")]
        pub micro_batch_size: Option<usize> = None,
        /// Largest number of batches of a validation.
        #[also("eval.max_iters")]
        #[rule(COUNT)]
        #[default("all")]
        pub max_batches: Option<usize> = None,
        /// The first held-out samples are answered, greedily and through the run's own cache, and the answers scored. Needs the head
        /// `next_token`.
        #[default("no answers")]
        pub generate: Option<GenerateRecipe> = None,
    }
}

words! {
    /// Which of two figures is the better.
    pub enum MetricMode {
        Min = "min",
        Max = "max",
    }
}

impl MetricMode {
    pub fn prefers(self, value: f64, to: f64) -> bool {
        match self {
            Self::Min => value < to,
            Self::Max => value > to,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerateRecipe {
    /// What is computed of each answer; at least one.
    pub metrics: Vec<Metric>,
    /// Number of samples that are answered: the first ones of the validation split.
    #[serde(default = "default_samples")]
    pub samples: usize,
    /// Tokens of an answer at most.
    #[serde(default = "default_new_tokens")]
    pub max_new_tokens: usize,
}

fn default_samples() -> usize {
    16
}

fn default_new_tokens() -> usize {
    64
}

impl RecipeValue for GenerateRecipe {
    fn takes(_: Option<&str>) -> String {
        format!(
            "table: `metrics`, array of [metrics](metrics.md); `samples`, integer ≥ 1 (`{}`); `max_new_tokens`, integer ≥ 1 (`{}`)",
            default_samples(),
            default_new_tokens()
        )
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        let metrics: Vec<&str> = self.metrics.iter().map(|metric| metric.name()).collect();
        let hint = "name each metric once, as `metrics = [\"exact_match\", \"f1\"]`";
        document.distinct(&format!("{key}.metrics"), &metrics, 1, hint)?;
        for (name, number) in [("samples", self.samples), ("max_new_tokens", self.max_new_tokens)] {
            COUNT.check(document, &format!("{key}.{name}"), &Value::Integer(number as i64))?;
        }
        Ok(self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BestMetric {
    Loss,
    Accuracy,
    /// Mean of a metric over generated answers.
    #[serde(untagged)]
    Answers(Metric),
}

static FIGURES: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| ["loss", "accuracy"].into_iter().chain(Metric::names().iter().copied()).collect());

impl BestMetric {
    pub fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::Accuracy => "accuracy",
            Self::Answers(metric) => metric.name(),
        }
    }
}

forms! {
    BestMetric: "a string";
    word<E> |word| match word {
        "loss" => Ok(BestMetric::Loss),
        "accuracy" => Ok(BestMetric::Accuracy),
        other => other.parse().map(BestMetric::Answers).map_err(|_| E::unknown_variant(other, &FIGURES)),
    };
}

impl RecipeValue for BestMetric {
    const WORDS: Spellings = &[("loss", &["eval_loss"])];

    fn takes(_: Option<&str>) -> String {
        "`loss`, `accuracy`, or a metric of `eval.generate`".to_owned()
    }
}
