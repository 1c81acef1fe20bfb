//! Tokenizers that break down, are missing, or lack a token.

use std::fs;

use insta::assert_snapshot;
use serde_json::json;

use super::place::Place;

#[test]
fn a_tokenizer_whose_reader_panics() {
    let place = Place::new();
    let model = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]});
    place.write("model/tokenizer.json", json!({"version": "1.0", "added_tokens": [], "model": model}).to_string());
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: tokenizer `<dir>/model/tokenizer.json`: its reader broke down (range end index 2 out of range for slice of length 1)

    hint: fetch `tokenizer.json` again, or save it anew with the `tokenizers` library
    ");
}

#[test]
fn no_json() {
    let place = Place::new();
    place.write("model/tokenizer.json", "{\"version\": ");
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: tokenizer `<dir>/model/tokenizer.json`: EOF while parsing a value at line 1 column 12

    hint: fetch `tokenizer.json` again, or save it anew with the `tokenizers` library
    ");
}

#[test]
fn text_without_a_tokenizer() {
    let place = Place::new();
    fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    place.check(&[]).done();
    place.write("train.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    assert_snapshot!(place.check(&["data.format=prompt-completion"]).refused(3), @r#"
    error: text data needs a tokenizer, and the model has no `tokenizer.json`

    hint: put `tokenizer.json` into the model directory; without one train on token ids (`data.format = "tokens"`), and name classes by `head.label_tokens`
    "#);
}

#[test]
fn answers_without_a_tokenizer() {
    let place = Place::new();
    place.write("train.jsonl", "{\"input_ids\": [1, 2, 3, 4], \"labels\": [-100, -100, 3, 4]}\n".repeat(4));
    let set = ["data.validation_fraction=0.5", "eval.generate={ metrics = [\"f1\"] }"];
    place.check(&set).done();
    fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    let checked = place.check(&set).refused(3);
    assert_snapshot!(checked, @r"
    error: the text of an answer needs a tokenizer, and the model has no `tokenizer.json`

    hint: put `tokenizer.json` into the model directory: answers are compared as texts
    ");
    assert_eq!(place.on_cpu("plan", &set).refused(3), checked);
    assert_eq!(place.finetune(&set).refused(3), checked);
    let none = place.check(&[set[1]]).refused(2);
    assert!(none.starts_with("error: `eval.generate` is set, and no samples are held out"), "{none}");
    assert_eq!(place.on_cpu("plan", &[set[1]]).refused(2), none);
}

#[test]
fn no_end_of_sequence() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({"eos_token_id": null}));
    fs::remove_file(place.path("model/generation_config.json")).unwrap();
    fs::remove_file(place.path("model/tokenizer_config.json")).unwrap();
    place.write("train.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    assert_snapshot!(place.check(&["data.format=prompt-completion"]).refused(3), @r#"
    error: no `eos_token_id` in generation_config.json or config.json and no known `eos_token` in tokenizer_config.json of `<dir>/model`

    hint: add `"eos_token_id": N` to the model's generation_config.json
    "#);
}
