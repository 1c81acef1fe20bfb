//! `kvtune init`: what it proposes is accepted, evicts where samples are long, and needs no weights.

use serde_json::json;

use super::place::{Place, Said};

/// Rows of token ids, so many of each length.
fn rows(lengths: &[(usize, usize)]) -> String {
    let row = |length: usize| {
        let ids: Vec<usize> = (0..length).map(|i| 1 + i * 7 % 500).collect();
        format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n")
    };
    lengths.iter().flat_map(|&(count, length)| std::iter::repeat_n(row(length), count)).collect()
}

/// Proposes a recipe for `train.jsonl`, has it checked, and returns its text.
fn accepted(place: &Place) -> String {
    let said = place.run(&["init", "--model", "model", "--data", "train.jsonl", "--device", "cpu"]).done();
    save(place, &said);
    let checked: Said = place.run(&["check", "own.toml", "--device", "cpu"]).done();
    assert!(!checked.err.contains("warning"), "{}", checked.err);
    said.out
}

/// Keeps what was printed, with the directory of the test as it was.
fn save(place: &Place, said: &Said) {
    place.write("own.toml", said.out.replace("<dir>", &place.path("").canonicalize().unwrap().to_string_lossy()));
}

/// The value of a key, without the comment behind it.
fn value<'a>(recipe: &'a str, key: &str) -> &'a str {
    let line = recipe.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
    line.unwrap_or_else(|| panic!("no `{key}`:\n{recipe}")).split(" #").next().unwrap().trim()
}

#[test]
fn a_cache_that_the_longer_samples_overflow_is_proposed() {
    let place = Place::new();
    place.write("train.jsonl", rows(&[(12, 100), (6, 900), (2, 3000)]));
    let recipe = accepted(&place);
    let (cache, chunk): (usize, usize) =
        (value(&recipe, "cache_length").parse().unwrap(), value(&recipe, "chunk_size").parse().unwrap());
    assert!(cache < 900 && chunk <= cache, "{recipe}");
    assert!(recipe.contains("# 8 of 20 samples (40 %) are longer than the cache"), "{recipe}");
    assert!(recipe.contains("# 20 samples: 100 to 3000 tokens, half of them above 100, a tenth above"), "{recipe}");
    assert_eq!(
        ["format", "policy", "dtype", "max_seq_length"].map(|key| value(&recipe, key)),
        ["\"tokens\"", "{ h2o = { grace_period = 0.375, normalize_scores = true } }", "\"f32\"", "3000"]
    );
}

#[test]
fn where_nothing_is_long_nothing_is_evicted_and_the_recipe_says_so() {
    let place = Place::new();
    let recipe = accepted(&place);
    assert!(recipe.contains("# No sample is longer than 512 tokens"), "{recipe}");
    assert_eq!(["policy", "storage"].map(|key| value(&recipe, key)), ["\"dense\"", "\"growing\""]);
}

#[test]
fn samples_beyond_the_positions_and_bad_rows_are_counted_and_left_out() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({ "max_position_embeddings": 1024 }));
    place.write("train.jsonl", format!("{}{{\"input_ids\": [1, 9999], \"labels\": [1, 2]}}\n", rows(&[(12, 700), (3, 2000)])));
    let said = place.run(&["init", "--model", "model", "--data", "train.jsonl", "--device", "cpu"]).done();
    assert!(said.out.contains("# 3 of 15 samples are longer than the model's 1024 positions"), "{}", said.out);
    assert!(said.out.contains("# no samples: 1 rows, which `kvtune data` names"), "{}", said.out);
    assert_eq!(["max_seq_length", "on_too_long"].map(|key| value(&said.out, key)), ["1024", "\"drop\""]);
    save(&place, &said);
    place.run(&["check", "own.toml", "--device", "cpu"]).done();
}

#[test]
fn no_weights_are_needed_and_what_is_missing_is_said() {
    let place = Place::new();
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    place.run(&["init", "--model", "model", "--data", "train.jsonl", "--device", "cpu"]).done();
    let misused = place.run(&["init", "--model", "model"]).misused();
    assert!(misused.contains("--data <FILE>"), "{misused}");
    let refused = place.run(&["init", "--model", "nowhere", "--data", "train.jsonl", "--device", "cpu"]).refused(3);
    assert!(refused.contains("nowhere"), "{refused}");
}

#[test]
fn paths_that_are_given_stand_in_place_of_another_trainers() {
    let place = Place::new();
    place.write("theirs.yaml", "base_model: org/name\nadapter: lora\nlora_r: 4\nsequence_len: 64\ndatasets:\n- path: org/data\n");
    let said = place.run(&["init", "--from", "theirs.yaml", "--model", "model", "--data", "train.jsonl"]).done();
    assert_eq!(said.err, "");
    save(&place, &said);
    place.run(&["check", "own.toml", "--device", "cpu"]).done();
}
