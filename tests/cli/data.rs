//! Data files that can't be used: the error names the file, and the line where there is one.

use insta::assert_snapshot;
use serde_json::json;

use super::place::{Place, row};

/// The error for a training file of this content.
fn refused(content: impl AsRef<[u8]>) -> String {
    let place = Place::new();
    place.write("train.jsonl", content);
    place.check(&[]).refused(3)
}

#[test]
fn empty() {
    assert_snapshot!(refused(""), @r"
    error: `<dir>/train.jsonl` holds no samples, expected at least 1

    hint: put at least one sample into the file, or name another file
    ");
    assert_snapshot!(refused("\n\n"), @r"
    error: `<dir>/train.jsonl` holds no samples, expected at least 1

    hint: put at least one sample into the file, or name another file
    ");
}

#[test]
fn missing_or_a_directory() {
    let place = Place::new();
    assert_snapshot!(place.check(&["data.train=nowhere.jsonl"]).refused(3), @r"
    error: cannot read `<dir>/nowhere.jsonl`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
    std::fs::create_dir(place.path("folder")).unwrap();
    assert_snapshot!(place.check(&["data.train=folder"]).refused(3), @r"
    error: `<dir>/folder`: the folder holds no files of data for the split `train`

    hint: name a file, a folder of files (train, validation, test), a folder saved by `datasets`, or a pattern such as `data/*.jsonl`
    ");
    assert_snapshot!(place.check(&["data.validation=nowhere.jsonl"]).refused(3), @r"
    error: cannot read `<dir>/nowhere.jsonl`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
}

#[test]
fn a_line_that_is_not_json() {
    assert_snapshot!(refused(format!("{}{{oops\n{}", row(0), row(1))), @r"
    error: `<dir>/train.jsonl:2` is not JSON: key must be a string at column 2

    hint: repair it; a file of texts holds a JSON object a line, or one JSON array of objects
    ");
    assert_snapshot!(refused([row(0).as_bytes(), b"\xff\xfe\n"].concat()), @r#"
    error: `<dir>/train.jsonl:2`: byte 1 is 0xff, which is not UTF-8

    hint: repair them, or leave them out with `data.on_bad_row = "drop"`, which counts them
    "#);
    assert_snapshot!(refused("[".repeat(100_000)), @r"
    error: record 0 (from 0) of `<dir>/train.jsonl` is not JSON: recursion limit exceeded at line 1 column 128

    hint: repair it; a file of texts holds a JSON object a line, or one JSON array of objects
    ");
}

#[test]
fn a_line_of_another_shape() {
    assert_snapshot!(refused("[1]\n"), @r"
    error: record 0 (from 0) of `<dir>/train.jsonl`: expected a JSON object, found a number

    hint: check `data.format` against what the file holds
    ");
    assert_snapshot!(refused("{\"input_ids\": [1, 2]}\n"), @r#"
    error: `<dir>/train.jsonl:1`: field `labels` is missing

    hint: check `data.format` against what the file holds; a column of another name is named as in `data.columns = { prompt = "question" }`
    "#);
    assert_snapshot!(refused("{\"input_ids\": [1, 2], \"labels\": [1]}\n"), @r"
    error: `<dir>/train.jsonl:1`: field `labels`: expected 2 entries, one per token, found 1

    hint: correct the field, or remove the sample
    ");
    assert_snapshot!(refused("{\"input_ids\": [1, 2.5], \"labels\": [1, 2]}\n"), @r"
    error: `<dir>/train.jsonl:1`: field `input_ids`: expected integers from 0 up, found 2.5 at index 1

    hint: correct the field, or remove the sample
    ");
}

#[test]
fn a_field_that_the_format_does_not_have() {
    let place = Place::new();
    place.write("train.jsonl", "{\"text\": \"the cache\", \"body\": \"holds\"}\n");
    place.edit_recipe("format = \"tokens\"", "format = \"text\"\ncolumns = { txt = \"body\" }");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: `data.columns` names the field `txt`, which `text` does not have
     --> recipe.toml:8:1
      |
    8 | columns = { txt = "body" }
      | ^^^^^^^

    hint: choose `text` or `label`, with its column behind it, as in `columns = { text = "NAME" }`
    "#);
    // The rows tell it.
    place.edit_recipe("format = \"text\"\n", "");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: `data.columns` names the field `txt`, which `text` does not have

    hint: choose `text` or `label`, with its column behind it, as in `columns = { text = "NAME" }`
    "#);
}

#[test]
fn a_table_of_which_no_row_can_be_left_out() {
    let place = Place::new();
    let refused = |content: &[u8]| {
        place.write("train.csv", content);
        let set = ["data.format=prompt-completion", "data.train=train.csv", "data.max_line_bytes=40", "data.on_bad_row=drop"];
        place.check(&set).refused(3)
    };
    assert_snapshot!(refused(b"prompt,prompt,completion\na,b,c\n"), @r"
    error: `<dir>/train.csv:1`: two columns are called `prompt`

    hint: give each column a name of its own in the first line
    ");
    assert_snapshot!(refused(b"prompt,completion,\xe9\na,b,c\n"), @r"
    error: `<dir>/train.csv:1`: byte 1 is 0xe9, which is not UTF-8

    hint: convert it with `iconv -f ENCODING -t UTF-8 IN > OUT`
    ");
    assert_snapshot!(refused(b"prompt,completion\na,b\n\"a,b\n"), @r"
    error: `<dir>/train.csv:3`: a quote is opened here and never closed

    hint: close it, or double it where it is part of a value
    ");
    assert_snapshot!(refused(format!("prompt,completion\na,{}\n", "b".repeat(40)).as_bytes()), @r#"
    error: `<dir>/train.csv:2`: more than 40 bytes, which is the most that `data.max_line_bytes` allows

    hint: raise it, or shorten the row; of JSON lines such rows are left out with `data.on_bad_row = "drop"`
    "#);
}

#[test]
fn a_token_beyond_the_vocabulary() {
    assert_snapshot!(refused(format!("{}{{\"input_ids\": [1, 512], \"labels\": [1, 512]}}\n", row(0))), @r"
    error: `<dir>/train.jsonl:2`, index 1 of `input_ids`: token id 512 is not below the model's `vocab_size` 512

    hint: use token ids of the model's own tokenizer
    ");
}

#[test]
fn a_sample_without_a_target() {
    assert_snapshot!(refused(format!("{}{{\"input_ids\": [1, 2, 3], \"labels\": [1, -100, -100]}}\n", row(0))), @r"
    error: `<dir>/train.jsonl:2`: 3 tokens and none to predict: `labels` is -100 behind the first token

    hint: remove the sample, or label the tokens to train with their own ids in `labels`, at least one behind the first
    ");
}

#[test]
fn longer_than_the_model_allows() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({"max_position_embeddings": 40}));
    assert_snapshot!(place.check(&[]).refused(3), @r#"
    error: `<dir>/train.jsonl:1`: 41 tokens, expected at most 40

    hint: set `data.on_too_long` to "drop" or "truncate", raise `data.max_seq_length` as far as the model's positions allow, or have more positions with `model.rope_scaling`
    "#);
    assert_snapshot!(place.check(&["data.on_too_long=drop"]).refused(3), @r#"
    error: none of the 6 samples of `<dir>/train.jsonl` fits into 40 tokens, the shortest has 41

    hint: raise `data.max_seq_length` as far as the model allows, or set `data.on_too_long`: "truncate" shortens prompts, "split" cuts plain texts into windows
    "#);
    place.edit_json("model/config.json", json!({"max_position_embeddings": 41}));
    assert_snapshot!(place.check(&["data.max_seq_length=20"]).refused(3), @r#"
    error: `<dir>/train.jsonl:1`: 41 tokens, expected at most 20

    hint: set `data.on_too_long` to "drop" or "truncate", raise `data.max_seq_length` as far as the model's positions allow, or have more positions with `model.rope_scaling`
    "#);
    place.check(&["data.max_seq_length=41"]).done();
    assert!(place.check(&["data.max_seq_length=100"]).refused(2).contains("is 100, and the model has 41 positions"));
}

#[test]
fn longbench_that_is_none() {
    let place = Place::new();
    let refused = |name: &str, content: &[u8]| {
        place.write(name, content);
        place.check(&["data.format=longbench-v2", &format!("data.train={name}")]).refused(3)
    };
    let record = json!({"_id": "a", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short", "question": "q?",
        "choice_A": "1", "choice_B": "2", "choice_C": "3", "choice_D": "4", "answer": "A", "context": "some words"});
    let with = |key: &str, value: serde_json::Value| {
        let mut other = record.clone();
        other[key] = value;
        json!([record, other]).to_string()
    };
    assert_snapshot!(refused("e.json", with("answer", json!("E")).as_bytes()), @r"
    error: record 1 (from 0) of `<dir>/e.json`: field `answer`: expected one of `A`, `B`, `C`, `D`, found `E`

    hint: correct the field, or remove the sample
    ");
    assert_snapshot!(refused("n.json", with("context", json!(null)).as_bytes()), @r"
    error: record 1 (from 0) of `<dir>/n.json`: field `context`: expected a string, found null

    hint: correct the field, or remove the sample
    ");
    assert_snapshot!(refused("o.json", b"{\"a\": 1}"), @r"
    error: cannot read `<dir>/o.json` as JSON: expected an array of records, found one object

    hint: write an array of records, or an object a line in a file called `.jsonl`; `jq -c '.data[]' IN > OUT.jsonl` takes the records out of a field `data`
    ");
    assert_snapshot!(refused("t.json", &with("answer", json!("B")).as_bytes()[..200]), @r"
    error: record 1 (from 0) of `<dir>/t.json` is not JSON: EOF while parsing a string at line 1 column 200

    hint: repair it; a file of texts holds a JSON object a line, or one JSON array of objects
    ");
    assert_snapshot!(refused("b.parquet", b"PAR1junkPAR1"), @r"
    error: cannot read `<dir>/b.parquet` as Parquet: EOF: Parquet file too small. Size is 12 but need 1802401138

    hint: fetch or write the file again; nothing of it is used
    ");
}
