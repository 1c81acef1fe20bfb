//! Which figures of a run are drawn as curves.

use std::collections::BTreeSet;

use super::RunContents;
use super::chart::{Curve, CurveChart};
use crate::report::metrics::StepMetrics;

type FigureOfLine = dyn Fn(&StepMetrics) -> Option<f64>;

/// What is drawn of a line of metrics.
struct DrawnFigure {
    title: String,
    is_from_zero: bool,
    has_marks: bool,
    value: Box<FigureOfLine>,
}

fn drawn(title: &str, is_from_zero: bool, value: fn(&StepMetrics) -> Option<f64>) -> DrawnFigure {
    DrawnFigure { title: title.to_owned(), is_from_zero, has_marks: title.starts_with("validation"), value: Box::new(value) }
}

/// A chart for each figure with a curve for each run. Metrics of answers are drawn where there are any.
pub(super) fn charts(runs: &[RunContents]) -> Vec<CurveChart> {
    const GIB: f64 = (1u64 << 30) as f64;
    let mut figures = vec![
        drawn("training loss, nats a target", false, |line| line.loss),
        drawn("validation loss, nats a target", false, |line| line.eval_loss),
        drawn("gradient norm before clipping", true, |line| line.grad_norm),
        drawn("learning rate", true, |line| line.learning_rate),
        // The line of a first validation is no step.
        drawn("tokens a second", true, |line| line.loss.map(|_| line.tokens_per_second)),
        drawn("entries evicted, % of the step's", true, |line| line.evicted.map(|share| 100.0 * share)),
        drawn("mean stay of evicted entries, tokens", true, |line| line.mean_stay),
        drawn("peak memory of the process, GiB", true, |line| Some(line.peak_memory as f64 / GIB)),
    ];
    let metrics: BTreeSet<&String> = runs.iter().flat_map(|run| &run.metrics).flat_map(|line| line.eval_answers.keys()).collect();
    for name in metrics {
        let title = format!("validation answers: {name}");
        let name = name.clone();
        let value = Box::new(move |line: &StepMetrics| line.eval_answers.get(&name).copied());
        figures.push(DrawnFigure { title, is_from_zero: true, has_marks: true, value });
    }
    let chart = |figure: DrawnFigure| CurveChart {
        title: figure.title,
        x_name: "step".to_owned(),
        curves: runs.iter().map(|run| Curve { name: run.name.clone(), points: points(run, &figure.value) }).collect(),
        is_from_zero: figure.is_from_zero,
        has_marks: figure.has_marks,
    };
    figures.into_iter().map(chart).collect()
}

fn points(run: &RunContents, value: &FigureOfLine) -> Vec<(f64, f64)> {
    run.metrics.iter().filter_map(|line| Some((line.step as f64, value(line)?))).collect()
}
