//! The format `longbench-v2`: four-way questions on long contexts, as upstream's JSON array or as Parquet.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use super::error::DataError;
use super::example::{Content, Example, Task};
use super::label_tokens::Classes;
use super::parquet_rows;
use super::question::SampleGroups;
use super::sample_place::{LineOrRecord, SamplePlace};
use super::tokenizer::Tokenizer;

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

const FIELDS: [&str; 10] =
    ["context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "difficulty", "length", "domain"];

/// The first fields, which must be there; by the others samples are reported.
const NUM_REQUIRED: usize = 7;

/// The line that upstream's evaluation relies on to find the answer in a reply.
const FORMAT_LINE: &str = "Format your response as follows: \"The correct answer is (insert answer here)\".";

/// The beginning of the answer; ends in a blank, so that the letter is a token of its own.
pub(super) const OPENING: &str = "The correct answer is ";

/// What is read of a record.
#[derive(Deserialize)]
struct Record {
    context: Option<String>,
    question: Option<String>,
    #[serde(rename = "choice_A")]
    choice_a: Option<String>,
    #[serde(rename = "choice_B")]
    choice_b: Option<String>,
    #[serde(rename = "choice_C")]
    choice_c: Option<String>,
    #[serde(rename = "choice_D")]
    choice_d: Option<String>,
    answer: Option<String>,
    difficulty: Option<String>,
    length: Option<String>,
    domain: Option<String>,
}

/// Reads the file: Parquet is recognised by its first bytes, anything else must be a JSON array.
pub(super) fn read(path: &Path, task: &Task, tokenizer: &Tokenizer) -> Result<Vec<Example>, DataError> {
    let mut beginning = Vec::new();
    let file = File::open(path).map_err(DataError::read(path))?;
    file.take(4).read_to_end(&mut beginning).map_err(DataError::read(path))?;
    let rows =
        if parquet_rows::is_parquet(&beginning) { parquet_rows::read(path, FIELDS, NUM_REQUIRED)? } else { read_json(path)? };
    let classes = match task {
        Task::NextToken => None,
        Task::Classify(classes) => Some(classes_of_letters(classes, tokenizer)?),
    };
    let place = |record| SamplePlace { path: path.to_path_buf(), at: LineOrRecord::Record(record) };
    let convert = |(record, mut fields): (usize, [Option<String>; FIELDS.len()])| {
        let groups = groups(&mut fields);
        let content = content(fields, classes, task, &|| place(record))?;
        Ok(Example { at: LineOrRecord::Record(record), content, groups })
    };
    rows.into_iter().enumerate().map(convert).collect()
}

/// The class of each letter: by its label, or in order where four tokens are given that stand for no letter.
fn classes_of_letters(classes: &Classes, tokenizer: &Tokenizer) -> Result<[Option<usize>; 4], DataError> {
    let mut found = [None; 4];
    for (class, letter) in found.iter_mut().zip(LETTERS) {
        *class = classes.find(letter, tokenizer)?;
    }
    let is_positional = classes.are_numbers() && classes.count == LETTERS.len() && found.iter().all(Option::is_none);
    Ok(if is_positional { [0, 1, 2, 3].map(Some) } else { found })
}

fn read_json(path: &Path) -> Result<Vec<[Option<String>; FIELDS.len()]>, DataError> {
    let bytes = std::fs::read(path).map_err(DataError::read(path))?;
    if bytes.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    let records: Vec<Record> = serde_json::from_slice(&bytes).map_err(|error| {
        if error.is_data() {
            let place = SamplePlace { path: path.to_path_buf(), at: LineOrRecord::Line(error.line()) };
            DataError::Shape { place, expected: "an array of LongBench v2 records, all fields strings", found: error.to_string() }
        } else {
            DataError::NotJson { place: path.display().to_string(), message: error.to_string() }
        }
    })?;
    let columns = |r: Record| {
        let required = [r.context, r.question, r.choice_a, r.choice_b, r.choice_c, r.choice_d, r.answer];
        let mut all = required.into_iter().chain([r.difficulty, r.length, r.domain]);
        std::array::from_fn(|_| all.next().flatten())
    };
    Ok(records.into_iter().map(columns).collect())
}

/// What a record is reported under; `None` where it lacks any of it.
fn groups(fields: &mut [Option<String>; FIELDS.len()]) -> Option<SampleGroups> {
    let [.., difficulty, length, domain] = fields;
    Some(SampleGroups { difficulty: difficulty.take()?, length: length.take()?, domain: domain.take()? })
}

fn content(
    fields: [Option<String>; FIELDS.len()],
    classes: Option<[Option<usize>; 4]>,
    task: &Task,
    place: &dyn Fn() -> SamplePlace,
) -> Result<Content, DataError> {
    if let Some(missing) = fields[..NUM_REQUIRED].iter().position(Option::is_none) {
        return Err(DataError::MissingField { place: place(), field: FIELDS[missing] });
    }
    let fields = fields.map(Option::unwrap_or_default);
    let answer = fields[6].trim();
    let bad = |expected: String| DataError::BadField { place: place(), field: "answer", expected, found: format!("`{answer}`") };
    let letter = LETTERS.iter().position(|&letter| letter == answer);
    let letter = letter.ok_or_else(|| bad("one of `A`, `B`, `C`, `D`".to_owned()))?;
    let texts = std::array::from_fn(|index| fields[index].as_str());
    let prompt = prompt(texts, matches!(task, Task::Classify(_)));
    match (task, classes) {
        (Task::Classify(labels), Some(classes)) => {
            let class = classes[letter].ok_or_else(|| bad(format!("one of the labels {}", labels.describe())))?;
            Ok(Content::TextClass { prompt, class })
        }
        _ => Ok(Content::Text { prompt, completion: answer.to_owned() }),
    }
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
        assert!(error.ends_with("field `answer`: expected one of the labels token 500, token 501, found `D`"), "{error}");
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
        for field in &FIELDS[NUM_REQUIRED..] {
            let texts = vec![grouped[field].as_str(), (*field != "domain").then_some("x")];
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
        assert!(message.contains("column `question` is missing, found `context`, `choice_A`"), "{message}");
        let mut numbers = columns(&[Some("A")]);
        numbers[6].1 = Arc::new(Int64Array::from(vec![1]));
        assert!(error(&numbers).ends_with("column `answer`: expected strings, found Int64"));
        assert_eq!(error(&columns(&[Some("A"), None])), "record 1 (from 0) of `train.jsonl`: field `answer` is missing");
        assert_eq!(error(&columns(&[])), "`train.jsonl` holds no samples, expected at least 1");
    }

    #[test]
    fn says_what_is_wrong_with_json() {
        let error = |content: &[u8]| Fixture::new(LongBenchV2, content).error();
        assert_eq!(
            error(&json(&[record("A"), record("E")])),
            "record 1 (from 0) of `train.jsonl`: field `answer`: expected one of `A`, `B`, `C`, `D`, found `E`"
        );
        assert_eq!(error(b"[{\"question\": \"\"}]"), "record 0 (from 0) of `train.jsonl`: field `context` is missing");
        assert!(error(b"{\"question\": \"\"}").contains("expected an array of LongBench v2 records"));
        assert!(error(b"[{\"answer\": 3}]").contains("expected an array of LongBench v2 records"));
        assert!(error(b"[{\"answer\":").starts_with("`train.jsonl` is not JSON: EOF"));
        assert_eq!(error(b"[]"), "`train.jsonl` holds no samples, expected at least 1");
        assert_eq!(error(b""), "`train.jsonl` holds no samples, expected at least 1");
    }
}
