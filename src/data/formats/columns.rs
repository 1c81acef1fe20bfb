//! Formats that rows have under other names of their columns: those that people have often, and a proposal for the others.

use std::collections::BTreeMap;

use serde_json::Value;
use toml::Value as Toml;

use crate::data::rows::DataRow;

/// Columns of a prompt and of what follows it, by how often they are meant so.
const PROMPTS: [&str; 5] = ["prompt", "question", "query", "instruction", "input"];
const COMPLETIONS: [&str; 5] = ["completion", "answer", "response", "output", "chosen"];

/// What must not be learned, where rows compare two answers.
const REJECTED: &str = "rejected";

/// Letters of a name or a mark at most, in a script that sets no blanks between words.
const MAX_NAME: usize = 8;

/// The format of a row by what people call its columns, and whether another column holds words, which would be left out.
pub(super) fn known_by_others(row: &DataRow) -> Option<(&'static str, BTreeMap<String, String>, bool)> {
    let is_list = |name: &str| row.fields().get(name).is_some_and(Value::is_array);
    let of = |pairs: &[(&str, &str)]| pairs.iter().map(|(field, column)| ((*field).to_owned(), (*column).to_owned())).collect();
    let (format, columns): (_, BTreeMap<String, String>) = if is_list("conversation") {
        ("sharegpt", of(&[("conversations", "conversation")]))
    } else if let Some(input) = ["context", "input"].into_iter().find(|name| is_text(row, name))
        && ["instruction", "response"].iter().all(|name| is_text(row, name))
    {
        ("alpaca", of(&[("instruction", "instruction"), ("input", input), ("output", "response")]))
    } else {
        let prompt = PROMPTS.into_iter().find(|name| is_text(row, name))?;
        let completion = COMPLETIONS.into_iter().find(|name| is_text(row, name))?;
        ("prompt-completion", of(&[("prompt", prompt), ("completion", completion)]))
    };
    let says_more = |(name, value): (&String, &Value)| !columns.values().any(|column| column == name) && has_words(value);
    let has_more = row.fields().iter().any(says_more);
    Some((format, columns, has_more))
}

/// Whether a value may be part of what is trained: more than a name, a number or a mark.
fn has_words(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            text.contains(char::is_whitespace)
                || text.chars().filter(|letter| is_of_script_without_blanks(*letter)).nth(MAX_NAME).is_some()
        }
        Value::Array(values) => values.iter().any(|value| value.is_object() || has_words(value)),
        Value::Object(fields) => fields.values().any(has_words),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether a letter is of a script that sets no blanks between words: Thai, Lao, Myanmar, Khmer, Kana, Han.
fn is_of_script_without_blanks(letter: char) -> bool {
    matches!(letter, '\u{e00}'..='\u{eff}' | '\u{1000}'..='\u{109f}' | '\u{1780}'..='\u{17ff}' | '\u{3040}'..='\u{30ff}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

fn is_text(row: &DataRow, name: &str) -> bool {
    row.fields().get(name).is_some_and(Value::is_string)
}

/// A table `[data]` for a row, with the columns that most likely hold what is trained.
pub(super) fn proposal(row: &DataRow) -> Option<String> {
    let names = || row.fields().keys().map(String::as_str);
    let has = |name: &str, key: &str| row.fields()[name].get(0).is_some_and(|first| first.get(key).is_some());
    let texts: Vec<&str> = names().filter(|name| is_text(row, name)).collect();
    let among = |known: &[&str]| known.iter().find_map(|name| texts.iter().find(|text| text.eq_ignore_ascii_case(name))).copied();
    let (format, fields) = if let Some(name) = names().find(|name| has(name, "role")) {
        ("messages", vec![("messages", name)])
    } else if let Some(name) = names().find(|name| has(name, "from")) {
        ("sharegpt", vec![("conversations", name)])
    } else if let [text] = texts[..] {
        ("text", vec![("text", text)])
    } else {
        let prompt = among(&PROMPTS).or(texts.first().copied())?;
        let last = || texts.iter().rev().copied().find(|name| ![prompt, REJECTED].contains(name));
        let completion = among(&COMPLETIONS).filter(|name| *name != prompt).or_else(last)?;
        ("prompt-completion", vec![("prompt", prompt), ("completion", completion)])
    };
    let pairs: Vec<String> = fields.iter().map(|(field, column)| format!("{field} = {}", Toml::from(*column))).collect();
    let train = Toml::from(row.place().path.display().to_string());
    Some(format!("[data]\ntrain = {train}\nformat = \"{format}\"\ncolumns = {{ {} }}", pairs.join(", ")))
}
