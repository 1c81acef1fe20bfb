//! What came of an evaluation, as JSON and as a table: a row for each model and cache, and above it those of its samples by length and domain.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::eval::{AnswerScores, Score, Scores};
use crate::metrics::LongBenchV2;
use crate::report::table::Table;

const COLUMNS: [&str; 10] =
    ["evaluated", "policy", "slots", "samples of", "samples", "tokens", "targets", "loss", "perplexity", "accuracy"];

/// What came of a model with a cache.
pub(super) struct Evaluated {
    pub(super) name: PathBuf,
    pub(super) split: &'static str,
    pub(super) policy: String,
    pub(super) slots: String,
    pub(super) scores: Scores,
    pub(super) answers: Option<AnswerScores>,
}

impl Evaluated {
    pub(super) fn to_json(&self) -> serde_json::Value {
        let Self { name, split, policy, slots, scores, answers } = self;
        let mut value = serde_json::json!({
            "evaluated": name, "split": split, "policy": policy, "cache_length": slots, "scores": scores
        });
        if let Some(answers) = answers {
            value["answers"] = serde_json::json!(answers);
        }
        value
    }

    /// The scores that `LongBench` v2 reports, of classes or of answers.
    fn longbench_v2(&self) -> Option<&LongBenchV2> {
        self.scores.longbench_v2.as_ref().or_else(|| self.answers.as_ref()?.longbench_v2.as_ref())
    }

    fn means(&self) -> impl Iterator<Item = (&String, &f64)> {
        self.answers.iter().flat_map(|answers| &answers.means)
    }
}

/// A table of all that was evaluated.
pub(super) fn of(results: &[Evaluated]) -> Table {
    let is_longbench = results.iter().any(|result| result.longbench_v2().is_some());
    let groups: &[&str] = if is_longbench { &LongBenchV2::COLUMNS } else { &[] };
    let metrics: BTreeSet<&String> = results.iter().flat_map(Evaluated::means).map(|(name, _)| name).collect();
    let names = metrics.iter().map(|name| name.as_str());
    let mut table = Table::new(&COLUMNS.iter().chain(groups).copied().chain(names).collect::<Vec<_>>());
    for result in results {
        let own = [result.name.display().to_string(), result.policy.clone(), result.slots.clone()];
        let mut add = |of: String, score: Option<&Score>, further: Vec<String>| {
            let mut cells: Vec<String> = own.iter().cloned().chain([of]).chain(score.map_or_else(Vec::new, cells)).collect();
            cells.resize(COLUMNS.len(), String::new());
            cells.extend(further);
            table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
        };
        for bucket in &result.scores.by_length {
            add(format!("≤ {} tokens", bucket.up_to), Some(&bucket.score), Vec::new());
        }
        for (name, score) in &result.scores.by_set {
            add(format!("data set {name}"), Some(score), Vec::new());
        }
        for (domain, group) in result.longbench_v2().iter().flat_map(|groups| &groups.by_domain) {
            add(domain.clone(), None, vec![group.to_string()]);
        }
        let groups = result.longbench_v2().map(LongBenchV2::cells).into_iter().flatten();
        let mut further: Vec<String> = groups.collect();
        further.resize(if is_longbench { LongBenchV2::COLUMNS.len() } else { 0 }, String::new());
        let means: BTreeMap<&String, &f64> = result.means().collect();
        further.extend(metrics.iter().map(|name| means.get(name).map_or_else(String::new, |mean| format!("{mean:.4}"))));
        add("all".to_owned(), Some(&result.scores.overall), further);
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
