//! `kvtune score`: metrics of a file of anybody's answers, row by row.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};

use super::values::metric;
use crate::data::{Answer, each_answer};
use crate::metrics::{Metric, after_cue};
use crate::report::console;
use crate::report::table::Table;
use crate::units::Fault;

/// Score a file of answers: exact match, F1, ROUGE, RULER's string match and others.
#[derive(Debug, Args)]
pub(super) struct ScoreAnswers {
    /// JSONL with `prediction` and `references` in each row.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Metrics, separated by commas.
    #[arg(long, value_name = "METRIC", required = true, value_delimiter = ',', hide_possible_values = true, value_parser = metric())]
    metrics: Vec<Metric>,
    /// Also score what follows this text on its line, for example `Answer:`, and keep the better score.
    #[arg(long, value_name = "TEXT")]
    answer_cue: Option<String>,
    /// Also print means by these fields of the rows.
    #[arg(long, value_name = "FIELD", value_delimiter = ',', value_parser = ["difficulty", "length", "domain"])]
    by: Vec<String>,
}

#[derive(Default)]
struct Sums {
    rows: usize,
    scores: Vec<f64>,
}

impl Sums {
    fn add(&mut self, scores: &[f64]) {
        self.rows += 1;
        self.scores.resize(scores.len(), 0.0);
        self.scores.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score);
    }

    fn means(&self) -> Vec<f64> {
        self.scores.iter().map(|sum| sum / self.rows as f64).collect()
    }
}

impl ScoreAnswers {
    pub(super) fn run(&self) -> Result<(), Fault> {
        let twice = self.metrics.iter().enumerate().find(|(at, metric)| self.metrics[..*at].contains(metric));
        if let Some((_, metric)) = twice {
            return Err(Fault::usage(format!("`--metrics` names `{metric}` twice"), "name each metric once"));
        }
        let mut overall = Sums::default();
        let mut groups: Vec<BTreeMap<String, Sums>> = self.by.iter().map(|_| BTreeMap::new()).collect();
        each_answer(&self.file, |mut answer| {
            let scores = self.score(&answer)?;
            for (field, groups) in self.by.iter().zip(&mut groups) {
                groups.entry(answer.text(field)?).or_default().add(&scores);
            }
            if console::speech().is_json {
                console::result(&json!({ "row": overall.rows, "scores": self.named(&scores) }).to_string())?;
            }
            overall.add(&scores);
            Ok(())
        })?;
        if console::speech().is_json { self.print_json(&overall, &groups) } else { self.print_table(&overall, &groups) }
    }

    fn score(&self, answer: &Answer<'_>) -> Result<Vec<f64>, Fault> {
        let of = |metric: &Metric, text: &str| {
            metric.score(text, &answer.references).map_err(|error| answer.bad_references(error.expected, error.found))
        };
        let parsed = self.answer_cue.as_deref().map(|cue| after_cue(&answer.prediction, cue));
        let mut scores = Vec::with_capacity(self.metrics.len());
        for metric in &self.metrics {
            let whole = of(metric, &answer.prediction)?;
            scores.push(parsed.map_or(Ok(whole), |text| of(metric, text).map(|score| score.max(whole)))?);
        }
        Ok(scores)
    }

    fn named(&self, scores: &[f64]) -> Map<String, Value> {
        self.metrics.iter().map(ToString::to_string).zip(scores.iter().map(|score| json!(score))).collect()
    }

    fn print_json(&self, overall: &Sums, groups: &[BTreeMap<String, Sums>]) -> Result<(), Fault> {
        let of = |sums: &Sums| json!({ "rows": sums.rows, "means": self.named(&sums.means()) });
        let mut summary = of(overall);
        for (field, groups) in self.by.iter().zip(groups) {
            summary["by"][field] = groups.iter().map(|(name, sums)| (name.clone(), of(sums))).collect();
        }
        console::result(&summary.to_string())
    }

    fn print_table(&self, overall: &Sums, groups: &[BTreeMap<String, Sums>]) -> Result<(), Fault> {
        let names = self.metrics.iter().map(|metric| metric.name());
        let mut table = Table::new(&["rows of", "rows"].into_iter().chain(names).collect::<Vec<_>>());
        let mut add = |name: &str, sums: &Sums| {
            let means = sums.means().into_iter().map(|mean| format!("{mean:.4}"));
            table.row(&[name.to_owned(), sums.rows.to_string()].into_iter().chain(means).collect::<Vec<_>>());
        };
        for (field, groups) in self.by.iter().zip(groups) {
            for (name, sums) in groups {
                add(&format!("{field} {name}"), sums);
            }
        }
        add("all", overall);
        console::table(&table)
    }
}
