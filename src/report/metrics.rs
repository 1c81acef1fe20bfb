//! `metrics.jsonl`: one line per step, appended and flushed; the source of truth for curves.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use super::ReportError;
use crate::files::{self, FileKind, failpoint};

/// One line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Optimiser steps made so far; 0 for the validation before the first.
    pub step: u64,
    /// Epoch of the step, from 0.
    pub epoch: u64,
    /// Mean loss, nats per target.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// The routers' load-balance loss, before its weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
    /// Share of targets with the largest score.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Norm of the gradient before clipping.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Learning rate of the update.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Tokens of the step.
    pub tokens: u64,
    /// Targets of the step.
    pub targets: u64,
    /// Tokens of the run so far.
    pub total_tokens: u64,
    /// Validation loss.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    /// Validation accuracy.
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// Means over the answers of a validation, by metric.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub eval_answers: BTreeMap<String, f64>,
    /// Hash of what the caches evicted in the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_log: Option<String>,
    /// Why the step was left out, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Duration of the step, validation apart.
    pub seconds: f64,
    /// Tokens per second of the step.
    pub tokens_per_second: f64,
    /// Peak memory of the process so far, bytes.
    pub peak_memory: u64,
}

/// JSON has no number for what is not finite, and says `null`: such a figure is there.
fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Some(Option::deserialize(from)?.unwrap_or(f64::NAN)))
}

/// The file, open for appending.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// Opens the metrics of a run that goes on after `step`: later lines, and a last one that was cut short, are removed. Returns
    /// the lines that stay as well.
    pub fn open_after(path: &Path, step: Option<u64>) -> Result<(Self, Vec<StepMetrics>), ReportError> {
        let kept = match (step, path.exists()) {
            (Some(step), true) => lines_up_to(path, step)?.0,
            _ => Vec::new(),
        };
        let text = kept.iter().flat_map(|(line, _)| [line.as_str(), "\n"]).collect::<String>();
        files::write_atomic(path, text.as_bytes())?;
        let failed = |source| ReportError::Io { action: "open", path: path.to_owned(), source };
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        Ok((Self { path: path.to_owned(), file }, kept.into_iter().map(|(_, metrics)| metrics).collect()))
    }

    /// Appends one line and makes it durable: the checkpoint of its step may be the next thing on disk.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), ReportError> {
        let failed = |source| ReportError::Io { action: "write", path: self.path.clone(), source };
        let mut line = serde_json::to_string(metrics).map_err(|e| failed(e.into()))?;
        line.push('\n');
        let (half, rest) = line.as_bytes().split_at(line.len() / 2);
        let mut write = || {
            self.file.write_all(half)?;
            failpoint::pass("metrics.append")?;
            self.file.write_all(rest)?;
            self.file.sync_data()
        };
        write().map_err(failed)
    }
}

/// The file's name in a run.
pub const METRICS: &str = "metrics.jsonl";

/// The lines of a run up to `step`; none where there is no file.
pub fn read(path: &Path, step: u64) -> Result<Vec<StepMetrics>, ReportError> {
    Ok(read_all(path)?.0.into_iter().filter(|metrics| metrics.step <= step).collect())
}

/// All lines of a run, and whether the last one was cut short; none where there is no file.
pub fn read_all(path: &Path) -> Result<(Vec<StepMetrics>, bool), ReportError> {
    let (lines, is_cut) = if path.exists() { lines_up_to(path, u64::MAX)? } else { (Vec::new(), false) };
    Ok((lines.into_iter().map(|(_, metrics)| metrics).collect(), is_cut))
}

/// The lines of steps up to `step`. A broken line is forgiven at the end only, and told: there a crash may have cut it.
fn lines_up_to(path: &Path, step: u64) -> Result<(Vec<(String, StepMetrics)>, bool), ReportError> {
    // Bytes: what a power cut leaves at the end need not be text.
    let bytes = files::read_bytes(path, FileKind::Lines)?;
    let lines: Vec<&[u8]> = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).collect();
    let (mut kept, mut is_cut) = (Vec::new(), false);
    for (index, line) in lines.iter().enumerate() {
        match serde_json::from_slice::<StepMetrics>(line) {
            Ok(metrics) if metrics.step <= step => kept.push((String::from_utf8_lossy(line).into_owned(), metrics)),
            Ok(_) => {}
            Err(_) if index + 1 == lines.len() => is_cut = true,
            Err(_) => return Err(ReportError::BrokenLine { path: path.to_owned(), line: index + 1 }),
        }
    }
    Ok((kept, is_cut))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_resume_no_step_stands_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut metrics = Metrics::open_after(&path, None).unwrap().0;
        for step in 1..=5 {
            metrics.append(&StepMetrics { step, loss: Some(0.1 * step as f64), ..StepMetrics::default() }).unwrap();
        }
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":6,\"lo\xff\0").unwrap();
        let kept = Metrics::open_after(&path, Some(3)).unwrap().1;
        assert_eq!(kept.iter().map(|m| m.step).collect::<Vec<_>>(), [1, 2, 3]);
        let steps: Vec<u64> = std::fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str::<StepMetrics>(l).unwrap().step)
            .collect();
        assert_eq!(steps, [1, 2, 3]);
    }

    #[test]
    fn a_figure_that_is_not_finite_is_not_one_that_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut metrics = Metrics::open_after(&path, None).unwrap().0;
        metrics.append(&StepMetrics { step: 1, loss: Some(f64::NAN), ..StepMetrics::default() }).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":2,").unwrap();
        let (lines, is_cut) = read_all(&path).unwrap();
        assert!(is_cut && lines.len() == 1 && lines[0].loss.is_some_and(f64::is_nan) && lines[0].eval_loss.is_none());
        assert!(!read_all(&dir.path().join("none")).unwrap().1);
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, "nonsense\n{}\n").unwrap();
        assert!(matches!(Metrics::open_after(&path, Some(3)), Err(ReportError::BrokenLine { line: 1, .. })));
    }
}
