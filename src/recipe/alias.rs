//! Spellings of other programs that mean the same: accepted, with a note. Most stand beside their keys; here are those of the policy.

use super::diagnose::Checked;
use super::foreign;
use super::overrides::move_to;
use super::plan::dotted_keys;
use super::policy_recipe::{DEFAULT_POLICY, PolicyRecipe};
use super::refusals::Refusals;
use super::table::{RecipeKey, table_of};
use super::tree::{Document, KeyValue, Node, NodeValue, Spot};

/// Parameters of policies that may stand beside `policy` instead of inside it.
pub const FLAT: &[&str] = &[
    "grace_period",
    "init_grace_tokens",
    "sink_tokens",
    "keep_initial_fraction",
    "normalize_scores",
    "combination_constant",
    "score_prefill",
    "end_initial_regex",
    "max_initial_fraction",
    "include_end_string",
    "range_is_prefix",
];

/// Brings all spellings to kvtune's own. Returns one line for each that was another.
pub(super) fn apply(document: &mut Document, refusals: &mut Refusals) -> Vec<String> {
    let mut notes = Vec::new();
    foreign::apply(document, &mut notes, refusals);
    for (to, key) in dotted_keys() {
        for name in key.also {
            if let Some(entry) = document.root.take(name) {
                notes.push((entry.spot, format!("`{name}` is read as `{to}`")));
                let moved = move_to(document, name, &to, entry);
                refusals.catch(&[table_of(name), table_of(&to)], moved);
            }
        }
    }
    refusals.catch(&["kv_cache"], split_cache_name(document, &mut notes));
    refusals.catch(&["kv_cache"], gather_policy_params(document, &mut notes));
    for (key, RecipeKey { words, all_words, .. }) in dotted_keys() {
        let Some(node) = document.root.get_mut(&key) else { continue };
        let written = node.word();
        if let Some((word, _)) = words.iter().chain(&all_words()).find(|(_, others)| others.contains(&written.as_str())) {
            *node = Node::string(word, node.spot);
            notes.push((node.spot, format!("`{key} = \"{written}\"` is read as `\"{word}\"`")));
        }
    }
    notes.sort();
    notes.into_iter().map(|(spot, note)| format!("{}: {note}", document.source.short(spot))).collect()
}

/// `kv_cache.name = "h2o-torch-quantized8"` is a policy and a buffer.
fn split_cache_name(document: &mut Document, notes: &mut Vec<(Spot, String)>) -> Checked<()> {
    const BUFFERS: [(&str, &str); 3] = [("-default", "plain"), ("-torch-quantized8", "int8"), ("-torch-quantized4", "int4")];
    const CODE_BOOKS: [(&str, &str); 2] = [("-bnb-quantized8", "int8"), ("-bnb-quantized4", "int4")];
    let Some(entry) = document.root.take("kv_cache.name") else { return Ok(()) };
    let Some(name) = entry.node.as_str().map(str::to_owned) else {
        let hint = "write `policy = \"h2o\"` and `buffer = \"plain\"`";
        return Err(document.source.reject(entry.node.spot, "`kv_cache.name` must be a string".to_owned(), hint));
    };
    let ending = |known: &[(&'static str, &'static str)]| known.iter().copied().find(|(ending, _)| name.ends_with(ending));
    if let Some((other, buffer)) = ending(&CODE_BOOKS) {
        let policy = name.trim_end_matches(other);
        let message = format!("`kv_cache.name = \"{name}\"` asks for the buffer `{}`, which is not there", &other[1..]);
        let hint = format!("write `policy = \"{policy}\"` and `buffer = \"{buffer}\"`");
        return Err(document.source.reject(entry.spot, message, hint));
    }
    let (other, buffer) = ending(&BUFFERS).unwrap_or(("", "plain"));
    let policy = name.strip_suffix(other).unwrap_or(&name).to_owned();
    notes.push((entry.spot, format!("`kv_cache.name = \"{name}\"` is read as `policy = \"{policy}\"`, `buffer = \"{buffer}\"`")));
    let word = |word: &str| Node::string(word, entry.node.spot);
    let part = |node| KeyValue { node, ..entry.clone() };
    if !other.is_empty() {
        move_to(document, "kv_cache.name", "kv_cache.buffer", part(word(buffer)))?;
    }
    move_to(document, "kv_cache.name", "kv_cache.policy", part(word(&policy)))
}

/// `kv_cache.grace_period = 64` beside `policy = "h2o"` is `policy.h2o.grace_period`, and `sink_tokens` is `init_grace_tokens`.
fn gather_policy_params(document: &mut Document, notes: &mut Vec<(Spot, String)>) -> Checked<()> {
    let is_named = document.root.entry("kv_cache.policy").is_some();
    for key in FLAT {
        let Some(entry) = document.root.take(&format!("kv_cache.{key}")) else { continue };
        let policy = policy_name(document);
        let to = format!("kv_cache.policy.{policy}.{}", if *key == "sink_tokens" { "init_grace_tokens" } else { key });
        notes.push((entry.spot, format!("`kv_cache.{key}` is read as `{to}`")));
        move_to(document, &format!("kv_cache.{key}"), &to, entry)?;
    }
    // Without a policy they belong to the default one, whose other parameters must be filled in.
    if !is_named && document.root.entry("kv_cache.policy").is_some() {
        for KeyValue { key, spot, node } in PolicyRecipe::by_default().params.entries() {
            let key = format!("kv_cache.policy.{DEFAULT_POLICY}.{key}");
            if document.root.entry(&key).is_none() {
                document.root.put(&key, *spot, node.clone());
            }
        }
    }
    let names = document.root.entry("kv_cache.policy").map(|policy| policy.node.entries().to_vec()).unwrap_or_default();
    for policy in names.iter().map(|entry| &entry.key) {
        let (name, to) = (format!("kv_cache.policy.{policy}.sink_tokens"), format!("kv_cache.policy.{policy}.init_grace_tokens"));
        // Not by its dotted key: a policy's table that gets empty must stay.
        let Some(params) = document.root.get_mut(&format!("kv_cache.policy.{policy}")) else { continue };
        let Some(entry) = params.take("sink_tokens") else { continue };
        notes.push((entry.spot, format!("`{name}` is read as `{to}`")));
        move_to(document, &name, &to, entry)?;
    }
    Ok(())
}

/// The name of the policy, which becomes a table so that it can take parameters.
fn policy_name(document: &mut Document) -> String {
    let Some(policy) = document.root.get_mut("kv_cache.policy") else {
        return DEFAULT_POLICY.to_owned();
    };
    if let NodeValue::String(name) = &policy.value {
        let (name, spot) = (name.clone(), policy.spot);
        let params = Node { spot, ..Node::table() };
        policy.value = NodeValue::Table(vec![KeyValue { key: name.clone(), spot, node: params }]);
        return name;
    }
    policy.entries().first().map_or_else(|| DEFAULT_POLICY.to_owned(), |entry| entry.key.clone())
}
