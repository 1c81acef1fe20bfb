//! `score`: metrics of a file of answers, and what is said about files that have none.

use insta::assert_snapshot;

use super::place::{Place, Said};

fn score(content: impl AsRef<[u8]>, more: &[&str]) -> Said {
    let place = Place::new();
    place.write("answers.jsonl", content);
    place.run(&[&["score", "answers.jsonl"], more].concat())
}

/// A mark in front of the file, ends of lines of another system, a blank line, and no end of the last line.
const ANSWERS: &str = "\u{feff}{\"prediction\": \"Yes, Zürich\", \"references\": [\"zürich!\"], \"length\": \"short\"}\r\n \r\n\
    {\"prediction\": \"I think.\\nAnswer: Lima\\nor 東京\", \"references\": [\"Lima\", \"Quito\"], \"length\": \"long\", \"more\": 1}\r\n\
    {\"prediction\": \"\", \"references\": [\"no\"], \"length\": \"short\"}";

#[test]
fn rows_and_means() {
    let said = score(ANSWERS, &["--metrics", "f1,ruler_all", "--metrics", "rouge_l", "--format", "json"]).done();
    assert_snapshot!(said.out.trim_end(), @r#"
    {"row":0,"scores":{"f1":0.6666666666666666,"ruler_all":0.0,"rouge_l":0.8}}
    {"row":1,"scores":{"f1":0.2857142857142857,"ruler_all":0.5,"rouge_l":0.33333333333333337}}
    {"row":2,"scores":{"f1":0.0,"ruler_all":0.0,"rouge_l":0.0}}
    {"rows":3,"means":{"f1":0.31746031746031744,"ruler_all":0.16666666666666666,"rouge_l":0.37777777777777777}}
    "#);
    let said = score(ANSWERS, &["--metrics", "exact_match,f1", "--answer-cue", "answer:", "--by", "length"]).done();
    assert_snapshot!(said.out.trim_end(), @r"
    | rows of      | rows | exact_match |     f1 |
    |--------------|------|-------------|--------|
    | length long  |    1 |      1.0000 | 1.0000 |
    | length short |    2 |      0.0000 | 0.3333 |
    | all          |    3 |      0.3333 | 0.5556 |
    ");
    let said = score(ANSWERS, &["--metrics", "ruler_part", "--by", "length", "--format", "json"]).done();
    assert_snapshot!(said.out.lines().last().unwrap_or_default(), @r#"{"rows":3,"means":{"ruler_part":0.3333333333333333},"by":{"length":{"long":{"rows":1,"means":{"ruler_part":1.0}},"short":{"rows":2,"means":{"ruler_part":0.0}}}}}"#);
}

#[test]
fn metrics_that_are_none() {
    let error = score(ANSWERS, &["--metrics", "f1,rogue_l"]).misused();
    assert!(
        error.starts_with("error: invalid value 'rogue_l' for '--metrics <METRIC>'\n  [possible values: exact_match, "),
        "{error}"
    );
    assert!(error.contains("\n  tip: a similar value exists: 'rouge_l'\n"), "{error}");
    score(ANSWERS, &[]).misused();
    assert_snapshot!(score(ANSWERS, &["--metrics", "f1,f1"]).refused(2), @r"
    error: `--metrics` names `f1` twice

    hint: name each metric once
    ");
}

#[test]
fn rows_that_cannot_be_scored() {
    let error = |line: &str, more: &[&str]| {
        let content = format!("{{\"prediction\": \"1\", \"references\": [\"Paragraph 1\"], \"domain\": \"x\"}}\n\n{line}\n");
        let said = score(content, &[&["--metrics", "f1,retrieval"], more].concat()).refused(3);
        let (error, hint) = said.split_once("\n\n").unwrap_or_default();
        let expected = "each line is a JSON object with `prediction`, a text, `references`, a list of texts, and the fields that `--by` names";
        assert_eq!(hint.trim_end(), format!("hint: {expected}"));
        error.replace("error: `answers.jsonl:3`", "")
    };
    for (line, expected) in [
        (r#"{"references": ["Paragraph 1"]}"#, ": field `prediction` is missing, others are `references`"),
        (r#"{"prediction": 3, "references": ["Paragraph 1"]}"#, ": field `prediction`: expected a string, found a number"),
        (r#"{"prediction": "x"}"#, ": field `references` is missing"),
        (
            r#"{"prediction": "x", "references": []}"#,
            ": field `references`: expected an array of at least 1 string, found an empty array",
        ),
        (
            r#"{"prediction": "x", "references": "x"}"#,
            ": field `references`: expected an array of at least 1 string, found a string",
        ),
        (
            r#"{"prediction": "x", "references": ["x", null]}"#,
            ": field `references`: expected an array of at least 1 string, found null at index 1",
        ),
        (
            r#"{"prediction": "x", "references": ["x"]}"#,
            ": field `references`: expected `Paragraph N` for `retrieval`, found `x`",
        ),
        (r#"["x"]"#, ": expected a JSON object, found an array"),
        (r#"{"prediction": "x""#, " is not JSON: EOF while parsing an object at column 18"),
    ] {
        assert_eq!(error(line, &[]), expected);
    }
    let line = r#"{"prediction": "x", "references": ["Paragraph 1"]}"#;
    assert_eq!(error(line, &["--by", "domain"]), ": field `domain` is missing");
}

#[test]
fn files_without_a_row() {
    assert_snapshot!(score("\n", &["--metrics", "f1"]).refused(3), @r"
    error: `answers.jsonl` holds no samples, expected at least 1

    hint: put at least one sample into the file, or name another file
    ");
    let place = Place::new();
    assert!(
        place.run(&["score", "nowhere.jsonl", "--metrics", "f1"]).refused(3).starts_with("error: cannot read `nowhere.jsonl`")
    );
}
