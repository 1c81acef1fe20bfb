//! The tables of `docs/reference/recipe.md`: every key, and what other programs call it.

use super::alias::FLAT;
use super::foreign::FOREIGN;
use super::plan::{TABLES, dotted_keys};
use super::suggest::ADVICE;
use super::table::RecipeKey;

/// The Markdown tables of the reference, in their order: one for each table of the recipe, then what stands at the top of the file,
/// other names of keys, other names of values, keys whose meaning depends on their value, and keys that are refused with advice.
pub fn reference() -> Vec<String> {
    let keys = || dotted_keys().map(|(name, key)| (code(&name), key));
    let names = keys().filter(|(_, key)| !key.text.also.is_empty()).map(|(key, of)| vec![key, codes(of.text.also)]);
    let flat = format!("`kv_cache.KEY` for the keys {}", codes(FLAT));
    let of_policy = [
        vec!["`kv_cache.policy`, `kv_cache.buffer`".to_owned(), "`kv_cache.name`, as in `\"h2o-torch-quantized8\"`".to_owned()],
        vec!["`kv_cache.policy.NAME.KEY`".to_owned(), flat],
    ];
    let words =
        keys().flat_map(|(key, of)| of.text.words.iter().map(move |(word, others)| vec![key.clone(), code(word), codes(others)]));
    let meanings = FOREIGN.iter().map(|(key, value, meaning)| vec![code(&format!("{key} = {value}")), meaning.to_string()]);
    let advice = ADVICE.iter().map(|(key, advice)| vec![code(key), (*advice).to_owned()]);
    let mut found: Vec<String> = TABLES.iter().map(|table| table_of(&table.keys)).collect();
    found.push(markdown(&["key", "also accepted"], names.chain(of_policy)));
    found.push(markdown(&["key", "value", "also accepted"], words));
    found.push(markdown(&["key", "meaning"], meanings));
    found.push(markdown(&["key", "what to do"], advice));
    found
}

fn table_of(keys: &[RecipeKey]) -> String {
    let rows = keys.iter().map(|key| {
        let meaning = key.text.meaning.trim().to_owned();
        vec![code(&key.text.name), key.takes.clone(), key.default.clone(), meaning]
    });
    markdown(&["key", "type", "default", "meaning"], rows)
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
