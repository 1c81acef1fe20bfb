//! `kvtune inspect`: what is in a run or a checkpoint and how it went; what the caches of a replay log kept.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use crate::cache::ReplayLog;
use crate::files;
use crate::inspect::{Evictions, RunContents, RunFigures, figures_in_words, in_terminal};
use crate::report::console;
use crate::report::table::Table;
use crate::units::{Bytes, Fault};

/// Show a run or a checkpoint: settings, figures, files, loss curve; or what the caches of a replay log kept.
#[derive(Debug, Args)]
#[command(override_usage = "kvtune inspect [OPTIONS] <RUN|CHECKPOINT|--evictions <LOG>>")]
pub(super) struct Inspect {
    /// A run or one of its checkpoints.
    // What excludes `--evictions` would waive what requires it.
    #[arg(value_name = "RUN|CHECKPOINT", required_unless_present = "evictions", conflicts_with_all = ["evictions", "out", "sequence"])]
    path: Option<PathBuf>,
    /// Look at this replay log instead: which positions each layer and KV head kept. `kvtune evaluate --replay-log` writes one.
    #[arg(long, value_name = "LOG")]
    evictions: Option<PathBuf>,
    /// Draw these positions as SVG.
    #[arg(long, value_name = "FILE", requires = "evictions")]
    out: Option<PathBuf>,
    /// Which sequence of the log, counted from 0.
    #[arg(long, value_name = "N", requires = "evictions", default_value_t = 0)]
    sequence: usize,
}

/// Settings that a run is known by.
const MAIN_SETTINGS: [&str; 16] = [
    "model.path",
    "model.dtype",
    "train.weights",
    "lora.r",
    "lora.alpha",
    "lora.target_modules",
    "data.format",
    "data.train",
    "data.max_seq_length",
    "kv_cache.policy",
    "kv_cache.buffer",
    "kv_cache.cache_length",
    "kv_cache.chunk_size",
    "optimizer.learning_rate",
    "train.max_steps",
    "train.seed",
];
/// Size of the curve, in characters.
const CURVE: (usize, usize) = (72, 12);

impl Inspect {
    pub(super) fn run(&self) -> Result<(), Fault> {
        match (&self.evictions, &self.path) {
            (Some(log), _) => self.evictions(log),
            (None, Some(path)) => {
                let contents = RunContents::read(path)?;
                Ok(console::outcome(&in_words(&contents), &to_json(&contents))?)
            }
            // clap lets it not pass.
            (None, None) => Ok(()),
        }
    }

    fn evictions(&self, path: &Path) -> Result<(), Fault> {
        if let Some(out) = self.out.as_deref().filter(|out| out.extension().is_none_or(|end| !end.eq_ignore_ascii_case("svg"))) {
            return Err(Fault::usage(format!("`--out {}` names no SVG", out.display()), "let its name end in `.svg`"));
        }
        let evictions = Evictions::of(&ReplayLog::load(path)?, self.sequence)?;
        console::outcome(&console::fitted(&kept(&evictions)), &json!(evictions))?;
        if let Some(out) = &self.out {
            let picture = evictions.map(&path.display().to_string()).to_svg("evictions");
            files::write_named(out, |file| file.write_all(picture.as_bytes()))?;
            console::note(&format!("drawn: {}", out.display()));
        }
        Ok(())
    }
}

fn to_json(contents: &RunContents) -> Value {
    let answers: Vec<Value> =
        contents.answers.iter().map(|file| json!({ "name": file.name, "answers": file.answers.len() })).collect();
    json!({
        "path": contents.path, "state": contents.state, "figures": RunFigures::of(contents), "settings": contents.settings,
        "checkpoints": contents.checkpoints, "latest": contents.latest, "answers": answers, "metrics_cut_short": contents.is_cut,
    })
}

fn in_words(contents: &RunContents) -> String {
    let mut parts = vec![format!("{}: {}", contents.path.display(), contents.state)];
    let main = MAIN_SETTINGS.iter().filter_map(|key| Some((*key, contents.settings.get(*key)?)));
    let mut settings = Table::of_words(&["setting", "value"]);
    contents.adapter.iter().for_each(|kind| settings.row(&["adapter", kind]));
    main.for_each(|(key, value)| settings.row(&[key, value.trim_matches('"')]));
    parts.push(if contents.settings.is_empty() { "no recipe beside it".to_owned() } else { console::fitted(&settings) });
    let mut figures = Table::of_words(&["figure", "value"]);
    for (name, value) in figures_in_words(contents) {
        figures.figure(name, value);
    }
    parts.push(console::fitted(&figures));
    let mut checkpoints = Table::of_words(&["checkpoint", "step", "size", "state"]);
    for own in &contents.checkpoints {
        let step = own.step.map_or("–".to_owned(), |step| step.to_string());
        let newest = if contents.latest.as_ref() == Some(&own.name) { ", the newest" } else { "" };
        let state = own.damage.clone().unwrap_or_else(|| "whole".to_owned()) + newest;
        checkpoints.row(&[&own.name, &step, &Bytes(own.bytes).to_string(), &state]);
    }
    let none = contents.checkpoints.is_empty();
    parts.push(if none { "no checkpoint is saved yet".to_owned() } else { console::fitted(&checkpoints) });
    if !contents.answers.is_empty() {
        let mut answers = Table::of_words(&["file of answers", "answers"]);
        contents.answers.iter().for_each(|file| answers.row(&[&file.name, &file.answers.len().to_string()]));
        parts.push(console::fitted(&answers));
    }
    let mut skipped = Table::of_words(&["step left out", "why"]);
    let reasons = contents.metrics.iter().filter_map(|line| Some((line.step.to_string(), line.skipped.as_ref()?)));
    let left_out = reasons.map(|(step, why)| skipped.row(&[&step, why])).count();
    if left_out > 0 {
        parts.push(console::fitted(&skipped));
    }
    let points: Vec<(f64, f64)> = contents.metrics.iter().filter_map(|line| Some((line.step as f64, line.loss?))).collect();
    let curve = in_terminal(&points, CURVE.0, CURVE.1);
    parts.push(curve.map_or("no loss to be drawn".to_owned(), |curve| format!("training loss by step\n{curve}")));
    if contents.is_cut {
        parts.push("the last line of the metrics was cut short, and is left out".to_owned());
    }
    parts.join("\n\n")
}

/// A row for each layer and head.
fn kept(evictions: &Evictions) -> Table {
    let mut table = Table::new(&["layer", "KV head", "slots", "evicted", "kept", "mean stay, tokens", "order"]);
    for (index, layer) in evictions.layers.iter().enumerate() {
        for (head, own) in layer.heads.iter().enumerate() {
            let head = if layer.heads.len() == 1 { "all".to_owned() } else { head.to_string() };
            let stay = own.mean_stay.map_or("–".to_owned(), |stay| format!("{stay:.1}"));
            let order = match (own.evicted, layer.is_rolling) {
                (0, _) => "nothing left",
                (_, true) => "oldest first",
                _ => "by the policy",
            };
            let numbers = [index, layer.slots, own.evicted, own.kept].map(|number| number.to_string());
            table.row(&[&numbers[0], &head, &numbers[1], &numbers[2], &numbers[3], &stay, order]);
        }
    }
    table
}
