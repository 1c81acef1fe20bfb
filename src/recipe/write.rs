//! From the recipe back to TOML and to words, and what differs between two recipes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use toml::Value;

use super::diagnose::Checked;
use super::plan::Recipe;
use super::table::{RecipeTable, TableEntries};
use super::training::TopOfFile;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The dotted key, as `kv_cache.chunk_size`.
    pub key: String,
    /// The value of the one recipe, in TOML; `not set` where it has none.
    pub before: String,
    pub after: String,
}

impl Recipe {
    /// The complete recipe. Loading it again gives an equal one.
    pub fn to_toml(&self) -> String {
        let line = |(key, value): &(String, Value)| format!("{key} = {value}\n");
        let lines = |entries: TableEntries| entries.iter().map(line).collect::<Vec<_>>().concat();
        let top = lines(TopOfFile { output_dir: self.output_dir.clone() }.entries());
        let tables = self.sections().into_iter().map(|(name, entries)| format!("[{name}]\n{}", lines(entries)));
        Some(top).filter(|top| !top.is_empty()).into_iter().chain(tables).collect::<Vec<_>>().join("\n")
    }

    /// What stands in the way of continuing this recipe's run with `resumed`: everything that differs, but for the lengths
    /// of the run, logging, saving, the tiling of the gradient, and where it is written.
    pub fn changes_refused_on_resume(&self, resumed: &Self) -> Vec<Difference> {
        self.differences(resumed).into_iter().filter(|difference| !may_change(&difference.key)).collect()
    }

    /// What may not change in the recipe's run: values in TOML by their dotted keys.
    pub fn fixed_settings(&self) -> BTreeMap<String, String> {
        self.flat().into_iter().filter(|(key, _)| !may_change(key)).collect()
    }

    /// What this recipe has otherwise than the fixed settings that its run has saved in `place`. A key that came with a later version has its
    /// default there.
    pub fn changes_since(&self, saved: &BTreeMap<String, String>, place: &Path) -> Checked<Vec<Difference>> {
        let mut all: BTreeMap<String, String> = self.flat().into_iter().filter(|(key, _)| may_change(key)).collect();
        all.extend(saved.clone());
        let lines: Vec<String> = all.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        Ok(Self::parse(lines.concat(), place, &[])?.recipe.changes_refused_on_resume(self))
    }

    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (before, after) = (self.flat(), other.flat());
        let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let show = |value: Option<&String>| value.cloned().unwrap_or_else(|| "not set".to_owned());
        keys.into_iter()
            .filter(|key| before.get(*key) != after.get(*key))
            .map(|key| Difference { key: key.clone(), before: show(before.get(key)), after: show(after.get(key)) })
            .collect()
    }

    /// What the cache computes: the values of the table `[kv_cache]` in TOML by their dotted keys, but for where slots wait.
    pub fn cache_keys(&self) -> BTreeMap<String, String> {
        let beside = ["kv_cache.cpu_offload", "kv_cache.static"];
        let decides = |key: &String| key.starts_with("kv_cache.") && !beside.contains(&&key[..]);
        self.flat().into_iter().filter(|(key, _)| decides(key)).collect()
    }

    /// All values in TOML by their dotted keys.
    pub fn flat(&self) -> BTreeMap<String, String> {
        let sections = self.sections().into_iter();
        sections
            .flat_map(|(name, entries)| entries.into_iter().map(move |(key, value)| (format!("{name}.{key}"), value.to_string())))
            .collect()
    }
}

fn may_change(key: &str) -> bool {
    let (table, _) = key.split_once('.').unwrap_or((key, ""));
    // The one key of `grad` that says what is computed, not how.
    key != "grad.single_tokens_for_targets"
        && (matches!(table, "log" | "report" | "checkpoint" | "grad")
            // Where the model and the data lie: their content is compared with what the run began with.
            || matches!(key, "model.path" | "model.revision" | "data.train" | "data.validation")
            || key.starts_with("data.sets.") && matches!(key.rsplit('.').next(), Some("train" | "validation"))
            || matches!(key, "train.epochs" | "train.max_steps" | "kv_cache.cpu_offload")
            || matches!(key, "train.on_non_finite" | "train.max_skipped_steps" | "train.max_loss"))
}
