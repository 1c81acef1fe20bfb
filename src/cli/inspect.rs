//! `kvtune inspect`: what is in a run or a checkpoint and how it went; what the caches of a replay log kept.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use crate::cache::ReplayLog;
use crate::checkpoint::CheckpointListing;
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
    let table = |header: &[&str], rows: Vec<Vec<String>>| {
        let mut table = Table::of_words(header);
        for row in &rows {
            table.row(row);
        }
        (!rows.is_empty()).then(|| console::fitted(&table))
    };
    let setting = |key: &&str| Some(vec![(*key).to_owned(), contents.settings.get(*key)?.trim_matches('"').to_owned()]);
    let adapter = contents.adapter.iter().map(|kind| vec!["adapter".to_owned(), (*kind).to_owned()]);
    let settings = adapter.chain(MAIN_SETTINGS.iter().filter_map(setting)).collect();
    let figures =
        figures_in_words(contents).into_iter().filter_map(|(name, value)| Some(vec![name.to_owned(), value?])).collect();
    let checkpoint = |own: &CheckpointListing| {
        let step = own.step.map_or("–".to_owned(), |step| step.to_string());
        let newest = if contents.latest.as_ref() == Some(&own.name) { ", the newest" } else { "" };
        let state = own.damage.clone().unwrap_or_else(|| "whole".to_owned()) + newest;
        vec![own.name.clone(), step, Bytes(own.bytes).to_string(), state]
    };
    let checkpoints = contents.checkpoints.iter().map(checkpoint).collect();
    let answers = contents.answers.iter().map(|file| vec![file.name.clone(), file.answers.len().to_string()]).collect();
    let skipped = contents.metrics.iter().filter_map(|line| Some(vec![line.step.to_string(), line.skipped.clone()?])).collect();
    let points: Vec<(f64, f64)> = contents.metrics.iter().filter_map(|line| Some((line.step as f64, line.loss?))).collect();
    let curve = in_terminal(&points, CURVE.0, CURVE.1).map(|curve| format!("training loss by step\n{curve}"));
    let parts = [
        Some(format!("{}: {}", contents.path.display(), contents.state)),
        table(&["setting", "value"], settings).or(Some("no recipe beside it".to_owned())),
        table(&["figure", "value"], figures),
        table(&["checkpoint", "step", "size", "state"], checkpoints).or(Some("no checkpoint is saved yet".to_owned())),
        table(&["file of answers", "answers"], answers),
        table(&["step left out", "why"], skipped),
        curve.or(Some("no loss to be drawn".to_owned())),
        contents.is_cut.then(|| "the last line of the metrics was cut short, and is left out".to_owned()),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("\n\n")
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
