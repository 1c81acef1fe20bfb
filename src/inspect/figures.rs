//! How a run went, in a few numbers.

use serde::Serialize;

use super::RunContents;
use crate::checkpoint::{Best, SampleCounts};
use crate::report::metrics::{Evicted, StepMetrics};
use crate::units::{Bytes, Seconds};

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurveEnds {
    /// The first value that is finite.
    pub first: f64,
    pub last: f64,
    pub lowest: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunFigures {
    /// Steps with a line of metrics.
    pub steps: u64,
    pub tokens: u64,
    /// Time of the steps, validation apart.
    pub seconds: f64,
    /// Tokens by time, over all steps.
    pub tokens_per_second: Option<f64>,
    /// Training loss, nats per target.
    pub loss: Option<CurveEnds>,
    pub eval_loss: Option<CurveEnds>,
    /// The best validation, as the newest checkpoint knows it.
    pub best: Option<Best>,
    /// Share of the entries that left by the policy, 0 to 1.
    pub evicted: Option<f64>,
    /// Tokens that came before such an entry left, on average.
    pub mean_stay: Option<f64>,
    /// The largest resident size, in bytes.
    pub peak_memory: Option<u64>,
    pub samples: Option<SampleCounts>,
    pub trained: Option<i64>,
    /// Steps whose loss or gradient is not finite.
    pub not_finite: usize,
    pub skipped: usize,
}

impl RunFigures {
    pub fn of(contents: &RunContents) -> Self {
        let lines = &contents.metrics;
        let seconds: f64 = lines.iter().map(|line| line.seconds).sum();
        let tokens = lines.last().map_or(0, |line| line.total_tokens);
        let state = contents.checkpoints.iter().rev().find_map(|checkpoint| checkpoint.state.as_ref());
        let evicted = Evicted::over(lines);
        let is_odd = |line: &&StepMetrics| [line.loss, line.grad_norm].into_iter().flatten().any(|value| !value.is_finite());
        Self {
            steps: lines.last().map_or(0, |line| line.step),
            tokens,
            seconds,
            tokens_per_second: (seconds > 0.0).then(|| tokens as f64 / seconds),
            loss: ends(lines.iter().filter_map(|line| line.loss)),
            eval_loss: ends(lines.iter().filter_map(|line| line.eval_loss)),
            best: state.and_then(|state| state.best.clone()),
            evicted: evicted.share(),
            mean_stay: evicted.mean_stay(),
            peak_memory: lines.iter().map(|line| line.peak_memory).max(),
            samples: state.and_then(|state| state.samples),
            trained: state.map(|state| state.parameters.iter().map(|info| info.shape.iter().product::<i64>()).sum()),
            not_finite: lines.iter().filter(is_odd).count(),
            skipped: lines.iter().filter(|line| line.skipped.is_some()).count(),
        }
    }
}

/// The figures of a run in words, each with its name; `None` where nothing is known, or nothing is to be said.
pub fn figures_in_words(contents: &RunContents) -> [(&'static str, Option<String>); 13] {
    let figures = RunFigures::of(contents);
    let of_curve =
        |ends: Option<CurveEnds>| ends.map(|ends| format!("{:.4} → {:.4}, lowest {:.4}", ends.first, ends.last, ends.lowest));
    let if_any = |count: usize| (count > 0).then(|| count.to_string());
    [
        ("steps", Some(figures.steps.to_string())),
        ("tokens", Some(figures.tokens.to_string())),
        ("samples", figures.samples.map(|s| format!("{} for training, {} for validation", s.train, s.validation))),
        ("trained parameters", figures.trained.map(|trained| trained.to_string())),
        ("training loss", of_curve(figures.loss)),
        ("validation loss", of_curve(figures.eval_loss)),
        ("best validation", figures.best.map(|best| format!("{} {:.4}, step {}", best.metric, best.value, best.step))),
        ("steps that are not finite", if_any(figures.not_finite)),
        ("steps left out", if_any(figures.skipped)),
        ("time of the steps", Some(Seconds(figures.seconds).to_string())),
        ("tokens a second", figures.tokens_per_second.map(|rate| format!("{rate:.0}"))),
        ("entries evicted", Evicted::over(&contents.metrics).words()),
        ("peak memory", figures.peak_memory.map(|bytes| Bytes(bytes).to_string())),
    ]
}

fn ends(values: impl Iterator<Item = f64>) -> Option<CurveEnds> {
    values.filter(|value| value.is_finite()).fold(None, |ends, value| {
        let CurveEnds { first, lowest, .. } = ends.unwrap_or(CurveEnds { first: value, last: value, lowest: value });
        Some(CurveEnds { first, last: value, lowest: lowest.min(value) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_those_of_finite_values() {
        let found = ends([f64::NAN, 3.0, 1.0, 2.0, f64::INFINITY].into_iter());
        assert_eq!(found, Some(CurveEnds { first: 3.0, last: 2.0, lowest: 1.0 }));
        assert_eq!(ends([f64::NAN].into_iter()), None);
    }
}
