//! `init-model` with what it can't work with, and a model that it makes without a tokenizer.

use insta::assert_snapshot;
use serde_json::json;

use super::place::{Place, Said};

fn init(place: &Place, config: &str, text: &str, out: &str) -> Said {
    place.run(&["init-model", "--config", config, "--tokenizer-from", text, "--out", out])
}

/// With a text from which a vocabulary of the model's size can be learnt.
fn place() -> Place {
    let place = Place::new();
    let words: Vec<String> = (0..3000).map(|i| (i * 7919 % 4096).to_string()).collect();
    place.write("text.txt", words.join(" "));
    place
}

#[test]
fn a_directory_with_something_in_it() {
    let place = place();
    let before = place.names("adapter");
    assert_snapshot!(init(&place, "model/config.json", "text.txt", "adapter").refused(2), @r"
    error: `adapter` exists and is not empty

    hint: choose another `--out`, or empty the directory
    ");
    assert_eq!(place.names("adapter"), before);
    init(&place, "model/config.json", "text.txt", "new").done();
    place.check(&["model.path=new"]).done();
}

#[test]
fn files_that_are_missing() {
    let place = place();
    assert_snapshot!(init(&place, "nowhere.json", "text.txt", "new").refused(3), @r"
    error: cannot read `nowhere.json`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
    assert_snapshot!(init(&place, "model/config.json", "nowhere.txt", "new").refused(3), @r"
    error: cannot read `nowhere.txt`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
    assert!(!place.path("new").exists());
}

#[test]
fn too_little_text() {
    let place = place();
    assert_snapshot!(init(&place, "model/config.json", "recipe.toml", "new").refused(3), @r"
    error: the texts give a vocabulary of 352 tokens, expected 512

    hint: give more text, or ask for a smaller vocabulary (at least 260)
    ");
    place.edit_json("model/config.json", json!({"vocab_size": 10}));
    assert_snapshot!(init(&place, "model/config.json", "text.txt", "new").refused(3), @r"
    error: the texts give a vocabulary of 260 tokens, expected 10

    hint: give more text, or ask for a smaller vocabulary (at least 260)
    ");
}

#[test]
fn a_place_that_is_no_directory() {
    let place = place();
    let before = place.read("text.txt");
    assert_snapshot!(init(&place, "model/config.json", "text.txt", "text.txt").refused(1), @r"
    error: cannot make `text.txt`
    cause: File exists (os error 17)

    hint: something else stands there: check whether a file or a directory is meant
    ");
    assert_eq!(place.read("text.txt"), before);
}

#[test]
fn a_model_without_a_tokenizer_learns_token_ids() {
    let place = Place::new();
    place.run(&["init-model", "--config", "model/config.json", "--out", "new"]).done();
    assert_eq!(place.names("new"), ["config.json", "generation_config.json", "model.safetensors"]);
    place.edit_recipe("path = \"model\"", "path = \"new\"");
    let run = ["finetune-lora", "--recipe", "recipe.toml", "--out", "run", "--set", "train.max_steps=1"];
    place.run(&[&run[..], &["--set", "data.validation=train.jsonl"]].concat()).done();
    assert!(place.run(&["evaluate", "run"]).done().out.contains("accuracy"));
}
