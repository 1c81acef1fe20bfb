//! `init-model` and `make-demo-data` with what they can't work with.

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
    error: cannot open `nowhere.json`
    cause: No such file or directory (os error 2)

    hint: check the path; paths in a recipe are relative to the recipe's folder
    ");
    assert_snapshot!(init(&place, "model/config.json", "nowhere.txt", "new").refused(3), @r"
    error: cannot read `nowhere.txt`
    cause: No such file or directory (os error 2)

    hint: check the path; paths in a recipe are relative to the recipe's folder
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
    error: cannot create `text.txt`
    cause: File exists (os error 17)

    hint: something else stands there: check whether a file or a directory is meant
    ");
    assert_snapshot!(place.run(&["make-demo-data", "--out", "text.txt", "--max-tokens", "8192"]).refused(1), @r"
    error: cannot make `text.txt/corpus`
    cause: Not a directory (os error 20)

    hint: check that the folder exists, is writable and has space left
    ");
    assert_eq!(place.read("text.txt"), before);
}

#[test]
fn lengths_that_contradict_each_other() {
    let said = place().run(&["make-demo-data", "--out", "demo", "--min-tokens", "100", "--max-tokens", "50"]);
    assert_snapshot!(said.refused(2), @r"
    error: tokens per context: expected a range that begins above 0, found 100 to 50

    hint: correct the option
    ");
}

#[test]
fn three_tasks_and_a_model_without_a_tokenizer_that_learns_them() {
    let place = Place::new();
    let make = ["make-long-range-data", "--out", "tasks", "--tokens", "96", "--train-samples", "3", "--test-samples", "2"];
    assert!(place.run(&make).done().out.starts_with("wrote 1440 tokens of 512 words to `tasks/train.jsonl`"));
    assert_snapshot!(place.run(&make).refused(2), @r"
    error: `--out`: expected a directory without files of these names, found `tasks/train.jsonl`

    hint: correct the option
    ");
    assert_snapshot!(place.run(&["make-long-range-data", "--out", "others", "--tokens", "74"]).refused(2), @r"
    error: `--tokens`: expected at least 75, found 74

    hint: correct the option
    ");
    place.run(&["init-model", "--config", "model/config.json", "--out", "new"]).done();
    assert_eq!(place.names("new"), ["config.json", "generation_config.json", "model.safetensors"]);
    place.edit_recipe("path = \"model\"", "path = \"new\"");
    let data = ["data.train=tasks/train.jsonl", "data.validation=tasks/test-keys.jsonl"];
    let mut run = vec!["finetune-lora", "--recipe", "recipe.toml", "--out", "run", "--set", "train.max_steps=1"];
    run.extend(data.iter().flat_map(|set| ["--set", *set]));
    place.run(&run).done();
    assert!(place.run(&["evaluate", "run"]).done().out.contains("accuracy"));
}
