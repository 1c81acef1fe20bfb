//! `kvtune data`: rows are counted, shown and written out, with a tokenizer and a configuration alone.

use insta::assert_snapshot;
use serde_json::Value;

use super::place::{NUM_ROWS, Place, ROW_LEN, Said};

/// A place of texts, one of which is bad, one too long and one there twice; the model has no weights.
fn place() -> Place {
    let place = Place::new();
    let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
    std::fs::copy(model.join("tokenizer.json"), place.path("model/tokenizer.json")).unwrap();
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    let long = "word ".repeat(50);
    let rows = [
        "{\"prompt\": \"the cache\", \"completion\": \" holds\"}",
        "{\"prompt\": \"the cache\"}",
        &format!("{{\"prompt\": \"{long}\", \"completion\": \" end\"}}"),
        "{\"prompt\": \"the cache\", \"completion\": \" holds\"}",
    ];
    place.write("texts.jsonl", rows.join("\n"));
    place.edit_recipe("format = \"tokens\"", "");
    place.edit_recipe("train = \"train.jsonl\"", "train = \"texts.jsonl\"\nmax_seq_length = 24");
    place
}

fn look(place: &Place, arguments: &[&str]) -> Said {
    place.run(&[&["data", "recipe.toml"][..], arguments].concat())
}

#[test]
fn every_row_is_counted() {
    let said = look(&place(), &["--set", "data.on_too_long=truncate", "--set", "data.on_bad_row=drop", "--show", "1"]).done();
    assert_snapshot!(said.out, @r"
    ── `<dir>/texts.jsonl:1`: 10 tokens, 5 trained
    the cache⟦ holds<|endoftext|>⟧

    | rows                              | count |
    |-----------------------------------|-------|
    | read                              |     4 |
    | bad                               |     1 |
    | dropped as too long               |     0 |
    | dropped, nothing to cut           |     0 |
    | used, cut                         |     1 |
    | used whole                        |     2 |
    | with the tokens of an earlier one |     1 |
    | tokens that are used              |    44 |
    | tokens that are trained           |    15 |
    | tokens that are cut out           |   231 |
    | tokens of the longest sample      |   255 |
         ≤ 16 tokens        2 ████████████████████████████████████████
         ≤ 32 tokens        0
         ≤ 64 tokens        0
        ≤ 128 tokens        0
        ≤ 256 tokens        1 ████████████████████
    ");
    assert_snapshot!(said.err, @r"
    `data.format` is `prompt-completion` by the fields `prompt`, `completion` of `<dir>/texts.jsonl:1`
    warning: `<dir>/texts.jsonl:2`: field `completion` is missing
    ");
}

/// Also where a row labels its first token, which nothing predicts.
#[test]
fn as_many_tokens_are_trained_as_a_run_counts() {
    let place = Place::new();
    let said = look(&place, &["--show", "1", "--dump", "rows.jsonl"]).done().out;
    place.finetune(&[]).done();
    let of_file = |name: &str| String::from_utf8(place.read(name)).unwrap();
    let targets = |line: &str| serde_json::from_str::<Value>(line).unwrap()["targets"].as_u64().unwrap();
    let trained: u64 = of_file("run/metrics.jsonl").lines().map(targets).sum();
    assert_eq!(trained, (NUM_ROWS * (ROW_LEN - 1)) as u64);
    assert!(said.contains(&format!("| tokens that are trained           | {trained:>5} |")), "{said}");
    assert!(said.starts_with("── `<dir>/train.jsonl:1`: 41 tokens, 40 trained\n") && !said.contains("\n⟦"), "{said}");
    let first = of_file("rows.jsonl").lines().all(|row| serde_json::from_str::<Value>(row).unwrap()["labels"][0] == -100);
    assert!(first, "{}", of_file("rows.jsonl"));
}

#[test]
fn data_sets_are_counted_by_their_names() {
    let place = place();
    let row = |index: usize| format!("{{\"text\": \"the cache {index}\"}}\n");
    place.write("books.jsonl", (0..6).map(row).collect::<String>());
    place.write("held-out.jsonl", (4..7).map(row).collect::<String>());
    place.edit_recipe("train = \"texts.jsonl\"", "on_bad_row = \"drop\"\non_too_long = \"drop\"");
    place.edit_recipe(
        "validation_fraction = 0\n",
        "validation_fraction = 0\n[[data.sets]]\npath = \"texts.jsonl\"\n[[data.sets]]\n\
        path = \"books.jsonl\"\nvalidation = \"held-out.jsonl\"\nweight = 1.5\n",
    );
    let said = look(&place, &[]).done().out;
    assert!(said.contains("data set `texts`, weight 1\n") && said.contains("data set `books`, weight 1.5\n"), "{said}");
    assert_eq!(said.matches("| held out, and trained on, too ").count(), 1, "{said}");
    assert!(said.contains("| held out, and trained on, too     |     2 |"), "{said}");
    let held_out = look(&place, &["--split", "validation"]).done().out;
    assert!(held_out.contains("| used whole                        |     3 |") && !held_out.contains("texts"), "{held_out}");
    std::fs::copy(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2/model.safetensors"),
        place.path("model/model.safetensors"),
    )
    .unwrap();
    let checked = place.check(&[]).done().out;
    assert!(checked.contains("data set `books`: 6 training samples × 1.5 = 9 an epoch, 3 validation samples"), "{checked}");
    assert!(
        checked.contains("11 training samples, 3 validation samples\nwarning: 2 validation samples also for training"),
        "{checked}"
    );
}

#[test]
fn a_row_that_would_stop_the_run_is_an_error() {
    assert_snapshot!(look(&place(), &["--set", "data.on_too_long=drop"]).refused(3), @r#"
    error: `<dir>/texts.jsonl:2`: field `completion` is missing

    hint: check `data.format` against what the file holds; a column of another name is named as in `data.columns = { prompt = "question" }`
    "#);
    // What a run would not drop stops it, whatever becomes of bad rows.
    let error = look(&place(), &["--set", "data.on_bad_row=drop"]).refused(3);
    assert!(error.starts_with("error: `<dir>/texts.jsonl:3`: 255 tokens, expected at most 24"), "{error}");
    let none = ["--split", "validation", "--set", "data.validation_fraction=0"];
    assert_snapshot!(look(&place(), &none).refused(2), @r"
    error: the recipe holds out no validation samples

    hint: set `data.validation` or `data.validation_fraction`, or leave `--split` out
    ");
}

#[test]
fn samples_that_are_drawn_to_validate_are_shown_alone() {
    let keys = ["--set", "data.on_too_long=drop", "--set", "data.on_bad_row=drop", "--set", "data.validation_fraction=0.5"];
    let said = look(&place(), &[&["--split", "validation"], &keys[..]].concat()).done();
    assert!(said.out.contains("| read                              |     1 |"), "{}", said.out);
}

#[test]
fn a_dump_has_a_line_for_every_row() {
    let place = place();
    let said = look(&place, &["--dump", "rows.jsonl"]).done();
    assert!(said.err.contains("warning: `<dir>/texts.jsonl:2`: field `completion` is missing"), "{}", said.err);
    assert!(said.out.contains("| too long, which stops a run       |     1 |"), "{}", said.out);
    let text = String::from_utf8(place.read("rows.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.iter().map(|row| row["row"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!((&rows[0]["text"], &rows[0]["input_ids"]), (&"the cache holds".into(), &rows[3]["input_ids"]));
    let (ids, labels) = (rows[0]["input_ids"].as_array().unwrap(), rows[0]["labels"].as_array().unwrap());
    let trained = labels.iter().filter(|&label| *label != -100).count();
    assert!(ids.len() == labels.len() && labels[0] == -100 && labels[ids.len() - trained..] == ids[ids.len() - trained..]);
    assert!(rows[1]["error"].as_str().unwrap().contains("field `completion` is missing"));
    assert!(rows[1].get("labels").is_none() && rows[2]["error"].as_str().unwrap().contains("tokens, expected at most 24"));
    // Beside the table, where standard output is a file.
    let both = std::fs::File::create(place.path("both")).unwrap();
    assert!(place.command(&["data", "recipe.toml", "--dump", "/dev/stdout"]).stdout(both).output().unwrap().status.success());
    let both = String::from_utf8(place.read("both")).unwrap();
    assert!(both.starts_with(&text) && both.ends_with(&said.out), "{both}");
    assert!(look(&place, &["--dump", "no/such/rows.jsonl"]).refused(1).contains("cannot create"));
}

#[test]
fn a_dump_never_takes_the_place_of_what_it_reads() {
    let place = Place::new();
    let before = place.read("train.jsonl");
    let error = place.run(&["data", "recipe.toml", "--dump", "train.jsonl"]).refused(2);
    assert!(error.contains("it is one of the data files"), "{error}");
    assert_eq!(place.read("train.jsonl"), before);
    assert!(!place.names("").iter().any(|name| name.contains(".tmp-")), "{:?}", place.names(""));
}

#[test]
fn files_are_shown_without_a_recipe() {
    let place = place();
    place.write(
        "qa.jsonl",
        "{\"id\": \"1\", \"question\": \"the cache\", \"answer\": \" holds\"}\n{\"question\": \"key\", \"answer\": null}\n[\n",
    );
    let said = place.run(&["data", "qa.jsonl", "--show", "1"]).done();
    assert_snapshot!(said.out, @r#"
    ── `qa.jsonl:1`
    {
      "id": "1",
      "question": "the cache",
      "answer": " holds"
    }

    | rows | count |
    |------|-------|
    | read |     3 |
    | bad  |     1 |
          ≤ 4 characters        1 ████████████████████████████████████████
          ≤ 8 characters        0
         ≤ 16 characters        1 ████████████████████████████████████████
    | column   | rows | holds    | characters of the longest |
    |----------|------|----------|---------------------------|
    | id       | 1    | a string | 1                         |
    | question | 2    | a string | 9                         |
    | answer   | 1    | a string | 6                         |
"#);
    assert_snapshot!(said.err, @r"
    warning: `qa.jsonl:3` is not JSON: EOF while parsing a list at column 1
    `data.format` is `prompt-completion` by the columns `answer` as `completion`, `question` as `prompt` of `qa.jsonl:1`; not read: `id`
    add `--model DIR` to count tokens, and to see which of them are trained
    ");
    let said = place.run(&["data", "qa.jsonl", "--model", "model", "--show", "1"]).done();
    assert!(
        said.out.contains("the cache⟦ holds<|endoftext|>⟧") && said.out.contains("| tokens that are trained           |     5 |"),
        "{}",
        said.out
    );
    assert!(said.err.contains("not read: `id`") && said.err.contains("`<dir>/qa.jsonl:2`"), "{}", said.err);
    place.write("squad.jsonl", "{\"context\": \"some words\", \"question\": \"a b\", \"answer\": \"c\"}");
    let error = place.run(&["data", "squad.jsonl"]).refused(3);
    assert!(error.contains("columns = { prompt = \"question\", completion = \"answer\" }"), "{error}");
    let error = place.run(&["data", "qa.jsonl", "--dump", "x.jsonl"]).refused(2);
    assert!(error.contains("`--model DIR`"), "{error}");
}
