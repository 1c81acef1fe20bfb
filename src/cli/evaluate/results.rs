//! What came of evaluations: as JSON, as tables, as a file of losses; and how surely their figures differ from the first's over the same samples.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::targets::Split;
use crate::eval::{AnswerScores, Contribution, PairedDifference, SampleLoss, Score, ScoredAnswer, Scores};
use crate::files;
use crate::metrics::LongBenchV2;
use crate::recipe::PolicyRecipe;
use crate::report::console;
use crate::report::table::Table;
use crate::units::Fault;

const COLUMNS: [&str; 10] =
    ["evaluated", "policy", "slots", "samples of", "samples", "tokens", "targets", "loss", "perplexity", "accuracy"];

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
    pub(super) fn to_json(&self) -> Value {
        let Self { name, split, policy, slots, scores, .. } = self;
        let mut value = json!({ "evaluated": name, "split": split, "policy": policy.name, "cache_length": slots });
        if let Some(scores) = scores {
            value["scores"] = json!(scores);
        }
        let classes = self.classes();
        if !classes.is_empty() {
            let class = |(name, (sum, targets)): (&str, (f64, usize))| {
                (name.to_owned(), json!({ "targets": targets, "loss": sum / targets as f64 }))
            };
            value["by_class"] = classes.into_iter().map(class).collect();
        }
        if let Some((answers, _)) = &self.answers {
            value["answers"] = json!(answers);
        }
        if !self.differences.is_empty() {
            value["differences"] = json!(self.differences);
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

/// A row for each model and cache, and above it those of its samples by length and domain.
pub(super) fn table(results: &[Evaluated]) -> Table {
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

/// The differences between an evaluation and the `first`, by figure, where both have it of the same samples.
pub(super) fn differences(first: &Evaluated, evaluated: &Evaluated) -> BTreeMap<String, PairedDifference> {
    let firsts = contributions(first);
    let difference = |(figure, others): (String, Vec<Contribution>)| {
        let found = PairedDifference::of(firsts.get(&figure)?, &others)?;
        Some((figure, found))
    };
    contributions(evaluated).into_iter().filter_map(difference).collect()
}

fn contributions(of: &Evaluated) -> BTreeMap<String, Vec<Contribution>> {
    let mut figures: BTreeMap<String, Vec<Contribution>> = BTreeMap::new();
    let mut add = |figure: String, sample, sum, weight| {
        let all = figures.entry(figure).or_default();
        // Windows of one text are no samples of their own.
        match all.last_mut().filter(|last| last.sample == sample) {
            Some(last) => (last.sum, last.weight) = (last.sum + sum, last.weight + weight),
            None => all.push(Contribution { sample, sum, weight }),
        }
    };
    for (loss, classes) in of.losses.iter().zip(&of.class_sums) {
        add("loss".to_owned(), loss.sample, loss.loss.loss_sum, loss.loss.targets as f64);
        for (class, &(sum, targets)) in classes {
            add(format!("loss of {class}"), loss.sample, sum, targets as f64);
        }
    }
    for answer in of.answers.iter().flat_map(|(_, answers)| answers) {
        for (metric, &score) in &answer.scores {
            add(metric.clone(), answer.sample, score, 1.0);
        }
    }
    figures
}

/// A table of the differences from the first evaluation; `None` where there are none.
pub(super) fn table_of_differences(results: &[Evaluated]) -> Option<Table> {
    let first = results.first().filter(|_| results.iter().any(|result| !result.differences.is_empty()))?;
    let against = format!("less `{}`, {}, {}", first.name.display(), first.policy, first.slots);
    let mut table = Table::new(&["evaluated", "policy", "slots", "figure", &against, "95 % interval"]);
    for Evaluated { name, policy, slots, differences, .. } in results {
        for (figure, PairedDifference { difference, low, high, .. }) in differences {
            let (name, interval) = (name.display().to_string(), format!("{low:+.4} to {high:+.4}"));
            table.row(&[&name, &policy.to_string(), slots, figure, &format!("{difference:+.4}"), &interval]);
        }
    }
    Some(table)
}

/// Writes a line for each evaluation and sample.
pub(super) fn write_losses(path: &Path, results: &[Evaluated]) -> Result<(), Fault> {
    let mut lines = String::new();
    for Evaluated { name, policy, slots, losses, .. } in results {
        for SampleLoss { sample, tokens, loss, by_target, .. } in losses {
            let line = json!({
                "evaluated": name, "policy": policy.name, "cache_length": slots, "sample": sample, "tokens": tokens,
                "targets": loss.targets, "loss": loss.loss_sum / loss.targets.max(1) as f64, "correct": loss.correct, "losses": by_target,
            });
            lines += &line.to_string();
            lines.push('\n');
        }
    }
    files::write_named(path, |file| file.write_all(lines.as_bytes()))?;
    console::note(&format!("wrote the losses of {} samples to `{}`", lines.lines().count(), path.display()));
    Ok(())
}
