//! The tables of the page.

use std::collections::BTreeSet;

use super::chart::escape;
use super::{EvaluationLine, RunContents, figures_in_words};
use crate::eval::AnswerScores;
use crate::report::evicted::Evicted;
use crate::report::metrics::StepMetrics;
use crate::units::Bytes;

/// A table with a caption; the first cell of a row is its heading. Nothing where there are no rows.
pub(super) fn table(caption: &str, header: &[&str], rows: &[Vec<String>], is_numbers: bool) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let head: Vec<String> = header.iter().map(|cell| format!("<th scope=\"col\">{}</th>", escape(cell))).collect();
    let row = |cells: &Vec<String>| {
        let rest: Vec<String> = cells.iter().skip(1).map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        format!("<tr><th scope=\"row\">{}</th>{}</tr>\n", escape(cells.first().map_or("", String::as_str)), rest.concat())
    };
    let class = if is_numbers { " class=\"numbers\"" } else { "" };
    format!(
        "<div class=\"card\"><table{class}>\n<caption>{}</caption>\n<thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody>\n</table></div>\n",
        escape(caption),
        head.concat(),
        rows.iter().map(row).collect::<Vec<_>>().concat()
    )
}

pub(super) fn figures(runs: &[RunContents]) -> String {
    let setting = |run: &RunContents, key: &str| run.settings.get(key).map(|value| value.trim_matches('"').to_owned());
    let of_run = |run: &RunContents| {
        let state = Some(run.state.clone()).filter(|state| !state.is_empty());
        let settings = [("model", "model.path"), ("policy", "kv_cache.policy"), ("slots", "kv_cache.cache_length")];
        let settings = settings.map(|(name, key)| (name, setting(run, key)));
        [("state", state)].into_iter().chain(settings).chain(figures_in_words(run)).collect::<Vec<_>>()
    };
    let columns: Vec<Vec<(&str, Option<String>)>> = runs.iter().map(of_run).collect();
    let row = |index: usize| {
        let values: Vec<Option<&String>> = columns.iter().map(|column| column[index].1.as_ref()).collect();
        let cells = values.iter().map(|value| value.map_or("–".to_owned(), Clone::clone));
        values.iter().any(Option::is_some).then(|| [columns[0][index].0.to_owned()].into_iter().chain(cells).collect())
    };
    let rows: Vec<Vec<String>> = (0..columns.first().map_or(0, Vec::len)).filter_map(row).collect();
    let header: Vec<&str> = ["figure"].into_iter().chain(runs.iter().map(|run| &run.name[..])).collect();
    table("Figures of each run, by its lines of metrics and its newest checkpoint", &header, &rows, true)
}

pub(super) fn skipped(runs: &[RunContents]) -> String {
    let row = |run: &RunContents, line: &StepMetrics| Some(vec![run.name.clone(), line.step.to_string(), line.skipped.clone()?]);
    let rows: Vec<Vec<String>> = runs.iter().flat_map(|run| run.metrics.iter().filter_map(move |line| row(run, line))).collect();
    table("Steps that were left out", &["run", "step", "why"], &rows, false)
}

pub(super) fn evicted(runs: &[RunContents]) -> String {
    let mut rows = Vec::new();
    for run in runs {
        for (layer, sums) in Evicted::by_layer(&run.metrics).iter().enumerate() {
            let share = sums.share().map_or("–".to_owned(), |share| format!("{:.1}", 100.0 * share));
            let stay = sums.mean_stay().map_or("–".to_owned(), |stay| format!("{stay:.1}"));
            rows.push(vec![run.name.clone(), layer.to_string(), share, stay]);
        }
    }
    let header = ["run", "layer", "entries evicted, %", "mean stay of these, tokens"];
    table("What each layer evicted in training, over all steps; of a sliding window, what left the window", &header, &rows, true)
}

pub(super) fn differing(runs: &[RunContents]) -> String {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.settings.keys()).collect();
    let row = |key: &&String| {
        let values: Vec<Option<&String>> = runs.iter().map(|run| run.settings.get(*key)).collect();
        let is_same = values.windows(2).all(|pair| pair[0] == pair[1]);
        let cells = values.iter().map(|value| value.map_or("not set".to_owned(), Clone::clone));
        (!is_same).then(|| [(*key).clone()].into_iter().chain(cells).collect::<Vec<_>>())
    };
    let rows: Vec<Vec<String>> = keys.iter().filter_map(row).collect();
    if rows.is_empty() && runs.len() > 1 {
        return "<p>All settings of the runs are the same.</p>\n".to_owned();
    }
    let header: Vec<&str> = ["setting"].into_iter().chain(runs.iter().map(|run| &run.name[..])).collect();
    table("Settings that differ between the runs; all others are the same", &header, &rows, false)
}

/// Scores of evaluations, and means over the answers that the runs keep.
pub(super) fn evaluations(runs: &[RunContents], scores: &[EvaluationLine]) -> String {
    const LOSSES: [&str; 3] = ["loss", "perplexity", "accuracy"];
    let cell = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.4}"));
    let metrics: BTreeSet<&String> = scores.iter().flat_map(EvaluationLine::metrics).collect();
    let columns: Vec<&str> = LOSSES.into_iter().chain(metrics.iter().map(|name| name.as_str())).collect();
    let row = |line: &EvaluationLine| {
        let own = [line.evaluated.clone(), line.policy.clone(), line.cache_length.clone()];
        own.into_iter().chain(columns.iter().map(|name| cell(line.figure(name)))).collect()
    };
    let rows: Vec<Vec<String>> = scores.iter().map(row).collect();
    let header: Vec<&str> = ["evaluated", "policy", "slots"].into_iter().chain(columns.iter().copied()).collect();
    let mut out = table("Scores of evaluations, over all their samples", &header, &rows, true);
    let mut rows = Vec::new();
    for run in runs {
        for file in &run.answers {
            let found = AnswerScores::of(&file.answers);
            let means: Vec<String> = found.means.iter().map(|(name, mean)| format!("{name} {mean:.4}")).collect();
            rows.push(vec![run.name.clone(), file.name.clone(), found.samples.to_string(), means.join(", ")]);
        }
    }
    out += &table("Answers that the runs keep", &["run", "file", "answers", "means"], &rows, false);
    out
}

pub(super) fn checkpoints(runs: &[RunContents]) -> String {
    let mut rows = Vec::new();
    for run in runs {
        for own in &run.checkpoints {
            let step = own.step.map_or("–".to_owned(), |step| step.to_string());
            let newest = if run.latest.as_ref() == Some(&own.name) { "newest" } else { "" };
            let whole = own.damage.clone().unwrap_or_else(|| "whole".to_owned());
            rows.push(vec![run.name.clone(), own.name.clone(), step, Bytes(own.bytes).to_string(), whole, newest.to_owned()]);
        }
    }
    table("Checkpoints, compared with their manifests", &["run", "checkpoint", "step", "size", "state", ""], &rows, false)
}
