//! One page about one or several runs: HTML without scripts that needs nothing outside of itself.

use std::collections::BTreeSet;

use super::chart::{ColourMap, Curve, CurveChart, escape, legend_mark};
use super::{EvaluationLine, RunContents, figures_in_words};
use crate::eval::{AnswerScores, ScoredAnswer};
use crate::report::metrics::{Evicted, StepMetrics};
use crate::units::Bytes;

/// So many answers of a file are shown.
const SHOWN_ANSWERS: usize = 8;
/// And so many characters of each text.
const SHOWN_CHARACTERS: usize = 4000;

/// The page. Every text in it that comes from a file is escaped.
pub fn report_page(runs: &[RunContents], scores: &[EvaluationLine], maps: &[ColourMap]) -> String {
    let title = if let [run] = runs { format!("Run {}", run.name) } else { format!("{} runs compared", runs.len()) };
    let mut body: Vec<String> = Vec::new();
    let mut sections: Vec<(&str, &str)> = Vec::new();
    let mut add = |id: &'static str, heading: &'static str, content: String| {
        if !content.is_empty() {
            body.push(format!(
                "<section id=\"{id}\" aria-labelledby=\"{id}-heading\">\n<h2 id=\"{id}-heading\">{heading}</h2>\n{content}</section>\n"
            ));
            sections.push((id, heading));
        }
    };
    add("figures", "How it went", figures(runs) + &skipped(runs));
    add("differences", "What differs", differing(runs));
    add("curves", "Curves", charts(runs));
    add("evicted", "What was evicted", evicted(runs));
    add("scores", "Scores", evaluations(runs, scores));
    add("answers", "Answers", samples(runs));
    let map =
        |(index, map): (usize, &ColourMap)| format!("<div class=\"card map\">{}</div>\n", map.to_svg(&format!("map{index}")));
    add("evictions", "What the caches kept", maps.iter().enumerate().map(map).collect());
    add("checkpoints", "Checkpoints", checkpoints(runs));
    add("recipes", if runs.len() == 1 { "Recipe" } else { "Recipes" }, recipes(runs));
    let links: Vec<String> = sections.iter().map(|(id, heading)| format!("<a href=\"#{id}\">{heading}</a>\n")).collect();
    let paths: Vec<String> = runs.iter().map(|run| run.path.display().to_string()).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{style}</style>\n</head>\n<body>\n<main>\n<header>\n<h1>{title}</h1>\n\
         <p class=\"about\">{about}</p>\n<nav aria-label=\"Sections\">\n{links}</nav>\n</header>\n{body}</main>\n</body>\n</html>\n",
        title = escape(&title),
        links = links.concat(),
        body = body.concat(),
        style = include_str!("page.css"),
        about = escape(&format!("kvtune {}: {}", env!("CARGO_PKG_VERSION"), paths.join(", "))),
    )
}

fn charts(runs: &[RunContents]) -> String {
    let entry = |(index, run): (usize, &RunContents)| format!("<li>{}{}</li>\n", legend_mark(index), escape(&run.name));
    let entries: String = runs.iter().enumerate().map(entry).collect();
    let legend = if runs.len() > 1 { format!("<ul class=\"legend\">\n{entries}</ul>\n") } else { String::new() };
    let chart =
        |(index, chart): (usize, &CurveChart)| format!("<div class=\"card\">{}</div>\n", chart.to_svg(&format!("curve{index}")));
    let charts: String = curves(runs).iter().enumerate().map(chart).collect();
    format!("{legend}<div class=\"charts\">\n{charts}</div>\n")
}

/// A chart for each figure with a curve for each run. Metrics of answers are drawn where there are any.
fn curves(runs: &[RunContents]) -> Vec<CurveChart> {
    const GIB: f64 = (1u64 << 30) as f64;
    let chart = |title: &str, is_from_zero: bool, value: &dyn Fn(&StepMetrics) -> Option<f64>| {
        let points = |line: &StepMetrics| Some((line.step as f64, value(line)?));
        let curve = |run: &RunContents| Curve { name: run.name.clone(), points: run.metrics.iter().filter_map(points).collect() };
        CurveChart {
            title: title.to_owned(),
            curves: runs.iter().map(curve).collect(),
            is_from_zero,
            has_marks: title.starts_with("validation"),
        }
    };
    let mut charts = vec![
        chart("training loss, nats a target", false, &|line| line.loss),
        chart("validation loss, nats a target", false, &|line| line.eval_loss),
        chart("gradient norm before clipping", true, &|line| line.grad_norm),
        chart("learning rate", true, &|line| line.learning_rate),
        // The line of a first validation is no step.
        chart("tokens a second", true, &|line| line.loss.map(|_| line.tokens_per_second)),
        chart("entries evicted, % of the step's", true, &|line| line.evicted.map(|share| 100.0 * share)),
        chart("mean stay of evicted entries, tokens", true, &|line| line.mean_stay),
        chart("peak memory of the process, GiB", true, &|line| Some(line.peak_memory as f64 / GIB)),
    ];
    let metrics: BTreeSet<&String> = runs.iter().flat_map(|run| &run.metrics).flat_map(|line| line.eval_answers.keys()).collect();
    let of_answers =
        |name: &String| chart(&format!("validation answers: {name}"), true, &|line| line.eval_answers.get(name).copied());
    charts.extend(metrics.into_iter().map(of_answers));
    charts
}

fn samples(runs: &[RunContents]) -> String {
    let mut out: Vec<String> = Vec::new();
    for run in runs {
        for file in &run.answers {
            let heading = if runs.len() > 1 { format!("{}: {}", run.name, file.name) } else { file.name.clone() };
            out.push(format!("<h3>{}</h3>\n", escape(&heading)));
            let (shown, all) = (file.answers.len().min(SHOWN_ANSWERS), file.answers.len());
            if shown < all {
                out.push(format!("<p class=\"muted-text\">The first {shown} of {all} answers.</p>\n"));
            }
            out.extend(file.answers[..shown].iter().map(sample));
        }
    }
    out.concat()
}

fn sample(answer: &ScoredAnswer) -> String {
    let scores: Vec<String> = answer.scores.iter().map(|(name, score)| format!("{name} {score:.3}")).collect();
    let row = |name: &str, text: &str| format!("<dt>{name}</dt><dd><pre>{}</pre></dd>\n", escape(&cut(text)));
    let references: String = answer.references.iter().map(|text| row("expected", text)).collect();
    format!(
        "<article class=\"card sample\">\n<h4>Sample {} <span class=\"muted-text\">{}</span></h4>\n<dl>\n{}{references}</dl>\n</article>\n",
        answer.sample,
        escape(&scores.join(" · ")),
        row("answer", &answer.prediction)
    )
}

/// The beginning of a long text, and how long it is. What is white is spelled out.
fn cut(text: &str) -> String {
    if text.trim().is_empty() {
        return format!("{text:?}");
    }
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{} … ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}

fn recipes(runs: &[RunContents]) -> String {
    let one = |run: &RunContents| {
        let heading = if runs.len() > 1 { format!("<h3>{}</h3>\n", escape(&run.name)) } else { String::new() };
        if run.recipe.is_empty() {
            return format!("{heading}<p>No recipe lies beside it.</p>\n");
        }
        format!("{heading}<div class=\"card\"><pre>{}</pre></div>\n", escape(&run.recipe))
    };
    runs.iter().map(one).collect()
}

/// A table with a caption; the first cell of a row is its heading. Nothing where there are no rows.
fn table(caption: &str, header: &[&str], rows: &[Vec<String>], is_numbers: bool) -> String {
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

fn figures(runs: &[RunContents]) -> String {
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

fn skipped(runs: &[RunContents]) -> String {
    let row = |run: &RunContents, line: &StepMetrics| Some(vec![run.name.clone(), line.step.to_string(), line.skipped.clone()?]);
    let rows: Vec<Vec<String>> = runs.iter().flat_map(|run| run.metrics.iter().filter_map(move |line| row(run, line))).collect();
    table("Steps that were left out", &["run", "step", "why"], &rows, false)
}

fn evicted(runs: &[RunContents]) -> String {
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

fn differing(runs: &[RunContents]) -> String {
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
fn evaluations(runs: &[RunContents], scores: &[EvaluationLine]) -> String {
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

fn checkpoints(runs: &[RunContents]) -> String {
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
