//! The format `longbench-v2`: four-way questions on long contexts, in upstream's wording (THUDM/LongBench at 2e00731, MIT licence), in that
//! of `keys_values`, or in that of lm-evaluation-harness (MIT licence).

use super::format::{ExampleReader, RowFormat, TextRow};
use crate::data::example::{Content, Example};
use crate::data::label_tokens::Classes;
use crate::data::question::{FollowUp, SampleGroups};
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::metrics::{Metric, strip};
use crate::recipe::{DataFormat, DataRecipe, LongBenchPrompt};
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    also: &["longbench_v2", "longbenchv2", "LongBenchV2", "LongBench-v2"],
    keys: &["prompt", "max_prompt_tokens"],
    has_prompt: true,
    has_messages: true,
    metrics: |_, _| &[Metric::LongBenchV2],
    ..DataFormat::of("longbench-v2", "context question choice_A choice_B choice_C choice_D answer difficulty length domain")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer"]],
    is_message: |recipe| !matches!(wording(recipe), LongBenchPrompt::KeysValues | LongBenchPrompt::LmEval),
    reply_prefix: |recipe| reply_prefix(wording(recipe)),
    rank: 0,
    has_classes: true,
    ..RowFormat::new(FACTS, example)
};

const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

const FIELDS: [&str; 6] = ["context", "question", "choice_A", "choice_B", "choice_C", "choice_D"];

/// Upstream's evaluation finds by these words the answer in a reply.
const FORMAT_LINE: &str = "Format your response as follows: \"The correct answer is (insert answer here)\".";

/// The beginning of the answer in the wording of `keys_values`; ends in a blank, so that the letter is a token of its own.
const ANSWER_PREFIX: &str = "The correct answer is ";

const READ: &str = "Please read the following text and answer the question below.";

/// Upstream's first line, where the model is to think.
const READ_TO_THINK: &str = "Please read the following text and answer the questions below.";

const THINK: &str = "Let’s think step by step:";

const BRACKETS: [&str; 4] = ["(A) ", "(B) ", "(C) ", "(D) "];
const COLONS: [&str; 4] = ["A: ", "B: ", "C: ", "D: "];

/// The class of each letter: by its label, or in order where four tokens are given that stand for no letter.
fn classes_of_letters(classes: &Classes, tokenizer: &Tokenizer) -> Result<[Option<usize>; 4], Fault> {
    let mut found = [None; 4];
    for (class, letter) in found.iter_mut().zip(LETTERS) {
        *class = classes.find(letter, tokenizer)?;
    }
    let is_positional = classes.are_numbers() && classes.count == LETTERS.len() && found.iter().all(Option::is_none);
    Ok(if is_positional { [0, 1, 2, 3].map(Some) } else { found })
}

fn example(reader: &ExampleReader<'_>, row: &mut DataRow) -> Result<Example, Fault> {
    let mut texts: [String; FIELDS.len()] = Default::default();
    for (text, field) in texts.iter_mut().zip(FIELDS) {
        *text = row.text(field)?;
    }
    let answer = row.text("answer")?;
    let letter = LETTERS.iter().position(|&letter| letter == answer.trim());
    let letter = letter.ok_or_else(|| row.bad("answer", "one of `A`, `B`, `C`, `D`", format!("`{}`", answer.trim())))?;
    let [difficulty, length, domain] = ["difficulty", "length", "domain"].map(|field| row.optional_text(field));
    let groups = match (difficulty?, length?, domain?) {
        (Some(difficulty), Some(length), Some(domain)) => Some(SampleGroups { difficulty, length, domain }),
        _ => None,
    };
    let tokenizer = reader.tokenizer()?;
    let Some(labels) = reader.classes else {
        let (wording, is_message, max_tokens) = (wording(reader.recipe), reader.has_template, reader.recipe.max_prompt_tokens);
        let follow_up = behind_thoughts(&texts, wording);
        let follow_up = follow_up.map(|(before, after)| FollowUp { before, after, is_message, max_tokens });
        let mut text = worded(&texts, LETTERS[letter], wording);
        if let Some(most) = max_tokens {
            text.prompt = tokenizer.cut_as_upstream(text.prompt, most)?;
        }
        return Ok(Example { groups, follow_up, ..text.example(is_message) });
    };
    let bad = || row.bad("answer", format!("one of the labels {}", labels.describe()), format!("`{}`", LETTERS[letter]));
    let class = classes_of_letters(labels, tokenizer)?[letter].ok_or_else(bad)?;
    let prompt = behind_text(READ, &texts, COLONS, ANSWER_PREFIX);
    Ok(Example { groups, ..Example::new(Content::TextClass { prompt, class }) })
}

/// What is asked behind the thoughts that a wording asks for: what stands before them, and what behind.
fn behind_thoughts(texts: &[String; 6], wording: LongBenchPrompt) -> Option<(String, String)> {
    if wording != LongBenchPrompt::UpstreamCot {
        return None;
    }
    let rest = asked(&stripped(texts), BRACKETS, &format!("{THINK} "));
    let before = format!("{READ_TO_THINK}\n\nThe text is too long and omitted here.\n\n{rest}");
    Some((before, format!("\n\nBased on the above, what is the single, most likely answer choice? {FORMAT_LINE}")))
}

fn stripped(texts: &[String; 6]) -> [String; 6] {
    texts.each_ref().map(|text| strip(text).to_owned())
}

fn worded(texts: &[String; 6], letter: &str, wording: LongBenchPrompt) -> TextRow {
    let upstream = || format!("{ANSWER_PREFIX}({letter})");
    let (prompt, completion) = match wording {
        LongBenchPrompt::Upstream => (behind_text(READ, &stripped(texts), BRACKETS, FORMAT_LINE), upstream()),
        LongBenchPrompt::UpstreamCot => (behind_text(READ_TO_THINK, &stripped(texts), BRACKETS, THINK), upstream()),
        LongBenchPrompt::UpstreamNoContext => {
            let tail = format!("What is the single, most likely answer choice? {FORMAT_LINE}");
            (asked(&stripped(texts), BRACKETS, &tail), upstream())
        }
        LongBenchPrompt::KeysValues => {
            let tail = format!("{FORMAT_LINE}\n\nAnswer:\n{ANSWER_PREFIX}");
            (behind_text(READ, texts, COLONS, &tail), letter.to_owned())
        }
        LongBenchPrompt::LmEval => {
            let mut own = texts.clone();
            strip(&texts[1]).clone_into(&mut own[1]);
            (behind_text(READ, &own, BRACKETS, "Answer:"), format!(" {letter}"))
        }
    };
    TextRow { prompt, completion, references: vec![letter.to_owned()] }
}

fn wording(recipe: &DataRecipe) -> LongBenchPrompt {
    recipe.prompt.unwrap_or(LongBenchPrompt::Upstream)
}

/// What comes before a reply in which the letter is looked for behind upstream's words.
fn reply_prefix(wording: LongBenchPrompt) -> &'static str {
    match wording {
        LongBenchPrompt::Upstream | LongBenchPrompt::UpstreamCot | LongBenchPrompt::UpstreamNoContext => "",
        LongBenchPrompt::KeysValues => ANSWER_PREFIX,
        // The reply begins with the blank.
        LongBenchPrompt::LmEval => ANSWER_PREFIX.trim_ascii_end(),
    }
}

/// The text, and what is asked about it: all places are filled at once, so that none is looked for in what fills another.
fn behind_text(first_line: &str, texts: &[String; 6], marks: [&str; 4], tail: &str) -> String {
    let (context, rest) = (&texts[0], asked(texts, marks, tail));
    format!("{first_line}\n\n<text>\n{context}\n</text>\n\n{rest}")
}

fn asked([_, question, a, b, c, d]: &[String; 6], marks: [&str; 4], tail: &str) -> String {
    let [before_a, before_b, before_c, before_d] = marks;
    format!(
        "What is the correct answer to this question: {question}\nChoices:\n\
         {before_a}{a}\n{before_b}{b}\n{before_c}{c}\n{before_d}{d}\n\n{tail}"
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
    use crate::recipe::{ClassList, HeadRecipe};

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

    /// The text of the first sample in a wording.
    fn text_in(content: Vec<u8>, wording: LongBenchPrompt) -> String {
        let mut fixture = Fixture::new("longbench-v2", content);
        fixture.recipe.prompt = Some(wording);
        let train = fixture.open().unwrap().train;
        assert_eq!(train.question(0).unwrap().reply_prefix, reply_prefix(wording));
        tokenizer().decode(&train.batch(&[0]).unwrap().sequences[0].inputs).unwrap()
    }

    #[test]
    fn asks_in_the_wording_of_each_program() {
        let mut fixture = Fixture::new("longbench-v2", json(&[record("C"), record("A")]));
        fixture.recipe.prompt = Some(LongBenchPrompt::KeysValues);
        let batch = fixture.open().unwrap().train.batch(&[0]).unwrap();
        let Targets::NextToken(targets) = &batch.sequences[0].targets else { panic!("a class") };
        let letter = i64::from(tokenizer().encode("C").unwrap()[0]);
        assert_eq!(targets[targets.len() - 2..], [letter, 0]);
        assert_eq!(batch.num_targets(), 2);
        let mut odd = record("C");
        odd["context"] = "\u{1c}a $Q$ {question}\u{a0}".into();
        let of = |wording| text_in(json(std::slice::from_ref(&odd)), wording);
        let read = "Please read the following text and answer the question below.\n\n<text>\n";
        let asked = "What is the correct answer to this question:";
        let format = "Format your response as follows: \"The correct answer is (insert answer here)\".";
        let brackets = "Choices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n";
        let upstream = format!("{asked} Which one?\n{brackets}");
        let reply = "The correct answer is (C)";
        assert_eq!(of(LongBenchPrompt::Upstream), format!("{read}a $Q$ {{question}}\n</text>\n\n{upstream}{format}{reply}"));
        let likely = "What is the single, most likely answer choice?";
        let questions = read.replace("question below", "questions below");
        let think = "Let’s think step by step:";
        assert_eq!(
            of(LongBenchPrompt::UpstreamCot),
            format!("{questions}a $Q$ {{question}}\n</text>\n\n{upstream}{think}{reply}")
        );
        let mut fixture = Fixture::new("longbench-v2", json(&[record("C")]));
        fixture.recipe.prompt = Some(LongBenchPrompt::UpstreamCot);
        let train = fixture.open().unwrap().train;
        let first = train.question(0).unwrap();
        let second = train.following(&first, " \nIt is $Q$.\u{1c}").unwrap().unwrap();
        let omitted = "Please read the following text and answer the questions below.\n\nThe text is too long and omitted here.";
        let based = "Based on the above, what is the single, most likely answer choice?";
        assert_eq!(
            tokenizer().decode(&second.prompt).unwrap(),
            format!("{omitted}\n\n{upstream}{think} It is $Q$.\n\n{based} {format}")
        );
        assert!(train.following(&second, "x").unwrap().is_none());
        assert_eq!(of(LongBenchPrompt::UpstreamNoContext), format!("{upstream}{likely} {format}{reply}"));
        let raw = "\u{1c}a $Q$ {question}\u{a0}\n</text>\n\n";
        let letters = "Choices:\nA: one \nB: two\nC: three\nD: four\n\n";
        assert_eq!(
            of(LongBenchPrompt::KeysValues),
            format!("{read}{raw}{asked}  Which one?\n\n{letters}{format}\n\nAnswer:\nThe correct answer is C")
        );
        let unstripped = brackets.replace("one", "one ");
        assert_eq!(of(LongBenchPrompt::LmEval), format!("{read}{raw}{asked} Which one?\n{unstripped}Answer: C"));
    }

    #[test]
    fn upstreams_prompt_is_a_message_where_the_model_has_a_template_and_is_cut_before() {
        let mut fixture = Fixture::new("longbench-v2", json(&[record("C")]));
        fixture.recipe.max_prompt_tokens = Some(21);
        let plain = fixture.open().unwrap().train.question(0).unwrap();
        let text = tokenizer().decode(&plain.prompt).unwrap();
        let whole = tokenizer().encode(&text_in(json(&[record("C")]), LongBenchPrompt::Upstream)).unwrap();
        let ids = tokenizer().encode(&text).unwrap();
        assert!(ids.len() <= 22 && ids[..9] == whole[..9], "{text}");
        assert!(text.ends_with("answer here)\"."), "{text}");
        let model = tempfile::tempdir().unwrap();
        let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        for name in ["tokenizer.json", "config.json"] {
            std::fs::copy(fixtures.join(name), model.path().join(name)).unwrap();
        }
        let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
        std::fs::write(model.path().join("chat_template.jinja"), template).unwrap();
        let tokenizer = Tokenizer::load(model.path()).unwrap();
        let splits = crate::data::open(&fixture.request(Some(&tokenizer)), &mut |_, _, _| ()).unwrap();
        let question = splits.train.question(0).unwrap();
        let asked = tokenizer.decode_with_special(&question.prompt).unwrap();
        assert_eq!(asked, format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"));
        let sequence = splits.train.batch(&[0]).unwrap().sequences.swap_remove(0);
        let reply = tokenizer.decode_with_special(&sequence.inputs[question.prompt.len()..]).unwrap();
        assert_eq!(reply, "The correct answer is (C)<|im_end|>");
        assert_eq!(question.references, ["C"]);
    }

    #[test]
    fn reads_the_class_behind_the_opening() {
        let mut fixture = Fixture::new("longbench-v2", json(&[record(" D "), record("A")])).classify();
        let batch = fixture.open().unwrap().train.batch(&[0, 1]).unwrap();
        assert_eq!(batch.sequences[0].targets, Targets::Class(3));
        assert_eq!(batch.sequences[0].inputs.last(), Some(&0));
        let text = tokenizer().decode(&batch.sequences[0].inputs).unwrap();
        assert_eq!(
            text,
            format!(
                "{}The correct answer is ",
                PROMPT
                    .replace("A long text.", "\nA long text.\n\n")
                    .replace("Which one?", " Which one?\n")
                    .replace("one\nB", "one \nB")
            )
        );
        // Labels as tokens: by the letter they stand for, or else in order.
        let mut class = |tokens: Vec<u32>| {
            fixture.head = HeadRecipe::SeqClassificationOnLogits(ClassList::Tokens(tokens));
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
        let from_json = Fixture::new("longbench-v2", json(&[record("C"), record("A")])).open().unwrap();
        let bytes = parquet(&columns(&[Some("C"), Some("A")]));
        let from_parquet = Fixture::new("longbench-v2", &bytes).open().unwrap();
        assert_eq!(from_parquet.train.batch(&[0, 1]).unwrap(), from_json.train.batch(&[0, 1]).unwrap());
        // Whatever is damaged: an error or other data, never an abort.
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x5a;
            let _ = Fixture::new("longbench-v2", damaged).open();
        }
        let error = Fixture::new("longbench-v2", &bytes[..bytes.len() / 2]).error();
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
            let train = Fixture::new("longbench-v2", content).open().unwrap().train;
            let question = train.question(0).unwrap();
            let batch = train.batch(&[0]).unwrap();
            assert_eq!((question.references, question.reply_prefix), (vec!["C".to_owned()], ""));
            assert!(batch.sequences[0].inputs.starts_with(&question.prompt));
            let expected = SampleGroups { difficulty: "hard".into(), length: "short".into(), domain: "Law".into() };
            assert_eq!((question.groups, train.groups(1).unwrap()), (Some(expected), None));
        }
    }

    #[test]
    fn says_what_is_wrong_with_parquet() {
        let error = |columns: &[(&str, ArrayRef)]| Fixture::new("longbench-v2", parquet(columns)).error();
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
        let error = |content: &[u8]| Fixture::new("longbench-v2", content).error();
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
