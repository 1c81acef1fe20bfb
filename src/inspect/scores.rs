//! Scores that `kvtune evaluate --format json` has printed into a file.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::files::{self, FileKind};
use crate::units::{Fault, abridged};

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct EvaluationLine {
    /// The model, checkpoint or run.
    pub evaluated: String,
    pub policy: String,
    pub cache_length: String,
    /// The split of the samples; earlier versions did not say.
    #[serde(default)]
    pub split: String,
    /// What losses came to, where they were computed.
    scores: Option<OverallScores>,
    answers: Option<AnswerMeans>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct OverallScores {
    /// A perplexity that is not finite has no number in JSON.
    overall: BTreeMap<String, Option<f64>>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct AnswerMeans {
    samples: Option<usize>,
    means: BTreeMap<String, f64>,
}

impl EvaluationLine {
    /// A figure over all samples, as `loss`, or the mean of a metric of answers.
    pub fn figure(&self, name: &str) -> Option<f64> {
        let of_losses = self.scores.as_ref().and_then(|scores| *scores.overall.get(name)?);
        of_losses.or_else(|| self.answers.as_ref()?.means.get(name).copied())
    }

    /// Means over samples, and over answers, with the number of these.
    pub fn figures(&self) -> Vec<(String, f64, Option<usize>)> {
        let of_losses = self.scores.as_ref().and_then(|scores| *scores.overall.get("samples")?).map(|samples| samples as usize);
        let of_answers = self.answers.as_ref().and_then(|answers| answers.samples);
        let losses = ["loss", "perplexity", "accuracy"].map(|name| (name, of_losses));
        let named = losses.into_iter().chain(self.metrics().map(|name| (name.as_str(), of_answers)));
        named.filter_map(|(name, samples)| Some((name.to_owned(), self.figure(name)?, samples))).collect()
    }

    pub fn metrics(&self) -> impl Iterator<Item = &String> {
        self.answers.iter().flat_map(|answers| answers.means.keys())
    }
}

pub fn read_scores(path: &Path) -> Result<Vec<EvaluationLine>, Fault> {
    let text = files::read_bytes(path, FileKind::Lines)?;
    let lines = text.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    let read = |(index, line): (usize, &[u8])| {
        serde_json::from_slice(line).map_err(|error| {
            let (place, error) = (abridged(path.display()), error.to_string());
            let why = abridged(error.split(" at line ").next().unwrap_or_default());
            let message = format!("`{place}`, line {}: not a line of `kvtune evaluate --format json`: {why}", index + 1);
            Fault::data(message, "write the file with `kvtune evaluate … --format json >FILE`")
        })
    };
    lines.map(read).collect()
}
