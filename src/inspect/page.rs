//! One page about one or several runs: HTML without scripts that needs nothing outside of itself.

use std::collections::BTreeSet;

use super::chart::{ColourMap, Curve, CurveChart, escape, legend_mark};
use super::page_tables::{checkpoints, differing, evaluations, evicted, figures, skipped};
use super::{EvaluationLine, RunContents};
use crate::eval::ScoredAnswer;
use crate::report::metrics::StepMetrics;

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
