//! Which figures of a run are drawn as curves.

use std::collections::BTreeSet;

use super::RunContents;
use super::chart::{Curve, CurveChart};
use crate::report::metrics::StepMetrics;

/// A chart for each figure with a curve for each run. Metrics of answers are drawn where there are any.
pub(super) fn charts(runs: &[RunContents]) -> Vec<CurveChart> {
    const GIB: f64 = (1u64 << 30) as f64;
    let chart = |title: &str, is_from_zero: bool, value: &dyn Fn(&StepMetrics) -> Option<f64>| {
        let points = |run: &RunContents| {
            let points = run.metrics.iter().filter_map(|line| Some((line.step as f64, value(line)?)));
            points.collect()
        };
        CurveChart {
            title: title.to_owned(),
            curves: runs.iter().map(|run| Curve { name: run.name.clone(), points: points(run) }).collect(),
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
