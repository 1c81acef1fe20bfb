//! `--set a.b=c`: single values on top of a recipe. An override wins over whatever the recipe says about the same thing.

use super::diagnose::Checked;
use super::plan::dotted_keys;
use super::refusals::Refusals;
use super::tree::{Document, KeyValue, Node, NodeValue, RecipeSource, Spot, convert};

/// Puts all overrides of the source into the tree, in their order.
pub(super) fn apply(document: &mut Document, refusals: &mut Refusals) {
    let source = document.source.clone();
    for (index, text) in source.overrides.iter().enumerate() {
        let table = text.split(['.', '=']).next().unwrap_or_default().trim();
        refusals.catch(&[table], put(document, Spot::Override(index), text));
    }
}

fn put(document: &mut Document, spot: Spot, text: &str) -> Checked<()> {
    let (key, node) = parse(&document.source, text, spot)?;
    make_room(&mut document.root, &key);
    if document.root.put(&key, spot, node) {
        return Ok(());
    }
    let message = format!("`{key}` cannot be set: a part of it is a value and not a table");
    Err(document.source.reject(spot, message, "name a table and a key, as `kv_cache.chunk_size=8`"))
}

fn parse(source: &RecipeSource, text: &str, spot: Spot) -> Checked<(String, Node)> {
    let hint = "write `--set table.key=value`, as `--set kv_cache.chunk_size=8`";
    let Some((key, value)) = text.split_once('=') else {
        return Err(source.reject(spot, format!("the override `{text}` has no `=`"), hint));
    };
    let parts: Vec<&str> = key.split('.').map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(source.reject(spot, format!("the override `{text}` has an empty key"), hint));
    }
    let (key, value) = (parts.join("."), value.trim());
    let list = as_list(&key, value);
    // What is not TOML is a string: `data.train=train.jsonl` needs no quotes inside the shell's.
    let node = match toml::de::DeValue::parse(list.as_deref().unwrap_or(value)) {
        Ok(parsed) => convert(&parsed, source, &|_| spot)?,
        Err(_) => Node::string(value, spot),
    };
    Ok((key, node))
}

/// `q_proj,v_proj` as TOML for a key that takes an array. A path or a pattern may have commas.
fn as_list(key: &str, value: &str) -> Option<String> {
    let (_, found) = dotted_keys().find(|(name, found)| name == key || found.also.contains(&key))?;
    let is_plain = |item: &str| !item.is_empty() && item.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'));
    let takes_list = found.takes.contains("array") && !found.takes.starts_with("path");
    if !takes_list || !value.contains(',') || !value.split(',').all(|item| is_plain(item.trim())) {
        return None;
    }
    let in_toml = |item: &str| if item.parse::<f64>().is_ok() { item.to_owned() } else { format!("{item:?}") };
    Some(format!("[{}]", value.split(',').map(|item| in_toml(item.trim())).collect::<Vec<_>>().join(", ")))
}

/// `kv_cache.policy.h2o.grace_period=4` chooses `h2o`, whatever was chosen before, and keeps the parameters of an `h2o`
/// that was.
fn make_room(root: &mut Node, key: &str) {
    let Some(name) = key.strip_prefix("kv_cache.policy.").and_then(|rest| rest.split('.').next()) else { return };
    let Some(policy) = root.get_mut("kv_cache.policy") else { return };
    match policy.entries_mut() {
        Some(entries) => entries.retain(|entry| entry.key == name),
        None => policy.value = NodeValue::Table(Vec::new()),
    }
}

/// Keys that exclude each other, and why.
pub(super) const EXCLUSIVE: &[(&str, &str, &str)] = &[
    ("data.validation", "data.validation_fraction", "the validation examples come from one of them"),
    ("head.label_tokens", "head.labels", "they are two ways to name the same classes"),
    ("head.num_labels", "head.labels", "the names say how many classes there are"),
    ("train.max_tokens_per_batch", "train.micro_batch_size", "they are two ways to say how much runs together"),
    ("optimizer.warmup_steps", "optimizer.warmup_ratio", "they are two ways to say how long the warm-up is"),
];

/// Drops the recipe's of two things that exclude each other, where only the other is an override.
pub(super) fn prefer_override(document: &mut Document, one: &str, other: &str, why: &str) -> Checked<()> {
    let (Some(a), Some(b)) = (document.root.entry(one), document.root.entry(other)) else { return Ok(()) };
    if a.spot.is_override() == b.spot.is_override() {
        let later = if a.spot > b.spot { one } else { other };
        let message = format!("`{one}` and `{other}` contradict each other: {why}");
        return document.refuse(later, message, format!("keep one of the two, as `{one}`"));
    }
    let loser = if a.spot.is_override() { other } else { one };
    document.root.take(loser);
    Ok(())
}

/// Puts the value of `name` at `to`, unless that is there: of two, an override wins over the recipe, and else both are refused.
pub(super) fn move_to(document: &mut Document, name: &str, to: &str, entry: KeyValue) -> Checked<()> {
    if let Some(there) = document.root.entry(to) {
        if there.spot.is_override() == entry.spot.is_override() {
            let message = format!("`{name}` and `{to}` mean the same, and both are given");
            return Err(document.source.reject(entry.spot, message, format!("remove `{name}`")));
        }
        if there.spot.is_override() {
            return Ok(());
        }
    }
    if document.root.put(to, entry.spot, entry.node) {
        return Ok(());
    }
    let message = format!("`{name}` means `{to}`, but a part of that is a value and not a table");
    Err(document.source.reject(entry.spot, message, format!("write `{to}` inside its table")))
}
