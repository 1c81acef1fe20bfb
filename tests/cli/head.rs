//! Heads and targets that don't belong together, and labels that are no classes.

use insta::assert_snapshot;

use super::place::{Place, classified, row};

const CLASSIFY: &str = "head.kind=seq_classification_on_logits";

fn classes() -> Place {
    let place = Place::new();
    place.write("train.jsonl", (0..4).map(classified).collect::<String>());
    place.check(&[CLASSIFY, "head.label_tokens=[40, 41, 42, 43]"]).done();
    place
}

#[test]
fn a_label_that_is_not_one_token() {
    assert_snapshot!(classes().check(&[CLASSIFY, "head.labels=[\"A\", \"longer label\"]"]).refused(3), @r"
    error: label `longer label` is 7 tokens [382, 81, 360, 85, 355, 314, 79], expected exactly 1

    hint: choose labels that are one token each, or give token ids in `head.label_tokens`
    ");
}

#[test]
fn labels_that_are_no_classes() {
    let place = classes();
    assert_snapshot!(place.check(&[CLASSIFY]).refused(2), @r#"
    error: `head.kind = "seq_classification_on_logits"` needs classes
      --> --set head.kind=seq_classification_on_logits

    hint: write `labels = ["A", "B", "C", "D"]`, or `label_tokens = […]`
    "#);
    assert_snapshot!(place.check(&[CLASSIFY, "head.label_tokens=[40, 40]"]).refused(2), @r"
    error: `head.label_tokens` lists 40 twice
      --> --set head.label_tokens=[40, 40]

    hint: list two classes or more, and give each a token of its own
    ");
    assert_snapshot!(place.check(&[CLASSIFY, "head.label_tokens=[40, 41, 42, 999]"]).refused(3), @r"
    error: a label of the head: token id 999 is not below the model's `vocab_size` 512

    hint: use token ids of the model's own tokenizer
    ");
    assert_snapshot!(place.check(&[CLASSIFY, "head.label_tokens=[40, 41]"]).refused(3), @r#"
    error: 2 of 4 rows of the data files cannot be read:
      `<dir>/train.jsonl:3`: field `label`: expected a class from 0 to 1, found 2
      `<dir>/train.jsonl:4`: field `label`: expected a class from 0 to 1, found 3

    hint: repair them, or leave them out with `data.on_bad_row = "drop"`, which counts them
    "#);
}

#[test]
fn targets_of_another_head() {
    let place = Place::new();
    place.write("train.jsonl", classified(0));
    assert_snapshot!(place.check(&[]).refused(3), @r"
    error: `<dir>/train.jsonl:1`: field `label`: expected `labels` (one per token), as the head `next_token` needs them, found the class `label` 0

    hint: correct the field, or remove the sample
    ");
    place.write("train.jsonl", row(0));
    assert_snapshot!(place.check(&[CLASSIFY, "head.label_tokens=[40, 41]"]).refused(3), @r#"
    error: `<dir>/train.jsonl:1`: field `label` is missing, others are `labels`

    hint: check `data.format` against what the file holds; a column of another name is named as in `data.columns = { prompt = "question" }`
    "#);
}
