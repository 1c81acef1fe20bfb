//! What lies in a run or a checkpoint: read through the rooms that write it, and nothing changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::checkpoint::{self, CheckpointListing, FINAL};
use crate::eval::{ANSWERS, AnswerFile, ScoredAnswer};
use crate::files::{self, DirLock, FileKind};
use crate::recipe::{LoraRecipe, Recipe};
use crate::report::metrics::{self, METRICS, StepMetrics};
use crate::report::summary;
use crate::train;
use crate::units::{Fault, FaultKind};

#[derive(Clone, Debug)]
pub struct AnswerListing {
    pub name: String,
    /// What the answers depend on beside the sample.
    pub settings: Value,
    pub answers: Vec<ScoredAnswer>,
}

/// A run, or one checkpoint and what is known of its run.
#[derive(Clone, Debug, Default)]
pub struct RunContents {
    pub path: PathBuf,
    /// What it is called where several are compared.
    pub name: String,
    /// How the run ended, or that it has not.
    pub state: String,
    /// Every setting in TOML, by its dotted key; empty where a checkpoint lies by itself.
    pub settings: BTreeMap<String, String>,
    /// What the recipe's adapter is called; `None` where all weights are trained.
    pub adapter: Option<&'static str>,
    /// The resolved recipe as it is written.
    pub recipe: String,
    /// One for each step; of a checkpoint those up to its own.
    pub metrics: Vec<StepMetrics>,
    /// Whether the last line of the metrics was cut short, and is left out.
    pub is_cut: bool,
    pub checkpoints: Vec<CheckpointListing>,
    /// The newest one, as the last save has noted it.
    pub latest: Option<String>,
    pub answers: Vec<AnswerListing>,
}

impl RunContents {
    pub fn read(path: &Path) -> Result<Self, Fault> {
        if checkpoint::holds(path).is_some() { Self::of_checkpoint(path) } else { Self::of_run(path, None) }
    }

    /// Looks at several, of which those in directories of the same name are called by their paths.
    pub fn read_all(paths: &[PathBuf]) -> Result<Vec<Self>, Fault> {
        let mut all = paths.iter().map(|path| Self::read(path)).collect::<Result<Vec<_>, _>>()?;
        let names: Vec<String> = all.iter().map(|run| run.name.clone()).collect();
        for run in &mut all {
            if names.iter().filter(|name| **name == run.name).count() > 1 {
                run.name = run.path.display().to_string();
            }
        }
        Ok(all)
    }

    /// All checkpoints are read to their last byte, unless only one is asked for.
    fn of_run(path: &Path, only: Option<CheckpointListing>) -> Result<Self, Fault> {
        let file = train::resolved_recipe_path(path)?;
        let recipe = files::read_text(&file, FileKind::Recipe)?;
        let resolved = Recipe::load(&file, &[])?.recipe;
        let (settings, adapter) = (resolved.flat(), resolved.lora.as_ref().map(LoraRecipe::kind));
        let (metrics, is_cut) = metrics::read_all(&path.join(METRICS))?;
        let checkpoints = only.map_or_else(|| checkpoint::list(path), |only| Ok(vec![only]))?;
        let state = state(path, &metrics, &checkpoints);
        let (latest, mut answers) = (checkpoint::latest(path), answers(&path.join(ANSWERS))?);
        for own in &checkpoints {
            drop_earlier(&mut answers, &path.join(&own.name));
        }
        let name = name_of(path);
        Ok(Self { path: path.to_owned(), name, state, settings, adapter, recipe, metrics, is_cut, checkpoints, latest, answers })
    }

    fn of_checkpoint(path: &Path) -> Result<Self, Fault> {
        let absolute = files::absolute(path);
        let run = absolute.parent().unwrap_or(path);
        let own = CheckpointListing { name: name_of(path), ..checkpoint::look(path)? };
        let last = own.step;
        // A checkpoint may lie by itself.
        let is_in_run = train::resolved_recipe_path(run).is_ok();
        let alone = |own| Self { checkpoints: vec![own], ..Self::default() };
        let mut contents = if is_in_run { Self::of_run(run, Some(own))? } else { alone(own) };
        path.clone_into(&mut contents.path);
        contents.name = name_of(path);
        contents.state = last.map_or("a checkpoint".to_owned(), |step| format!("a checkpoint after step {step}"));
        contents.metrics.retain(|line| last.is_none_or(|step| line.step <= step));
        contents.answers.retain(|file| is_of(file, path));
        Ok(contents)
    }
}

fn name_of(path: &Path) -> String {
    let absolute = files::absolute(path);
    absolute.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

fn state(run: &Path, metrics: &[StepMetrics], checkpoints: &[CheckpointListing]) -> String {
    if DirLock::refuse_in_use(run).is_err_and(|fault| fault.kind() == FaultKind::Locked) {
        return "running".to_owned();
    }
    let step = metrics.last().map_or(0, |line| line.step);
    match summary::state(run) {
        Some(state) if state == "finished" && checkpoints.iter().any(|c| c.name == FINAL && c.damage.is_none()) => state,
        // A page of an earlier start says nothing of this one.
        Some(state) if state.ends_with(&format!(" {step}")) => state,
        _ => "not finished".to_owned(),
    }
}

pub fn kept_answers(run: &Path, checkpoint: &Path) -> Result<Vec<AnswerListing>, Fault> {
    let mut kept = answers(&run.join(ANSWERS))?;
    kept.retain(|file| is_of(file, checkpoint));
    drop_earlier(&mut kept, checkpoint);
    Ok(kept)
}

/// Drops answers that an earlier adapter of a checkpoint's name has given: a run that goes on from before it puts another in its place.
fn drop_earlier(answers: &mut Vec<AnswerListing>, checkpoint: &Path) {
    if answers.iter().any(|file| is_of(file, checkpoint)) {
        let own = json!(checkpoint::adapter_hash(checkpoint).ok());
        let is_earlier = |file: &AnswerListing| file.settings.get("adapter").is_some_and(|adapter| *adapter != own);
        answers.retain(|file| !(is_of(file, checkpoint) && is_earlier(file)));
    }
}

fn is_of(file: &AnswerListing, checkpoint: &Path) -> bool {
    file.name.strip_prefix(&name_of(checkpoint)).is_some_and(|rest| rest.starts_with('-'))
}

fn answers(folder: &Path) -> Result<Vec<AnswerListing>, Fault> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "jsonl") && path.is_file());
    paths.sort();
    let read = |path: PathBuf| {
        let (answers, settings) = AnswerFile::read(&path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(AnswerListing { name, settings, answers })
    };
    paths.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_an_earlier_adapter_of_the_same_name_are_not_kept() {
        let run = tempfile::tempdir().unwrap();
        let at = |name: &str| run.path().join(name);
        fs::create_dir_all(at("final")).unwrap();
        fs::create_dir(at(ANSWERS)).unwrap();
        for name in ["adapter_model.safetensors", "adapter_config.json"] {
            fs::write(at("final").join(name), name).unwrap();
        }
        let own = json!(checkpoint::adapter_hash(&at("final")).unwrap());
        for (name, settings) in [
            ("final-own", json!({ "adapter": own })),
            ("final-earlier", json!({ "adapter": "another" })),
            ("final-of-the-base", json!({ "adapter": null })),
            ("final-unknown", json!({})),
            ("step-000002-own", json!({ "adapter": "another" })),
        ] {
            let row = json!({
                "sample": 0, "prompt_hash": "", "prediction": "", "references": [], "token_ids": [], "finish_reason": "stop",
                "scores": { "f1": 1.0 }, "settings": settings,
            });
            fs::write(at(ANSWERS).join(format!("{name}.jsonl")), format!("{row}\n")).unwrap();
        }
        let kept = kept_answers(run.path(), &at("final")).unwrap();
        assert_eq!(kept.iter().map(|file| &file.name[..]).collect::<Vec<_>>(), ["final-own", "final-unknown"]);
    }
}
