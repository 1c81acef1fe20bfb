//! What is written from the recipe's tables: those of `docs/reference/recipe.md`, with every key and what other programs call it, and
//! `recipe.schema.json`, a JSON Schema (draft 7) for editors.

use kvtune::data::formats;
use kvtune::recipe::{ADVICE, FLAT, FOREIGN, Meaning, RecipeKey, TABLES, dotted_keys, know_formats};
use serde_json::{Map, Value, json};

/// The Markdown tables of the reference, in their order: one for each table of the recipe, then what stands at the top of the file,
/// other names of keys, other names of values, keys whose meaning depends on their value, and keys that are refused with advice.
pub(super) fn reference() -> Vec<String> {
    know_formats(formats());
    let keys = || dotted_keys().map(|(name, key)| (code(&name), key));
    let names = keys().filter(|(_, key)| !key.also.is_empty()).map(|(key, of)| vec![key, codes(of.also)]);
    let flat = format!("`kv_cache.KEY` for the keys {}", codes(FLAT));
    let of_policy = [
        vec!["`kv_cache.policy`, `kv_cache.buffer`".to_owned(), "`kv_cache.name`, as in `\"h2o-torch-quantized8\"`".to_owned()],
        vec!["`kv_cache.policy.NAME.KEY`".to_owned(), flat],
    ];
    // All modules are no choice of those that are left out.
    let words = keys().filter(|(key, _)| key != "`lora.exclude_modules`");
    let words = words.flat_map(|(key, of)| words_of(of).map(move |(word, others)| vec![key.clone(), code(word), codes(others)]));
    let meanings = FOREIGN.iter().map(|(key, value, meaning)| vec![code(&format!("{key} = {value}")), told(meaning)]);
    let advice = ADVICE.iter().map(|(key, advice)| vec![code(key), (*advice).to_owned()]);
    let mut found: Vec<String> = TABLES.iter().map(|(_, keys)| table_of(keys)).collect();
    found.push(markdown(&["key", "also accepted"], names.chain(of_policy)));
    found.push(markdown(&["key", "value", "also accepted"], words));
    found.push(markdown(&["key", "meaning"], meanings));
    found.push(markdown(&["key", "what to do"], advice));
    found
}

fn told(meaning: &Meaning) -> String {
    match meaning {
        Meaning::Is(key, word) => format!("read as `{key} = \"{word}\"`"),
        Meaning::LeftOut(why) => format!("left out: {why}"),
        Meaning::Refused(why, hint) => format!("refused, as {why}: {hint}"),
    }
}

fn table_of(keys: &[RecipeKey]) -> String {
    let rows = keys.iter().map(|key| {
        let meaning = key.meaning.trim().to_owned();
        vec![code(&key.name), takes(key), key.default.clone(), meaning]
    });
    markdown(&["key", "type", "default", "meaning"], rows)
}

/// Words of its value that have others, with these.
fn words_of(key: &RecipeKey) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    key.words.iter().copied().chain((key.all_words)()).filter(|(_, others)| !others.is_empty())
}

/// What its value may be: where another room tells all words, one of these.
fn takes(key: &RecipeKey) -> String {
    let told: Vec<String> = (key.all_words)().iter().map(|(word, _)| code(word)).collect();
    told.split_last().map_or_else(|| key.takes.clone(), |(last, rest)| format!("{} or {last}", rest.join(", ")))
}

fn markdown(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head = head.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    [line(&head), rule].into_iter().chain(rows.map(|cells| line(&cells))).collect()
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn codes(texts: &[&str]) -> String {
    texts.iter().map(|text| code(text)).collect::<Vec<_>>().join(", ")
}

/// The schema that stands in `docs/reference/recipe.schema.json`: every key with its type, its meaning, and what other programs call it.
pub(super) fn schema() -> Value {
    know_formats(formats());
    let mut root = table("A recipe of kvtune");
    for (to, key) in dotted_keys() {
        put(&mut root, &to, property(key));
        for other in key.also {
            put(&mut root, other, json!({ "description": format!("Read as `{to}`."), "deprecated": true }));
        }
    }
    for key in FLAT.iter().chain(&["name"]) {
        let other = json!({ "description": "Read as a part of `kv_cache.policy`.", "deprecated": true });
        put(&mut root, &format!("kv_cache.{key}"), other);
    }
    root["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    root
}

fn property(key: &RecipeKey) -> Value {
    let said = takes(key);
    let takes = said.strip_suffix(", or `auto`").filter(|_| key.may_be_auto);
    let mut value = of_what_it_takes(takes.unwrap_or(&said));
    if let Some(words) = value.get_mut("enum").and_then(Value::as_array_mut) {
        words.extend(words_of(key).flat_map(|(_, others)| others).map(|word| Value::from(*word)));
    }
    if key.may_be_auto {
        value = json!({ "anyOf": [value, { "const": "auto" }] });
    }
    value["description"] = format!("{} Takes: {}. Default: {}.", key.meaning.trim(), said, key.default).into();
    value
}

/// What keys take whose values have several types, or a form of their own, by its beginning.
const MIXED: &[&str] = &[
    "table",
    "1 ≤ integer ≤ 2^40, array of one per layer",
    "an array of names, or",
    "`loss`, `accuracy`, or a metric",
    "`none`, `auto`, `all`, or integer",
    "date",
    "path, ",
];

/// What an editor may expect of a value; nothing where a type alone does not tell.
fn of_what_it_takes(takes: &str) -> Value {
    let words: Option<Vec<&str>> = takes.split(", ").flat_map(|words| words.split(" or ")).map(word).collect();
    match (takes, words) {
        (_, Some(words)) => json!({ "enum": words }),
        ("boolean", _) => json!({ "type": "boolean" }),
        ("string" | "path", _) => json!({ "type": "string" }),
        ("array of strings", _) => json!({ "type": "array", "items": { "type": "string" } }),
        ("array of integers", _) => json!({ "type": "array", "items": { "type": "integer" } }),
        // A resolved recipe has them as tables by their names.
        ("array of tables", _) => json!({ "type": ["array", "object"] }),
        ("name, or a table with one name", _) => json!({ "type": ["string", "object"] }),
        _ if MIXED.iter().any(|beginning| takes.starts_with(beginning)) => json!({}),
        _ if takes.starts_with("array of two numbers") => json!({ "type": "array", "items": { "type": "number" } }),
        _ if takes.starts_with("integer") => json!({ "type": "integer", "minimum": 0 }),
        _ if takes.contains("number") => json!({ "type": "number" }),
        _ => panic!("what does an editor expect of `{takes}`?"),
    }
}

fn word(text: &str) -> Option<&str> {
    text.strip_prefix('`')?.strip_suffix('`').filter(|word| !word.contains('`'))
}

/// Puts a key into the table that its dotted name says, unless it is there.
fn put(root: &mut Value, key: &str, property: Value) {
    let (outer, key) = key.split_once('.').map_or((None, key), |(outer, key)| (Some(outer), key));
    let properties = &mut root["properties"];
    if let Some(outer) = outer {
        if properties.get(outer).is_none() {
            properties[outer] = table(&format!("The table `[{outer}]`."));
        }
        put(&mut properties[outer], key, property);
    } else if properties.get(key).is_none() {
        properties[key] = property;
    }
}

fn table(description: &str) -> Value {
    json!({ "description": description, "type": "object", "additionalProperties": false, "properties": Map::new() })
}
