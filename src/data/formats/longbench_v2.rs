//! The format `longbench-v2`: four-way questions on long contexts, as upstream's JSON array or as Parquet.

use crate::data::error::DataError;
use crate::data::example::{Content, Task};
use crate::data::label_tokens::Classes;
use crate::data::question::SampleGroups;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

const FIELDS: [&str; 6] = ["context", "question", "choice_A", "choice_B", "choice_C", "choice_D"];

/// The line that upstream's evaluation relies on to find the answer in a reply.
const FORMAT_LINE: &str = "Format your response as follows: \"The correct answer is (insert answer here)\".";

/// The beginning of the answer; ends in a blank, so that the letter is a token of its own.
pub(super) const OPENING: &str = "The correct answer is ";

/// The class of each letter, where it has one.
pub(super) type LetterClasses = [Option<usize>; 4];

/// The class of each letter: by its label, or in order where four tokens are given that stand for no letter.
pub(super) fn classes_of_letters(classes: &Classes, tokenizer: &Tokenizer) -> Result<LetterClasses, DataError> {
    let mut found = [None; 4];
    for (class, letter) in found.iter_mut().zip(LETTERS) {
        *class = classes.find(letter, tokenizer)?;
    }
    let is_positional = classes.are_numbers() && classes.count == LETTERS.len() && found.iter().all(Option::is_none);
    Ok(if is_positional { [0, 1, 2, 3].map(Some) } else { found })
}

/// What a row says, and what it is reported under; nothing where it lacks any of that.
pub(super) fn content(
    row: &mut DataRow,
    task: &Task,
    classes: Option<LetterClasses>,
) -> Result<(Content, Option<SampleGroups>), DataError> {
    let mut texts: [String; FIELDS.len()] = Default::default();
    for (text, field) in texts.iter_mut().zip(FIELDS) {
        *text = row.text(field)?;
    }
    let answer = row.text("answer")?;
    let answer = answer.trim();
    let bad = |expected: String| row.bad("answer", expected, format!("`{answer}`"));
    let letter = LETTERS.iter().position(|&letter| letter == answer);
    let letter = letter.ok_or_else(|| bad("one of `A`, `B`, `C`, `D`".to_owned()))?;
    let prompt = prompt(texts.each_ref().map(String::as_str), matches!(task, Task::Classify(_)));
    let content = match (task, classes) {
        (Task::Classify(labels), Some(classes)) => {
            let class = classes[letter].ok_or_else(|| bad(format!("one of the labels {}", labels.describe())))?;
            Content::TextClass { prompt, class }
        }
        _ => Content::Text { prompt, completion: answer.to_owned() },
    };
    let [difficulty, length, domain] = ["difficulty", "length", "domain"].map(|field| row.optional_text(field));
    let groups = match (difficulty?, length?, domain?) {
        (Some(difficulty), Some(length), Some(domain)) => Some(SampleGroups { difficulty, length, domain }),
        _ => None,
    };
    Ok((content, groups))
}

/// Upstream's wording with the reference's choice lines and tails: a class is read right behind the opening, an answer
/// that is generated is asked for in words first.
fn prompt(fields: [&str; 6], is_classified: bool) -> String {
    let [context, question, a, b, c, d] = fields.map(str::trim);
    let tail = if is_classified { OPENING.to_owned() } else { format!("{FORMAT_LINE}\n\nAnswer:\n{OPENING}") };
    format!(
        "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n\
         What is the correct answer to this question: {question}\nChoices:\nA: {a}\nB: {b}\nC: {c}\nD: {d}\n\n{tail}"
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;
    use serde_json::{Value, json};

    use super::*;
    use crate::data::Targets;
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::recipe::DataFormat::LongBenchV2;
    use crate::recipe::{HeadRecipe, Labels};

    fn record(answer: &str) -> Value {
        json!({
            "_id": "0",
            "context": "\nA long text.\n\n",
            "question": " Which one?\n",
            "choice_A": "one ",
            "choice_B": "two",
            "choice_C": "three",
            "choice_D": "four",
            "answer": answer,
        })
    }

    fn json(records: &[Value]) -> Vec<u8> {
        serde_json::to_vec(records).unwrap()
    }

    fn parquet(columns: &[(&str, ArrayRef)]) -> Vec<u8> {
        let batch = RecordBatch::try_from_iter(columns.iter().cloned()).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    }

    fn columns(answers: &[Option<&str>]) -> Vec<(&'static str, ArrayRef)> {
        let record = record("");
        let column = |field| Arc::new(StringArray::from(vec![record[field].as_str().unwrap(); answers.len()])) as ArrayRef;
        let mut columns: Vec<_> = FIELDS[..6].iter().map(|&field| (field, column(field))).collect();
        columns.push(("answer", Arc::new(StringArray::from(answers.to_vec()))));
        columns.push(("_id", Arc::new(Int64Array::from(vec![7; answers.len()]))));
        columns
    }

    const PROMPT: &str = "Please read the following text and answer the question below.\n\n<text>\nA long text.\n</text>\n\n\
        What is the correct answer to this question: Which one?\nChoices:\nA: one\nB: two\nC: three\nD: four\n\n";

    #[test]
    fn asks_for_the_letter_in_words() {
        let splits = Fixture::new(LongBenchV2, json(&[record("C"), record("A")])).open().unwrap();
        let batch = splits.train.batch(&[0]).unwrap();
        let text = tokenizer().decode(&batch.sequences[0].inputs).unwrap();
        let tail = "Format your response as follows: \"The correct answer is (insert answer here)\".\n\nAnswer:\nThe correct answer is C";
        assert_eq!(text, format!("{PROMPT}{tail}"));
        let Targets::NextToken(targets) = &batch.sequences[0].targets else { panic!("a class") };
        let letter = i64::from(tokenizer().encode("C").unwrap()[0]);
        assert_eq!(targets[targets.len() - 2..], [letter, 0]);
        assert_eq!(batch.num_targets(), 2);
    }

    #[test]
    fn reads_the_class_behind_the_opening() {
        let mut fixture = Fixture::new(LongBenchV2, json(&[record(" D "), record("A")])).classify();
        let batch = fixture.open().unwrap().train.batch(&[0, 1]).unwrap();
        assert_eq!(batch.sequences[0].targets, Targets::Class(3));
        assert_eq!(batch.sequences[0].inputs.last(), Some(&0));
        let text = tokenizer().decode(&batch.sequences[0].inputs).unwrap();
        assert_eq!(text, format!("{PROMPT}The correct answer is "));
        // Labels as tokens: by the letter they stand for, or else in order.
        let mut class = |tokens: Vec<u32>| {
            fixture.head = HeadRecipe::SeqClassificationOnLogits(Labels::Tokens(tokens));
            fixture.open().map(|splits| splits.train.batch(&[0]).unwrap().sequences[0].targets.clone())
        };
        let letter = |letter: &str| tokenizer().encode(letter).unwrap()[0];
        assert_eq!(class(vec![letter("D"), letter("A")]).unwrap(), Targets::Class(0));
        assert_eq!(class(vec![500, 501, 502, 503]).unwrap(), Targets::Class(3));
        let error = class(vec![500, 501]).unwrap_err().to_string();
        assert!(error.contains("field `answer`: expected one of the labels token 500, token 501, found `D`"), "{error}");
    }

    #[test]
    fn parquet_gives_what_json_gives() {
        let from_json = Fixture::new(LongBenchV2, json(&[record("C"), record("A")])).open().unwrap();
        let bytes = parquet(&columns(&[Some("C"), Some("A")]));
        let from_parquet = Fixture::new(LongBenchV2, &bytes).open().unwrap();
        assert_eq!(from_parquet.train.batch(&[0, 1]).unwrap(), from_json.train.batch(&[0, 1]).unwrap());
        // Whatever is damaged: an error or other data, never an abort.
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x5a;
            let _ = Fixture::new(LongBenchV2, damaged).open();
        }
        let error = Fixture::new(LongBenchV2, &bytes[..bytes.len() / 2]).error();
        assert!(error.starts_with("cannot read `train.jsonl` as Parquet: "), "{error}");
    }

    #[test]
    fn samples_are_questions_with_what_they_are_reported_under() {
        let mut grouped = record("C");
        for (field, text) in [("difficulty", "hard"), ("length", "short"), ("domain", "Law")] {
            grouped[field] = text.into();
        }
        let mut columns = columns(&[Some("C"), Some("A")]);
        for field in ["difficulty", "length", "domain"] {
            let texts = vec![grouped[field].as_str(), (field != "domain").then_some("x")];
            columns.push((field, Arc::new(StringArray::from(texts))));
        }
        for content in [json(&[grouped, record("A")]), parquet(&columns)] {
            let train = Fixture::new(LongBenchV2, content).open().unwrap().train;
            let question = train.question(0).unwrap();
            let batch = train.batch(&[0]).unwrap();
            assert_eq!((question.references, question.opening), (vec!["C".to_owned()], OPENING));
            assert_eq!(question.prompt, batch.sequences[0].inputs[..batch.max_len() - 1]);
            let expected = SampleGroups { difficulty: "hard".into(), length: "short".into(), domain: "Law".into() };
            assert_eq!((question.groups, train.groups(1)), (Some(expected), None));
        }
    }

    #[test]
    fn says_what_is_wrong_with_parquet() {
        let error = |columns: &[(&str, ArrayRef)]| Fixture::new(LongBenchV2, parquet(columns)).error();
        let mut without = columns(&[Some("A")]);
        without.remove(1);
        let message = error(&without);
        assert!(message.contains("field `question` is missing, others are"), "{message}");
        let mut numbers = columns(&[Some("A")]);
        numbers[6].1 = Arc::new(Int64Array::from(vec![1]));
        assert!(error(&numbers).ends_with("field `answer`: expected a string, found a number in a column of Int64"));
        assert_eq!(
            error(&columns(&[Some("A"), None])),
            "record 1 (from 0) of `train.jsonl`: field `answer`: expected a string, found null in a column of Utf8"
        );
        assert_eq!(error(&columns(&[])), "`train.jsonl` holds no samples, expected at least 1");
    }

    #[test]
    fn says_what_is_wrong_with_json() {
        let error = |content: &[u8]| Fixture::new(LongBenchV2, content).error();
        assert_eq!(
            error(&json(&[record("A"), record("E")])),
            "record 1 (from 0) of `train.jsonl`: field `answer`: expected one of `A`, `B`, `C`, `D`, found `E`"
        );
        assert_eq!(
            error(b"[{\"question\": \"\"}]"),
            "record 0 (from 0) of `train.jsonl`: field `context` is missing, others are `question`"
        );
        let mut number = record("A");
        number["choice_B"] = 3.into();
        assert!(error(&json(&[number])).ends_with("field `choice_B`: expected a string, found a number"));
        assert!(error(b"[{\"answer\":").starts_with("record 0 (from 0) of `train.jsonl` is not JSON: EOF"));
        assert_eq!(error(b"[]"), "`train.jsonl` holds no samples, expected at least 1");
        assert_eq!(error(b""), "`train.jsonl` holds no samples, expected at least 1");
    }
}
