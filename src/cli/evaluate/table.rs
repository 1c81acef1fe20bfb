//! What came of an evaluation, as JSON and as a table: a row for each model and cache, and above it those of its samples by length and domain.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::samples::Split;
use crate::eval::{AnswerScores, PairedDifference, SampleLoss, Score, ScoredAnswer, Scores};
use crate::metrics::LongBenchV2;
use crate::recipe::PolicyRecipe;
use crate::report::table::Table;

const COLUMNS: [&str; 10] =
    ["evaluated", "policy", "slots", "samples of", "samples", "tokens", "targets", "loss", "perplexity", "accuracy"];

/// What came of a model with a cache.
pub(super) struct Evaluated {
    pub(super) name: PathBuf,
    pub(super) split: Split,
    pub(super) policy: PolicyRecipe,
    pub(super) slots: String,
    pub(super) scores: Option<Scores>,
    /// Losses of the samples in the order of the data.
    pub(super) losses: Vec<SampleLoss>,
    /// For each of these, sums by class of tokens, and of how many.
    pub(super) class_sums: Vec<BTreeMap<String, (f64, usize)>>,
    pub(super) answers: Option<(AnswerScores, Vec<ScoredAnswer>)>,
    /// From the first evaluation, by figure.
    pub(super) differences: BTreeMap<String, PairedDifference>,
}

impl Evaluated {
    pub(super) fn to_json(&self) -> serde_json::Value {
        let Self { name, split, policy, slots, scores, .. } = self;
        let mut value = serde_json::json!({ "evaluated": name, "split": split, "policy": policy.name, "cache_length": slots });
        if let Some(scores) = scores {
            value["scores"] = serde_json::json!(scores);
        }
        let classes = self.classes();
        if !classes.is_empty() {
            let class = |(name, (sum, targets)): (&str, (f64, usize))| {
                (name.to_owned(), serde_json::json!({ "targets": targets, "loss": sum / targets as f64 }))
            };
            value["by_class"] = classes.into_iter().map(class).collect();
        }
        if let Some((answers, _)) = &self.answers {
            value["answers"] = serde_json::json!(answers);
        }
        if !self.differences.is_empty() {
            value["differences"] = serde_json::json!(self.differences);
        }
        value
    }

    /// Sums over all samples by class of tokens, and of how many.
    fn classes(&self) -> BTreeMap<&str, (f64, usize)> {
        let mut classes: BTreeMap<&str, (f64, usize)> = BTreeMap::new();
        for (name, (sum, targets)) in self.class_sums.iter().flatten() {
            let all = classes.entry(name).or_default();
            *all = (all.0 + sum, all.1 + targets);
        }
        classes
    }

    /// The scores that `LongBench` v2 reports, of classes or of answers.
    fn longbench_v2(&self) -> Option<&LongBenchV2> {
        let of_classes = self.scores.as_ref().and_then(|scores| scores.longbench_v2.as_ref());
        of_classes.or_else(|| self.answers.as_ref()?.0.longbench_v2.as_ref())
    }

    fn means(&self) -> impl Iterator<Item = (&String, &f64)> {
        self.answers.iter().flat_map(|(answers, _)| &answers.means)
    }
}

pub(super) fn of(results: &[Evaluated]) -> Table {
    let is_longbench = results.iter().any(|result| result.longbench_v2().is_some());
    let groups: &[&str] = if is_longbench { &LongBenchV2::COLUMNS } else { &[] };
    let metrics: BTreeSet<&String> = results.iter().flat_map(Evaluated::means).map(|(name, _)| name).collect();
    let names = metrics.iter().map(|name| name.as_str());
    let mut table = Table::new(&COLUMNS.iter().chain(groups).copied().chain(names).collect::<Vec<_>>());
    for result in results {
        let own = [result.name.display().to_string(), result.policy.to_string(), result.slots.clone()];
        let mut add = |of: String, score: Vec<String>, further: Vec<String>| {
            let mut cells: Vec<String> = own.iter().cloned().chain([of]).chain(score).collect();
            cells.resize(COLUMNS.len(), String::new());
            cells.extend(further);
            table.row(&cells);
        };
        for bucket in result.scores.iter().flat_map(|scores| &scores.by_length) {
            add(format!("≤ {} tokens", bucket.up_to), cells(&bucket.score), Vec::new());
        }
        for (name, score) in result.scores.iter().flat_map(|scores| &scores.by_set) {
            add(format!("data set {name}"), cells(score), Vec::new());
        }
        for (class, (sum, targets)) in result.classes() {
            let loss = sum / targets as f64;
            let cells = [String::new(), String::new(), targets.to_string(), format!("{loss:.4}"), format!("{:.3}", loss.exp())];
            add(format!("tokens: {class}"), cells.into(), Vec::new());
        }
        for (domain, group) in result.longbench_v2().iter().flat_map(|groups| &groups.by_domain) {
            add(domain.clone(), Vec::new(), vec![group.to_string()]);
        }
        let groups = result.longbench_v2().map(LongBenchV2::cells).into_iter().flatten();
        let mut further: Vec<String> = groups.collect();
        further.resize(if is_longbench { LongBenchV2::COLUMNS.len() } else { 0 }, String::new());
        let means: BTreeMap<&String, &f64> = result.means().collect();
        further.extend(metrics.iter().map(|name| means.get(name).map_or_else(String::new, |mean| format!("{mean:.4}"))));
        add("all".to_owned(), result.scores.as_ref().map_or_else(Vec::new, |scores| cells(&scores.overall)), further);
    }
    table
}

fn cells(score: &Score) -> Vec<String> {
    vec![
        score.samples.to_string(),
        score.tokens.to_string(),
        score.targets.to_string(),
        format!("{:.4}", score.loss),
        format!("{:.3}", score.perplexity),
        format!("{:.1} %", 100.0 * score.accuracy),
    ]
}
