//! `metrics.jsonl`: one line per step, appended and flushed; the source of truth for curves, and for what the caches have evicted.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::files::disk::DiskFile;
use crate::files::{self, FileKind, io_fault};
use crate::units::Fault;

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
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    pub tokens: u64,
    pub targets: u64,
    /// Tokens of the run so far.
    pub total_tokens: u64,
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    #[serde(default, deserialize_with = "or_nan", skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// Validation loss by data set, where there are several.
    #[serde(default, deserialize_with = "each_or_nan", skip_serializing_if = "BTreeMap::is_empty")]
    pub eval_loss_by_set: BTreeMap<String, f64>,
    /// Means over the answers of a validation, by metric.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub eval_answers: BTreeMap<String, f64>,
    /// Hash of what the caches evicted in the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_log: Option<String>,
    /// Share of the entries of the step that left the caches by the policy, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evicted: Option<f64>,
    /// How many further tokens came before such an entry left, on average; none where nothing left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_stay: Option<f64>,
    /// `evicted` of each layer, from the bottom; of sliding windows what left the window.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted_by_layer: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mean_stay_by_layer: Vec<Option<f64>>,
    /// Why the step was left out, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// The part of their time that ranks have waited for the slowest, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<f64>,
    /// Duration of the step, validation apart.
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Peak memory of the process so far, bytes.
    pub peak_memory: u64,
}

/// JSON has no number for what is not finite, and says `null`: such a figure is there.
fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Some(Option::deserialize(from)?.unwrap_or(f64::NAN)))
}

fn each_or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let found: BTreeMap<String, Option<f64>> = Deserialize::deserialize(from)?;
    Ok(found.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

/// Sums over the heads of a layer, over layers, or over steps, each of which counts by its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evicted {
    pub entries: f64,
    pub evicted: f64,
    /// Tokens that came between the writing and the leaving of these.
    pub stay: f64,
}

impl Evicted {
    fn of_step(tokens: u64, share: f64, mean_stay: Option<f64>) -> Self {
        let (entries, evicted) = (tokens as f64, share * tokens as f64);
        Self { entries, evicted, stay: evicted * mean_stay.unwrap_or(0.0) }
    }

    /// Over the lines that say what was evicted: those of earlier versions do not.
    pub fn over<'a>(lines: impl IntoIterator<Item = &'a StepMetrics>) -> Self {
        let known = lines.into_iter().filter_map(|line| Some(Self::of_step(line.tokens, line.evicted?, line.mean_stay)));
        known.fold(Self::default(), Self::plus)
    }

    pub fn by_layer(lines: &[StepMetrics]) -> Vec<Self> {
        let mut layers: Vec<Self> = Vec::new();
        for line in lines {
            layers.resize(layers.len().max(line.evicted_by_layer.len()), Self::default());
            for ((sums, share), stay) in layers.iter_mut().zip(&line.evicted_by_layer).zip(&line.mean_stay_by_layer) {
                *sums = sums.plus(Self::of_step(line.tokens, *share, *stay));
            }
        }
        layers
    }

    pub fn plus(self, Self { entries, evicted, stay }: Self) -> Self {
        Self { entries: self.entries + entries, evicted: self.evicted + evicted, stay: self.stay + stay }
    }

    /// The share of all entries that left; `None` where nothing is known.
    pub fn share(&self) -> Option<f64> {
        (self.entries > 0.0).then(|| self.evicted / self.entries)
    }

    /// How many further tokens came before an entry left, on average; `None` where none did.
    pub fn mean_stay(&self) -> Option<f64> {
        (self.evicted > 0.0).then(|| self.stay / self.evicted)
    }

    /// In words; `None` where nothing is known.
    pub fn words(&self) -> Option<String> {
        let share = 100.0 * self.share()?;
        let stay = self.mean_stay().map(|stay| format!("{share:.1} %, on average {stay:.0} tokens after they were written"));
        Some(stay.unwrap_or_else(|| "none: nothing left the caches".to_owned()))
    }
}

/// Where a run goes on.
#[derive(Clone, Copy, Debug)]
pub struct MetricsMark {
    pub step: u64,
    pub total_tokens: u64,
    /// Lines at the beginning that need no check, as an earlier version wrote them; `None` where nobody has counted them.
    pub unchecked: Option<u64>,
    /// Whether the line of the last step is to be written anew.
    pub is_owed: bool,
}

#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: DiskFile,
    /// That of the last line; empty before the first.
    check: String,
}

/// What stands in the metrics of a run that goes on.
#[derive(Debug)]
pub struct KeptMetrics {
    pub lines: Vec<StepMetrics>,
    pub owed: Option<StepMetrics>,
    /// Lines that no check stands for.
    pub unchecked: u64,
    texts: Vec<String>,
    check: String,
}

impl KeptMetrics {
    /// Reads the lines up to where a run goes on, all of which must be as they were written. What comes after them doesn't count: a crash
    /// may have cut it. Where there is no file there are no lines.
    pub fn read(path: &Path, mark: &MetricsMark) -> Result<Self, Fault> {
        let mut kept = Self { lines: Vec::new(), owed: None, unchecked: 0, texts: Vec::new(), check: String::new() };
        let Some(bytes) = files::read_if_there(path, FileKind::Lines)? else { return Ok(kept) };
        for (index, line) in bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).enumerate() {
            if mark.step > 0 && kept.lines.last().is_some_and(|line| line.step >= mark.step) {
                break;
            }
            let wrong = |what: &str| other_line(path, index + 1, what);
            let read =
                std::str::from_utf8(line).ok().and_then(|text| Some((text, serde_json::from_str::<StepMetrics>(text).ok()?)));
            // Before the first step there need not be a line, and so it may be the one that was cut.
            let (text, metrics) = match read {
                Some((_, metrics)) if metrics.step > mark.step => break,
                Some(read) => read,
                None if mark.step == 0 => break,
                None => return Err(wrong(NO_LINE)),
            };
            match checked(text) {
                Some((figures, check)) if check == check_of(&kept.check, &figures) => check.clone_into(&mut kept.check),
                None if kept.check.is_empty() && mark.unchecked.is_none_or(|most| kept.unchecked < most) => kept.unchecked += 1,
                _ => return Err(wrong("it is not as it was written, or the lines before it are not")),
            }
            if let Some(before) = kept.lines.last()
                && metrics.step != before.step + 1
            {
                return Err(wrong(&format!("expected step {}, found step {}", before.step + 1, metrics.step)));
            }
            kept.texts.push(text.to_owned());
            kept.lines.push(metrics);
        }
        kept.fit(path, mark)?;
        if mark.is_owed {
            (kept.owed, _) = (kept.lines.pop(), kept.texts.pop());
            kept.check = kept.texts.last().and_then(|text| Some(checked(text)?.1.to_owned())).unwrap_or_default();
        }
        Ok(kept)
    }

    /// Fails where the last line is not that of the checkpoint's step.
    fn fit(&self, path: &Path, mark: &MetricsMark) -> Result<(), Fault> {
        let last = self.lines.last().map_or((0, 0), |line| (line.step, line.total_tokens));
        if mark.step == 0 || last == (mark.step, mark.total_tokens) {
            return Ok(());
        }
        let what = format!(
            "expected step {} with {} tokens so far, as the checkpoint has it, found step {} with {}",
            mark.step, mark.total_tokens, last.0, last.1
        );
        Err(other_line(path, self.lines.len().max(1), &what))
    }
}

impl Metrics {
    /// Opens the metrics of a run that begins, or goes on after the lines that stay: what comes after them is removed.
    pub fn open(path: &Path, kept: Option<&KeptMetrics>) -> Result<Self, Fault> {
        let text: String = kept.iter().flat_map(|kept| &kept.texts).flat_map(|line| [line.as_str(), "\n"]).collect();
        files::write_atomic(path, text.as_bytes())?;
        let file = DiskFile::open("metrics", path, OpenOptions::new().append(true)).map_err(io_fault("write", path))?;
        Ok(Self { path: path.to_owned(), file, check: kept.map(|kept| kept.check.clone()).unwrap_or_default() })
    }

    /// Appends one line, which is returned, and makes it durable: the checkpoint of its step may be the next thing on disk.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<String, Fault> {
        let mut write = || {
            let figures = serde_json::to_string(metrics)?;
            self.check = check_of(&self.check, &figures);
            let line = format!("{}{CHECK}{}\"}}", &figures[..figures.len() - 1], self.check);
            self.file.write_all(format!("{line}\n").as_bytes())?;
            self.file.sync().map(|()| line)
        };
        write().map_err(io_fault("write", &self.path))
    }
}

/// Stands between the figures of a line and its check.
const CHECK: &str = ",\"check\":\"";

/// A hash of a line's figures and of the check before: no line can be changed, left out or put in between unnoticed.
fn check_of(before: &str, figures: &str) -> String {
    files::hash_parts([before, figures])[..16].to_owned()
}

fn checked(line: &str) -> Option<(String, &str)> {
    let (figures, check) = line.strip_suffix("\"}")?.rsplit_once(CHECK)?;
    Some((format!("{figures}}}"), check))
}

pub const METRICS: &str = "metrics.jsonl";

/// The lines of a run up to `step`; none where there is no file.
pub fn read(path: &Path, step: u64) -> Result<Vec<StepMetrics>, Fault> {
    Ok(read_all(path)?.0.into_iter().filter(|metrics| metrics.step <= step).collect())
}

/// All lines of a run, and whether the last one was cut short; none where there is no file.
pub fn read_all(path: &Path) -> Result<(Vec<StepMetrics>, bool), Fault> {
    // Bytes: what a power cut leaves at the end need not be text.
    let Some(bytes) = files::read_if_there(path, FileKind::Lines)? else { return Ok((Vec::new(), false)) };
    let lines: Vec<&[u8]> = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()).collect();
    let (mut kept, mut is_cut) = (Vec::new(), false);
    for (index, line) in lines.iter().enumerate() {
        match serde_json::from_slice(line) {
            Ok(metrics) => kept.push(metrics),
            // A crash may have cut the last one.
            Err(_) if index + 1 == lines.len() => is_cut = true,
            Err(_) => return Err(other_line(path, index + 1, NO_LINE)),
        }
    }
    Ok((kept, is_cut))
}

const NO_LINE: &str = "not a line of metrics";

fn other_line(path: &Path, line: usize, what: &str) -> Fault {
    Fault::data(format!("`{}`, line {line}: {what}", path.display()), "restore the file, or remove it to begin a new one")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::failpoint::tests::with;

    fn line(step: u64) -> StepMetrics {
        StepMetrics { step, total_tokens: 10 * step, loss: Some(0.1 * step as f64), ..StepMetrics::default() }
    }

    /// The metrics of a run that has made so many steps.
    fn begun(path: &Path, steps: u64) -> Metrics {
        let mut metrics = Metrics::open(path, None).unwrap();
        (1..=steps).for_each(|step| drop(metrics.append(&line(step)).unwrap()));
        metrics
    }

    fn after(step: u64) -> MetricsMark {
        MetricsMark { step, total_tokens: 10 * step, unchecked: Some(0), is_owed: false }
    }

    fn steps(kept: &KeptMetrics) -> Vec<u64> {
        kept.lines.iter().map(|line| line.step).collect()
    }

    #[test]
    fn after_a_resume_no_step_stands_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        begun(&path, 5);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":6,\"lo\xff\0\nmore\n").unwrap();
        for (is_owed, expected) in [(false, &[1, 2, 3][..]), (true, &[1, 2])] {
            let kept = KeptMetrics::read(&path, &MetricsMark { is_owed, ..after(3) }).unwrap();
            assert_eq!((steps(&kept), kept.owed.as_ref().map(|line| line.step)), (expected.to_vec(), is_owed.then_some(3)));
            let mut metrics = Metrics::open(&path, Some(&kept)).unwrap();
            for step in expected.len() as u64 + 1..=4 {
                metrics.append(&line(step)).unwrap();
            }
            let kept = KeptMetrics::read(&path, &after(4)).unwrap();
            assert_eq!((steps(&kept), kept.unchecked), (vec![1, 2, 3, 4], 0));
        }
        let none = KeptMetrics::read(&dir.path().join("none"), &after(4)).unwrap();
        assert!(none.lines.is_empty());
    }

    #[test]
    fn no_byte_and_no_line_up_to_the_last_step_can_be_changed_unnoticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        begun(&path, 3);
        let whole = std::fs::read(&path).unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            KeptMetrics::read(&path, &after(3))
        };
        for place in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << (place % 8);
            assert!(read(&bytes).is_err(), "{place}: {}", String::from_utf8_lossy(&bytes));
            // What is missing may be the end of the last line alone.
            assert!(read(&whole[..place]).is_err() || place + 1 == whole.len(), "cut at {place}");
        }
        let lines: Vec<&[u8]> = whole.split_inclusive(|&b| b == b'\n').collect();
        for other in [[1, 2, 2], [0, 0, 2], [0, 2, 1], [0, 1, 1]] {
            let error = read(&other.map(|line| lines[line]).concat()).unwrap_err();
            assert!(error.to_string().contains("`, line ") && !error.to_string().contains(NO_LINE), "{other:?}: {error}");
        }
        let other = MetricsMark { total_tokens: 31, ..after(3) };
        read(&whole).unwrap();
        assert!(KeptMetrics::read(&path, &other).unwrap_err().to_string().contains("31 tokens so far"));
    }

    #[test]
    fn lines_of_an_earlier_version_stand_at_the_beginning_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let earlier: String = (1..=2).map(|step| serde_json::to_string(&line(step)).unwrap() + "\n").collect();
        std::fs::write(&path, &earlier).unwrap();
        let kept = KeptMetrics::read(&path, &MetricsMark { unchecked: None, ..after(2) }).unwrap();
        assert_eq!((steps(&kept), kept.unchecked), (vec![1, 2], 2));
        Metrics::open(&path, Some(&kept)).unwrap().append(&line(3)).unwrap();
        assert_eq!(KeptMetrics::read(&path, &MetricsMark { unchecked: Some(2), ..after(3) }).unwrap().unchecked, 2);
        assert!(KeptMetrics::read(&path, &MetricsMark { unchecked: Some(1), ..after(3) }).is_err());
    }

    #[test]
    fn wherever_an_appended_line_fails_those_before_it_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        for action in ["eio", "enospc", "edquot", "eintr", "short"] {
            for n in 1.. {
                let mut metrics = begun(&path, 2);
                let (result, is_reached) = with(&format!("metrics.any={action}:{n}"), || metrics.append(&line(3)));
                assert_eq!(result.is_ok(), !is_reached || ["eintr", "short"].contains(&action), "{action}, {n}");
                assert_eq!(steps(&KeptMetrics::read(&path, &after(2)).unwrap()), [1, 2]);
                if !is_reached {
                    assert_eq!(steps(&KeptMetrics::read(&path, &after(3)).unwrap()), [1, 2, 3]);
                    assert!(n > 2, "a write and a sync");
                    break;
                }
            }
        }
    }

    #[test]
    fn a_figure_that_is_not_finite_is_not_one_that_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        let mut metrics = Metrics::open(&path, None).unwrap();
        metrics.append(&StepMetrics { step: 1, loss: Some(f64::NAN), ..StepMetrics::default() }).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":2,").unwrap();
        let (lines, is_cut) = read_all(&path).unwrap();
        assert!(is_cut && lines.len() == 1 && lines[0].loss.is_some_and(f64::is_nan) && lines[0].eval_loss.is_none());
        assert!(!read_all(&dir.path().join("none")).unwrap().1);
    }

    #[test]
    fn a_broken_line_in_the_middle_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS);
        std::fs::write(&path, "nonsense\n{}\n").unwrap();
        for error in [read_all(&path).unwrap_err(), KeptMetrics::read(&path, &after(3)).unwrap_err()] {
            assert!(error.to_string().ends_with("`, line 1: not a line of metrics"), "{error}");
        }
    }

    #[test]
    fn steps_count_by_their_tokens_and_stays_by_what_left() {
        let line = |tokens, evicted, mean_stay| StepMetrics {
            tokens,
            evicted: Some(evicted),
            mean_stay,
            evicted_by_layer: vec![evicted, 0.0],
            mean_stay_by_layer: vec![mean_stay, None],
            ..StepMetrics::default()
        };
        let lines = [line(100, 0.5, Some(10.0)), line(300, 0.25, Some(20.0)), line(100, 0.0, None), StepMetrics::default()];
        let all = Evicted::over(&lines);
        assert_eq!((all.share(), all.mean_stay()), (Some(0.25), Some(16.0)));
        assert_eq!(all.words().unwrap(), "25.0 %, on average 16 tokens after they were written");
        let layers = Evicted::by_layer(&lines);
        assert_eq!(layers.len(), 2);
        assert_eq!((layers[0], layers[1].share(), layers[1].mean_stay()), (all, Some(0.0), None));
        assert_eq!(layers[1].words().unwrap(), "none: nothing left the caches");
        assert_eq!(Evicted::over(&[StepMetrics::default()]).words(), None, "a line of an earlier version");
    }
}
