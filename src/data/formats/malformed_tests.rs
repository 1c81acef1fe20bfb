//! Ten rows of each format that are none: the error names file, row and field.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int32Array, ListArray, RecordBatch, StringArray, StructArray};
use arrow::datatypes::{DataType, Field, Int32Type};
use serde_json::{Value, json};

use super::tests::lines;
use crate::data::fixtures::{Fixture, letters};
use crate::recipe::HeadRecipe;

/// Each row beside a sound one is refused with its place and these words.
fn refused(format: &str, head: &HeadRecipe, sound: &Value, cases: &[(Value, &str)]) {
    for (row, words) in cases {
        let mut fixture = Fixture::new(format, lines(&[sound.clone(), row.clone()]));
        fixture.head.clone_from(head);
        let error = fixture.error();
        assert!(error.starts_with("`train.jsonl:2`") && error.contains(words), "{row}: {error}");
    }
}

#[test]
fn ten_texts_that_are_none() {
    let sound = json!({"text": "a b", "label": "A"});
    let cases = [
        (json!({"txt": "a"}), "field `text` is missing, others are `txt`"),
        (json!({"text": 7}), "`text`: expected a string, found a number"),
        (json!({"text": null}), "`text`: expected a string, found null"),
        (json!({"text": ["a"]}), "`text`: expected a string, found an array"),
        (json!({"text": {"a": 1}}), "`text`: expected a string, found an object"),
        (json!({"text": ""}), "`text`: expected a text to train on, found an empty one"),
        (json!({"text": "a", "image": "x.png"}), "field `image`: expected no pictures"),
        (json!([1]), "expected a JSON object, found an array"),
    ];
    refused("text", &HeadRecipe::NextToken, &sound, &cases);
    let cases = [
        (json!({"text": "a", "label": "E"}), "`label`: expected one of the labels `A`"),
        (json!({"text": "a", "label": 4}), "`label`: expected a class from 0 to 3, found 4"),
        (json!({"text": "a"}), "field `label` is missing"),
    ];
    refused("text", &letters(), &sound, &cases);
}

#[test]
fn ten_rows_of_ruler_that_are_none() {
    let sound = json!({"input": "a", "answer_prefix": " is", "outputs": ["1"]});
    let with = |field: &str, value: Value| {
        let mut row = sound.clone();
        row[field] = value;
        row
    };
    let cases = [
        (json!({"answer_prefix": " is", "outputs": ["1"]}), "field `input` is missing"),
        (json!({"input": "a", "outputs": ["1"]}), "field `answer_prefix` is missing"),
        (json!({"input": "a", "answer_prefix": " is"}), "field `outputs` is missing"),
        (with("input", json!(3)), "`input`: expected a string, found a number"),
        (with("input", json!(null)), "`input`: expected a string, found null"),
        (with("answer_prefix", json!(["x"])), "`answer_prefix`: expected a string, found an array"),
        (with("outputs", json!([])), "`outputs`: expected an array of at least 1 string, found an empty array"),
        (with("outputs", json!("1")), "`outputs`: expected an array of at least 1 string, found a string"),
        (with("outputs", json!(["1", 2])), "`outputs`: expected an array of at least 1 string, found a number at index 1"),
        (with("outputs", json!(null)), "`outputs`: expected an array of at least 1 string, found null"),
    ];
    refused("ruler", &HeadRecipe::NextToken, &sound, &cases);
    let error = Fixture::new("ruler", lines(&[sound])).classify().error();
    assert_eq!(error, "`data.format = \"ruler\"` has no classes, which the head asks for");
}

#[test]
fn ten_rows_of_helmet_that_are_none() {
    let sound = json!({"question": "q", "answers": ["a"], "ctxs": [{"title": "t", "text": "x"}]});
    let with = |field: &str, value: Value| {
        let mut row = sound.clone();
        row[field] = value;
        row
    };
    let pairs = |demos: Value| json!({"context": "c", "question": "q", "answer": "a", "num_kvs": 1, "demos": demos});
    let cases = [
        (json!({"question": "q", "answers": ["a"]}), "found fields of no family of HELMET (kilt, json_kv, msmarco, niah, icl, "),
        (with("ctxs", json!("x")), "`ctxs`: expected an array of passages"),
        (with("ctxs", json!(["x"])), "`ctxs`: expected objects, found \"x\" at index 0"),
        (with("ctxs", json!([{"title": "t"}])), "`ctxs`: expected a string as `text`, found none at index 0"),
        (with("answers", json!([])), "`answers`: expected an array of at least 1 string, found an empty array"),
        (with("answers", json!([1])), "`answers`: expected an array of at least 1 string, found a number at index 0"),
        (with("question", json!(1)), "`question`: expected a string, found a number"),
        (with("demos", json!([{"question": "q"}])), "field `ctxs` is missing"),
        (with("demos", json!([7])), "`demos`: expected objects, found 7 at index 0"),
        (pairs(json!([["a"]])), "`demos`: expected pairs of texts, found [\"a\"] at index 0"),
    ];
    refused("helmet", &HeadRecipe::NextToken, &sound, &cases);
}

#[test]
fn ten_pairs_that_are_none() {
    let sound = json!({"prompt": "a", "completion": "b"});
    let said = json!([{"role": "assistant", "content": "b"}]);
    let cases = [
        (json!({"prompt": "a"}), "field `completion` is missing"),
        (json!({"completion": "b"}), "field `prompt` is missing, others are `completion`"),
        (json!({"prompt": null, "completion": "b"}), "`prompt`: expected a string, found null"),
        (json!({"prompt": 1, "completion": "b"}), "`prompt`: expected a string, found a number"),
        (json!({"prompt": "a", "completion": ["b"]}), "`completion`: expected a string, found an array"),
        (json!({"prompt": ["a"], "completion": "b"}), "`prompt`: expected a string, found an array"),
        (json!({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}), "`completion`: expected a list of messages"),
        (json!({"prompt": [{"role": "user"}], "completion": said}), "`prompt`: message 0 (from 0): `content` is missing"),
        (
            json!({"prompt": "", "completion": ""}),
            "`completion`: expected a text to train on, as there is no prompt, found an empty one",
        ),
        (json!("a"), "expected a JSON object, found a string"),
    ];
    refused("prompt-completion", &HeadRecipe::NextToken, &sound, &cases);
}

#[test]
fn ten_rows_of_tokens_that_are_none() {
    let sound = json!({"input_ids": [1, 2], "labels": [-100, 2]});
    let cases = [
        (json!({"labels": [1]}), "field `input_ids` is missing"),
        (json!({"input_ids": [1, 2]}), "field `labels` is missing"),
        (json!({"input_ids": "1 2", "labels": [1, 2]}), "`input_ids`: expected an array of integers, found a string"),
        (json!({"input_ids": [1, -2], "labels": [1, 2]}), "`input_ids`: expected integers from 0 up, found -2 at index 1"),
        (json!({"input_ids": [1, 2.5], "labels": [1, 2]}), "found 2.5 at index 1"),
        (json!({"input_ids": [1, 512], "labels": [1, 512]}), "index 1 of `input_ids`: token id 512 is not below"),
        (json!({"input_ids": [1, 2], "labels": [1]}), "`labels`: expected 2 entries, one per token, found 1"),
        (json!({"input_ids": [1, 2], "labels": [1, 3]}), "`labels`: expected 2 (`input_ids[1]`) or -100, found 3 at index 1"),
        (json!({"input_ids": [1, 2], "labels": [1, null]}), "found null at index 1"),
        (json!({"input_ids": [1, 2], "label": 1}), "`label`: expected `labels` (one per token)"),
    ];
    refused("tokens", &HeadRecipe::NextToken, &sound, &cases);
}

#[test]
fn ten_rows_of_longbench_that_are_none() {
    let sound = json!({"context": "c", "question": "q", "choice_A": "1", "choice_B": "2", "choice_C": "3", "choice_D": "4", "answer": "A"});
    let with = |field: &str, value: Value| {
        let mut row = sound.clone();
        row[field] = value;
        row
    };
    let without = |field: &str| {
        let mut row = sound.clone();
        row.as_object_mut().unwrap().remove(field);
        row
    };
    let cases = [
        (without("context"), "field `context` is missing"),
        (without("choice_C"), "field `choice_C` is missing"),
        (without("answer"), "field `answer` is missing"),
        (with("question", json!(1)), "`question`: expected a string, found a number"),
        (with("choice_B", json!(null)), "`choice_B`: expected a string, found null"),
        (with("context", json!(["c"])), "`context`: expected a string, found an array"),
        (with("answer", json!("E")), "`answer`: expected one of `A`, `B`, `C`, `D`, found `E`"),
        (with("answer", json!("")), "`answer`: expected one of `A`, `B`, `C`, `D`, found ``"),
        (with("answer", json!(0)), "`answer`: expected a string, found a number"),
        (with("difficulty", json!(3)), "`difficulty`: expected a string, found a number"),
    ];
    refused("longbench-v2", &HeadRecipe::NextToken, &sound, &cases);
}

/// A parquet file, and the same columns as an Arrow stream.
fn tables(columns: Vec<(&str, ArrayRef)>) -> [(&'static str, Vec<u8>); 2] {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut parquet = parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut stream = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    stream.write(&batch).unwrap();
    stream.finish().unwrap();
    [("train.parquet", parquet.into_inner().unwrap()), ("train.arrow", stream.into_inner().unwrap())]
}

#[test]
fn ten_tables_whose_columns_are_of_another_kind() {
    let texts = |values: [Option<&str>; 2]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
    let sound = || texts([Some("a"), Some("b")]);
    let lists = |last: Vec<Option<i32>>| {
        let rows = [Some(vec![Some(1), Some(2)]), Some(last)];
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(rows)) as ArrayRef
    };
    let (pair, tokens) = ("prompt-completion", "tokens");
    let ids = || lists(vec![Some(3), Some(4)]);
    let one_field = StructArray::from(vec![(Arc::new(Field::new("a", DataType::Utf8, true)), sound())]);
    refuses(vec![
        (
            pair,
            vec![("prompt", sound()), ("completion", texts([Some("a"), None]))],
            "`completion`: expected a string, found null in a column of Utf8",
        ),
        (
            pair,
            vec![("prompt", texts([Some("a"), None])), ("completion", sound())],
            "`prompt`: expected a string, found null in a column of Utf8",
        ),
        (
            pair,
            vec![("prompt", sound()), ("completion", Arc::new(Int32Array::from(vec![1, 2])))],
            "`completion`: expected a string, found a number in a column of Int32",
        ),
        (
            pair,
            vec![("prompt", sound()), ("completion", Arc::new(BooleanArray::from(vec![true, false])))],
            "`completion`: expected a string, found a boolean in a column of Boolean",
        ),
        (
            pair,
            vec![("prompt", sound()), ("completion", ids())],
            "`completion`: expected a string, found an array in a column of List(",
        ),
        (
            pair,
            vec![("prompt", Arc::new(one_field)), ("completion", sound())],
            "`prompt`: expected a string, found an object in a column of Struct(",
        ),
        (pair, vec![("prompt", sound()), ("reply", sound())], "field `completion` is missing, others are `reply`"),
        (
            tokens,
            vec![("input_ids", ids()), ("labels", lists(vec![Some(3)]))],
            "`labels`: expected 2 entries, one per token, found 1",
        ),
        (
            tokens,
            vec![("input_ids", lists(vec![Some(-1), Some(3)])), ("labels", ids())],
            "`input_ids`: expected integers from 0 up, found -1 at index 0",
        ),
        (
            tokens,
            vec![("input_ids", lists(vec![None, Some(3)])), ("labels", ids())],
            "`input_ids`: expected integers from 0 up, found null at index 0",
        ),
    ]);
}

type NamedColumns = Vec<(&'static str, ArrayRef)>;

/// Each table is refused with these words, as either kind of file.
fn refuses(cases: Vec<(&'static str, NamedColumns, &str)>) {
    for (format, columns, words) in cases {
        for (name, content) in tables(columns) {
            let mut fixture = Fixture::new(format, "");
            fixture.recipe.train = fixture.write(name, content).into();
            let error = fixture.error();
            let (place, field) = (format!("record 1 (from 0) of `{name}`: "), words);
            assert!(error.contains(&place) && error.contains(field), "{name}, {words}: {error}");
        }
    }
}
