//! Several data sets in one recipe: for each of them the keys of a table are defaults.

use toml::Value;

use super::data::{DataRecipe, DataSet};
use super::diagnose::Checked;
use super::table::{RecipeField, RecipeKey, RecipeTable, TableEntries, dotted};
use super::tree::{Document, KeyValue};
use super::value::KeyRule;

/// Where the sets stand, by their names.
pub(super) const SETS: &str = "data.sets";
const WEIGHT: &str = "weight";
/// Each copy of a sample takes memory.
const WEIGHTS: KeyRule = KeyRule {
    takes: "0 < number ≤ 1000",
    expected: "more than 0, and at most 1000",
    hint: "write 2 to have each sample twice an epoch, 0.5 to have half of them, or leave the set out",
    is_fine: |weight| weight > 0.0 && weight <= 1000.0,
};

impl RecipeField for Vec<DataSet> {
    fn keys(key: RecipeKey, _: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        let check = |document: &Document, _: &str, _: &RecipeKey| <Self as RecipeField>::find(document, "").map(drop);
        vec![RecipeKey { takes: "array of tables".to_owned(), default: "none".to_owned(), check, ..key }]
    }

    fn find(document: &Document, _: &str) -> Checked<Option<Self>> {
        let Some(sets) = document.root.entry(SETS) else { return Ok(None) };
        sets.node.entries().iter().map(|set| read(document, set)).collect::<Checked<_>>().map(Some)
    }

    /// What the sets have of their own: the rest is written in `[data]`.
    fn entries(&self, key: &str) -> TableEntries {
        let of = |set: &DataSet| {
            let of_set = |(name, value): (String, Value)| (format!("{key}.{}.{name}", set.name), value);
            let is_own = |(name, _): &(String, Value)| set.own.contains(name);
            let weight = (WEIGHT.to_owned(), Value::Float(set.weight));
            set.data.entries().into_iter().filter(is_own).chain([weight]).map(of_set).collect::<Vec<_>>()
        };
        self.iter().flat_map(of).collect()
    }
}

/// A set, read as the table `[data]` of a recipe that has no other data.
fn read(document: &Document, set: &KeyValue) -> Checked<DataSet> {
    let mut of_set = document.clone();
    let own = || set.node.entries().iter().filter(|entry| entry.key != WEIGHT);
    // The two ways to hold samples out exclude each other.
    let holds_out = own().any(|entry| entry.key.starts_with("validation"));
    let others = ["sets", "train", "validation", "validation_fraction"].into_iter().take(if holds_out { 4 } else { 2 });
    others.for_each(|key| drop(of_set.root.take(&format!("data.{key}"))));
    for entry in own() {
        of_set.root.put(&format!("data.{}", entry.key), entry.spot, entry.node.clone());
    }
    let mut keys = DataRecipe::keys();
    keys.retain(|key| key.name != "sets" && key.name != "order");
    for entry in own() {
        let known = || keys.iter().map(|key| &key.name[..]).collect::<Vec<_>>();
        let key = keys.iter().find(|key| key.name == entry.key);
        let key = key.ok_or_else(|| document.source.unknown_key(entry.spot, DataRecipe::NAME, &entry.key, &known()))?;
        (key.check)(&of_set, &dotted(DataRecipe::NAME, &entry.key), key)?;
    }
    let key = format!("{SETS}.{}.{WEIGHT}", set.key);
    let weight = document.value(&key)?.unwrap_or(1.0);
    WEIGHTS.check(document, &key, &Value::Float(weight))?;
    let own = own().map(|entry| entry.key.clone()).collect();
    Ok(DataSet { name: set.key.clone(), weight, data: DataRecipe::read(&of_set)?, own })
}
