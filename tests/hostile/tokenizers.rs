//! Tokenizers that are none, that do not fit the model, or whose patterns explode.

use super::case::{Case, hold};
use super::ground::Ground;

const FILE: &str = "model/tokenizer.json";

fn key(key: &'static str, value: &'static str) -> Case {
    let make = move |ground: &Ground| {
        ground.with_texts();
        ground.set_json(FILE, key, value);
    };
    Case::new(format!("tokenizer {key} = {value}"), make).says(&["tokenizer.json"])
}

#[test]
fn keys() {
    hold([
        key("model", "{\"type\": \"Unheard\"}"),
        key("model", "null"),
        key("model", "7"),
        key("model", "{\"type\": \"BPE\", \"vocab\": {\"a\": -1}, \"merges\": []}"),
        key("model", "{\"type\": \"BPE\", \"vocab\": {\"a\": 4294967296}, \"merges\": []}"),
        key("model", "{\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [[\"x\", \"y\"]]}"),
        key("model", "{\"type\": \"BPE\", \"dropout\": 1.0, \"vocab\": {\"a\": 0}, \"merges\": []}").says(&["dropout"]),
        key("pre_tokenizer", "{\"type\": \"Unheard\"}"),
        key(
            "pre_tokenizer",
            "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(((\"}, \"behavior\": \"Isolated\", \"invert\": false}",
        ),
        key("normalizer", "{\"type\": \"Unheard\"}"),
        key("normalizer", "[]"),
        key("decoder", "7"),
        key("added_tokens", "{}"),
        key("added_tokens", "[{\"id\": -1, \"content\": \"a\"}]"),
    ]);
}

#[test]
fn files_that_are_none() {
    let file = |name: &str, bytes: &'static [u8]| {
        let make = move |ground: &Ground| {
            ground.with_texts();
            ground.write(FILE, bytes);
        };
        Case::new(name, make).says(&["tokenizer.json"])
    };
    hold([
        file("nothing", b""),
        file("an object", b"{}"),
        file("an array", b"[]"),
        file("no JSON", b"tokenizer"),
        file("no UTF-8", b"{\"version\": \"\xff\"}"),
        Case::new("no tokenizer", |ground: &Ground| {
            ground.with_texts();
            ground.remove(FILE);
        })
        .says(&["tokenizer.json"]),
    ]);
}

/// Patterns on which a matcher that goes back could take for ever, which it gives up soon; and replacements that double a text again and
/// again.
#[test]
fn explosions() {
    let split = |regex: &str| {
        format!("{{\"type\": \"Split\", \"pattern\": {{\"Regex\": {regex:?}}}, \"behavior\": \"Isolated\", \"invert\": false}}")
    };
    let replace = "{\"type\": \"Replace\", \"pattern\": {\"String\": \"a\"}, \"content\": \"aaaaaaaaaaaaaaaa\"}";
    let doubling = format!("{{\"type\": \"Sequence\", \"normalizers\": [{}]}}", [replace; 12].join(","));
    let long = format!("{{\"text\": \"{}!\"}}\n", "a".repeat(5000));
    let with = |name: &str, key: &'static str, value: String| {
        let long = long.clone();
        let make = move |ground: &Ground| {
            ground.with_rows("text", &long);
            ground.set_json(FILE, key, &value);
        };
        Case::new(name, make)
    };
    hold([
        with("a pattern that goes back", "pre_tokenizer", split("(?:(a|aa)+\\1?)+$")).code(0),
        with("a pattern with a reference back", "pre_tokenizer", split("(a*)*\\1(a*)*\\1b")).code(0),
        with("a pattern of many repetitions", "pre_tokenizer", split("((a{1,1000}){1,1000}){1,1000}")).says(&["tokenizer"]),
        with("a normaliser that doubles", "normalizer", doubling).says(&["tokenizer"]),
    ]);
}
