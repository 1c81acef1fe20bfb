//! The format `tokens`: rows of token ids with `labels` per token, or one class `label`.
//!
//! `labels` follow Hugging Face's convention: entry `i` is `input_ids[i]` or -100, and the shift by one is ours. So do `attention_mask`, whose
//! zeros at both ends are pads, and `position_ids`, which count the others.

use std::ops::Range;

use serde_json::Value;

use super::format::RowFormat;
use crate::data::batch::IGNORE;
use crate::data::example::{Content, Example};
use crate::data::faults::{self, RowFault};
use crate::data::label_tokens::Classes;
use crate::data::rows::{DataRow, class};
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat =
    DataFormat { has_texts: false, ..DataFormat::of("tokens", "input_ids labels label attention_mask position_ids") };

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["input_ids"]],
    rank: 0,
    has_classes: true,
    ..RowFormat::new(FACTS, |reader, row| content(row, reader.classes, reader.encoder.vocab_size).map(Example::new))
};

const INTEGERS: &str = "an array of integers";

/// What a row says; every id is checked against the model's vocabulary.
fn content(row: &mut DataRow, classes: Option<&Classes>, vocab_size: usize) -> Result<Content, Fault> {
    let ids = ids(row, vocab_size)?;
    let seen = seen(row, ids.len())?;
    match classes {
        None => Ok(Content::Tokens { is_trained: labels(row, &ids)?[seen.clone()].to_vec(), ids: ids[seen].to_vec() }),
        Some(classes) => Ok(Content::TokensClass { class: class(row, classes.count)?, ids: ids[seen].to_vec() }),
    }
}

/// The tokens that are no pads by `attention_mask`; refused are holes in it, and `position_ids` of several sequences in one row.
fn seen(row: &mut DataRow, count: usize) -> Result<Range<usize>, Fault> {
    let mut column = |field| row.has(field).then(|| row.array(field, INTEGERS)).transpose();
    let (mask, positions) = (column("attention_mask")?, column("position_ids")?);
    for (field, values) in [("attention_mask", &mask), ("position_ids", &positions)] {
        if let Some(values) = values.as_ref().filter(|values| values.len() != count) {
            return Err(row.bad(field, format!("{count} entries, one per token"), values.len().to_string()));
        }
    }
    let mut seen = 0..count;
    if let Some(mask) = mask {
        let bit = |(index, value): (usize, &Value)| match value.as_u64().or(value.as_bool().map(u64::from)) {
            Some(bit) if bit < 2 => Ok(bit == 1),
            _ => Err(row.bad("attention_mask", "zeros and ones", format!("{value} at index {index}"))),
        };
        let mask: Vec<bool> = mask.iter().enumerate().map(bit).collect::<Result<_, Fault>>()?;
        let first = mask.iter().position(|is_seen| *is_seen);
        let first = first.ok_or_else(|| row.bad("attention_mask", "a token that is no pad", "zeros alone"))?;
        let last = mask.iter().rposition(|is_seen| *is_seen).unwrap_or(first);
        seen = first..last + 1;
        if let Some(hole) = mask[seen.clone()].iter().position(|is_seen| !is_seen) {
            return Err(row.bad("attention_mask", "zeros at its ends alone", format!("0 at index {}", first + hole)));
        }
    }
    let jump = positions.and_then(|positions| {
        let kept = &positions[seen.clone()];
        let at = (1..kept.len()).find(|at| kept[*at].as_i64() != kept[at - 1].as_i64().map(|before| before + 1))?;
        Some(format!("{} behind {} at index {}", kept[at], kept[at - 1], seen.start + at))
    });
    match jump {
        Some(found) => Err(row.bad("position_ids", "numbers that go up by one, as a row is one sequence", found)),
        None => Ok(seen),
    }
}

fn ids(row: &mut DataRow, vocab_size: usize) -> Result<Vec<u32>, Fault> {
    let values = row.array("input_ids", INTEGERS)?;
    if values.is_empty() {
        return Err(row.bad("input_ids", "at least 1 token id", "an empty array"));
    }
    let convert = |(index, value): (usize, &Value)| {
        let id = value.as_u64().ok_or_else(|| row.bad("input_ids", "integers from 0 up", format!("{value} at index {index}")))?;
        if id >= vocab_size as u64 || id > u64::from(u32::MAX) {
            let what = format!("{}, index {index} of `input_ids`", row.place());
            let message = faults::out_of_vocabulary(&what, id, vocab_size);
            return Err(RowFault::bad(row.place(), message, faults::OWN_TOKENIZER));
        }
        Ok(id as u32)
    };
    values.iter().enumerate().map(convert).collect()
}

fn labels(row: &mut DataRow, ids: &[u32]) -> Result<Vec<bool>, Fault> {
    if let Some(class) = row.take("label") {
        let found = format!("the class `label` {class}");
        return Err(row.bad("label", "`labels` (one per token), as the head `next_token` needs them", found));
    }
    let values = row.array("labels", INTEGERS)?;
    if values.len() != ids.len() {
        return Err(row.bad("labels", format!("{} entries, one per token", ids.len()), values.len().to_string()));
    }
    let convert = |(index, (value, &id)): (usize, (&Value, &u32))| match value.as_i64() {
        Some(IGNORE) => Ok(false),
        Some(label) if label == i64::from(id) => Ok(true),
        _ => Err(row.bad("labels", format!("{id} (`input_ids[{index}]`) or {IGNORE}"), format!("{value} at index {index}"))),
    };
    values.iter().zip(ids).enumerate().map(convert).collect()
}

#[cfg(test)]
mod tests {
    use crate::data::fixtures::Fixture;
    use crate::data::{IGNORE, Targets, open};
    use crate::recipe::{ClassList, HeadRecipe};

    fn fixture(content: &str) -> Fixture {
        Fixture::new("tokens", content)
    }

    #[test]
    fn the_shift_is_ours() {
        let fixture = fixture(
            "{\"input_ids\": [5, 6, 7, 8], \"labels\": [-100, -100, 7, 8]}\n{\"input_ids\": [9, 9], \"labels\": [9, 9]}\n",
        );
        let splits = open(&fixture.request(None), &mut |_, _, _| {}).unwrap();
        assert_eq!(splits.train.lengths(), [3, 1]);
        let batch = splits.train.batch(&[0, 1]).unwrap();
        assert_eq!(batch.sequences[0].inputs, [5, 6, 7]);
        assert_eq!(batch.sequences[0].targets, Targets::NextToken(vec![IGNORE, 7, 8]));
        assert_eq!(batch.sequences[1].targets, Targets::NextToken(vec![9]));
        assert_eq!(splits.files[0].origin, "pre-tokenised");
    }

    /// Its `ForSequenceClassification` takes the rightmost token that is not `pad_token_id`, or the first.
    #[test]
    fn a_class_is_scored_where_transformers_reads_it() {
        let mut fixture = fixture(
            "{\"input_ids\": [5, 9, 7, 9, 9], \"label\": 1}\n{\"input_ids\": [9, 9], \"label\": 0}\n{\"input_ids\": [4, 6], \"label\": 1}\n",
        );
        let inputs = |fixture: &Fixture, pad: Option<u32>| {
            let mut request = fixture.request(None);
            request.limits.pad = pad;
            let batch = open(&request, &mut |_, _, _| {}).unwrap().train.batch(&[0, 1, 2]).unwrap();
            batch.sequences.into_iter().map(|sequence| sequence.inputs).collect::<Vec<_>>()
        };
        fixture.head = HeadRecipe::SeqClassification(ClassList::Count(2));
        assert_eq!(inputs(&fixture, Some(9)), [vec![5, 9, 7], vec![9], vec![4, 6]]);
        assert_eq!(inputs(&fixture, None), [vec![5, 9, 7, 9, 9], vec![9, 9], vec![4, 6]]);
        fixture.head = HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(vec![40, 41]));
        assert_eq!(inputs(&fixture, Some(9))[1], [9, 9], "the logits of tokens are read at the last one");
    }

    #[test]
    fn pads_of_an_attention_mask_are_left_out() {
        let row = |more: &str| format!("{{\"input_ids\": [9, 5, 6, 7, 9], \"labels\": [-100, -100, 6, 7, -100], {more}}}\n");
        let fixture = Fixture::new(
            "tokens",
            &(row("\"attention_mask\": [0, 1, 1, 1, 0], \"position_ids\": [1, 0, 1, 2, 1]") + &row("\"attention_mask\": null")),
        );
        let splits = open(&fixture.request(None), &mut |_, _, _| {}).unwrap();
        let batch = splits.train.batch(&[0, 1]).unwrap();
        assert_eq!(batch.sequences[0].inputs, [5, 6]);
        assert_eq!(batch.sequences[0].targets, Targets::NextToken(vec![6, 7]));
        assert_eq!(batch.sequences[1].inputs, [9, 5, 6, 7]);
        for (more, fault) in [
            (
                "\"attention_mask\": [1, 1, 0, 1, 1]",
                "field `attention_mask`: expected zeros at its ends alone, found 0 at index 2",
            ),
            ("\"attention_mask\": [1, 1, 2, 1, 1]", "field `attention_mask`: expected zeros and ones, found 2 at index 2"),
            ("\"attention_mask\": [0, 0, 0, 0, 0]", "field `attention_mask`: expected a token that is no pad, found zeros alone"),
            ("\"attention_mask\": [1]", "field `attention_mask`: expected 5 entries, one per token, found 1"),
            (
                "\"position_ids\": [0, 1, 2, 0, 1]",
                "field `position_ids`: expected numbers that go up by one, as a row is one sequence, found 0 behind 2 at index 3",
            ),
        ] {
            assert_eq!(Fixture::new("tokens", row(more)).error(), format!("`train.jsonl:1`: {fault}"), "{more}");
        }
    }

    #[test]
    fn a_classified_row_runs_whole() {
        let mut fixture = fixture("{\"input_ids\": [5, 6, 7], \"label\": 2}\n");
        fixture.head = HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(vec![40, 41, 42]));
        let splits = open(&fixture.request(None), &mut |_, _, _| {}).unwrap();
        let batch = splits.train.batch(&[0]).unwrap();
        assert_eq!(
            (batch.sequences[0].inputs.as_slice(), &batch.sequences[0].targets),
            ([5, 6, 7].as_slice(), &Targets::Class(2))
        );
        assert_eq!(splits.train.lengths(), [3]);
        fixture.head = HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(vec![40, 41]));
        assert_eq!(fixture.error(), "`train.jsonl:1`: field `label`: expected a class from 0 to 1, found 2");
        fixture.head = HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(vec![40, 512]));
        assert_eq!(fixture.error(), "a label of the head: token id 512 is not below the model's `vocab_size` 512");
    }

    #[test]
    fn says_where_a_file_is_wrong() {
        let error = |content: &str| fixture(content).error();
        assert_eq!(
            error("{\"input_ids\": [1, 512], \"labels\": [1, 512]}"),
            "`train.jsonl:1`, index 1 of `input_ids`: token id 512 is not below the model's `vocab_size` 512"
        );
        assert_eq!(
            error("{\"input_ids\": [1, -1], \"labels\": [1, -1]}"),
            "`train.jsonl:1`: field `input_ids`: expected integers from 0 up, found -1 at index 1"
        );
        assert_eq!(
            error("{\"input_ids\": [1, 2], \"labels\": [1]}"),
            "`train.jsonl:1`: field `labels`: expected 2 entries, one per token, found 1"
        );
        assert_eq!(
            error("{\"input_ids\": [1, 2], \"labels\": [1, 3]}"),
            "`train.jsonl:1`: field `labels`: expected 2 (`input_ids[1]`) or -100, found 3 at index 1"
        );
        assert_eq!(error("{\"input_ids\": [1, 2]}"), "`train.jsonl:1`: field `labels` is missing");
        assert_eq!(
            error("{\"input_ids\": [], \"labels\": []}"),
            "`train.jsonl:1`: field `input_ids`: expected at least 1 token id, found an empty array"
        );
        assert_eq!(
            error("{\"input_ids\": [1, 2], \"label\": 1}"),
            "`train.jsonl:1`: field `label`: expected `labels` (one per token), as the head `next_token` needs them, found the class `label` 1"
        );
        assert_eq!(
            error("{\"input_ids\": [1, 2], \"labels\": [1, -100]}"),
            "`train.jsonl:1`: 2 tokens and none to predict: `labels` is -100 behind the first token"
        );
    }
}
