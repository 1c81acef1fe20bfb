//! The format `helmet`: rows of HELMET's tasks of recall, retrieval, many examples and ranking. The wording is that of princeton-nlp/HELMET
//! at 4526dfb (`data.py`, MIT licence), to the letter, slips included: scores compare only where prompts do.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::format::{RowFormat, TextRow};
use crate::data::faults::RowFault;
use crate::data::rows::DataRow;
use crate::metrics::{Metric, RougeFigure, RougeKind, RougeMeasure};
use crate::recipe::{DataFormat, HelmetFamily};
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    keys: &["family"],
    has_prompt: true,
    has_messages: true,
    // HELMET's own of a family, where it is a formula.
    metrics: |family, are_ranks| match family {
        Some(HelmetFamily::Icl) => &[Metric::ExactMatch, Metric::F1],
        Some(HelmetFamily::InfbenchChoice) => &[Metric::ExactMatch],
        Some(family) if family.is_message() => {
            &[Metric::Rouge(RougeMeasure { kind: RougeKind::L, stemmed: true, figure: RougeFigure::F1 })]
        }
        _ if are_ranks() => &[Metric::Ndcg10],
        _ => &[Metric::Substring],
    },
    ..DataFormat::of("helmet", "question answers ctxs demos context answer num_kvs query qid type_needle_v outputs options")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[FAMILIES[0].1, FAMILIES[1].1, FAMILIES[2].1, FAMILIES[3].1],
    is_message: |recipe| recipe.family.is_some_and(HelmetFamily::is_message),
    ..RowFormat::new(FACTS, |reader, row| {
        let (text, is_message) = text(row, reader.recipe.family, reader.has_template)?;
        Ok(text.example(is_message))
    })
};

/// The family of a row, by its fields; many examples (`icl`) have none of their own.
const FAMILIES: [(HelmetFamily, &[&str]); 4] = [
    (HelmetFamily::Kilt, &["question", "answers", "ctxs"]),
    (HelmetFamily::JsonKv, &["context", "question", "answer", "num_kvs"]),
    (HelmetFamily::Msmarco, &["query", "ctxs", "qid"]),
    (HelmetFamily::Niah, &["context", "query", "type_needle_v"]),
];

/// Demonstrations of `json_kv` that are used, as HELMET's settings have it.
const SHOTS: usize = 2;

const STORY_QUESTION: &str = "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as \
    concisely as you can, using a single phrase if possible.\n\n";
const STORY: &str = "You are given a story and a question. Answer the question as concisely as you can, using a single phrase if \
    possible.\n\n";
const STORY_CHOICE: &str = "You are given a story and a question with multiple choices. Choose the best answer from the options provided. \
    Only one of the following options is correct, output the answer using one single letter (A, B, C, or D). \
    Don't say anything else.\n\n";
const BOOK: &str = "You are given a book and you are tasked to summarize it. Write a summary of about 1000 to 1200 words. Only \
    write about the plot and characters of the story. Do not discuss the themes or background of the book. Do not \
    provide any analysis or commentary.\n\n";
const LAWSUIT: &str = "You are given the legal documents in a civil rights lawsuit, and you are tasked to summarize the case. Write \
    a concise summary of one paragraph (200 to 250 words). The summary should contain a short description of the \
    background, the parties involved, and the outcomes of the case.\n\n";

/// What a row says, and whether its prompt is a message of the user, which it is of some families if the model has a chat template.
fn text(row: &mut DataRow, wanted: Option<HelmetFamily>, has_template: bool) -> Result<(TextRow, bool), Fault> {
    let of_fields = || FAMILIES.iter().find(|(_, fields)| fields.iter().all(|&field| row.has(field))).map(|&(family, _)| family);
    let Some(family) = wanted.or_else(of_fields) else {
        let families = HelmetFamily::ALL.iter().map(|family| family.name()).collect::<Vec<_>>().join(", ");
        let found = format!("fields of no family of HELMET ({families}); `data.family` names one");
        return Err(RowFault::unknown_format(row.place(), &found));
    };
    let text = match family {
        HelmetFamily::Kilt => kilt(row),
        HelmetFamily::JsonKv => json_kv(row),
        HelmetFamily::Msmarco => msmarco(row),
        HelmetFamily::Niah => niah(row),
        HelmetFamily::Icl => icl(row),
        _ => long(row, family, has_template),
    };
    Ok((text?, has_template && family.is_message()))
}

fn kilt(row: &mut DataRow) -> Result<TextRow, Fault> {
    let documents = |row: &mut DataRow| passages(row, |title, text, _| format!("Document (Title: {title}): {text}"));
    let mut demos = String::new();
    for mut demo in rows_of(row, "demos")? {
        let documents = documents(&mut demo)?;
        let answer = one_or_more(&mut demo, "answers")?.swap_remove(0);
        let _ = write!(demos, "{documents}\n\nQuestion: {}\nAnswer: {answer}\n\n", demo.text("question")?);
    }
    let context = documents(row)?;
    let question = row.text("question")?;
    let references = one_or_more(row, "answers")?;
    let task = "Use the given documents to write a concise and short answer to the question. Write your answer in the following format:\n\
                Answer: [answer]";
    Ok(first_of(format!("{task}\n\n{demos}{context}\n\nQuestion: {question}\nAnswer:"), references))
}

fn json_kv(row: &mut DataRow) -> Result<TextRow, Fault> {
    let mut demos = String::new();
    for (index, demo) in row.list("demos")?.into_iter().take(SHOTS).enumerate() {
        let [Value::String(key), Value::String(value)] = demo.as_array().map(Vec::as_slice).unwrap_or_default() else {
            return Err(row.bad("demos", "pairs of texts", format!("{demo} at index {index}")));
        };
        let _ = write!(demos, "Key: {key}\nCorresponding value: {value}\n\n");
    }
    let (context, question) = (row.text("context")?, row.text("question")?);
    let references = one_or_more(row, "answer")?;
    let task = "Extract the value corresponding to the specified key in the JSON object below.";
    Ok(first_of(format!("{context}\n\n{task}\n\n{demos}Key: {question}\nCorresponding value:"), references))
}

fn msmarco(row: &mut DataRow) -> Result<TextRow, Fault> {
    fn documents(row: &mut DataRow) -> Result<(String, String, String), Fault> {
        let mut ids = Vec::new();
        let texts = passages(row, |title, text, passage| {
            let id = passage.get("id").map(|id| id.as_str().map_or_else(|| id.to_string(), str::to_owned)).unwrap_or_default();
            let line = if title.is_empty() {
                format!("[ID: {id}] Document: {text}")
            } else {
                format!("[ID: {id}] Document (Title: {title}): {text}")
            };
            ids.push((passage.get("label").and_then(Value::as_f64).unwrap_or(0.0), id));
            line
        })?;
        let labels: Map<String, Value> = ids.iter().map(|(label, id)| (id.clone(), (*label as u64).into())).collect();
        ids.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let ranking = ids.into_iter().map(|(_, id)| id).collect::<Vec<_>>().join(" > ");
        Ok((texts, ranking, Value::Object(labels).to_string()))
    }
    let mut demos = String::new();
    for mut demo in rows_of(row, "demos")? {
        let (texts, ranking, _) = documents(&mut demo)?;
        let _ = write!(demos, "{texts}\n\nQuery: {}\nRanking: {ranking}\n\n", demo.text("query")?);
    }
    let (context, ranking, labels) = documents(row)?;
    let query = row.text("query")?;
    let task = "You are provided with a list of documents, each indicated by their ID. Rank each document based on their relevance to the \
                question in descending order from most relelvant to least relevant texts. Include all documents in the rankings. Write your \
                answer using the unique IDs, with the following format:\nRanking: ID3 > ID1 > ID2";
    let prompt = format!("{task}\n\n{demos}{context}\n\nQuery: {query}\nRanking:");
    Ok(TextRow { prompt, completion: format!(" {ranking}"), references: vec![labels] })
}

fn niah(row: &mut DataRow) -> Result<TextRow, Fault> {
    let (context, query, needle) = (row.text("context")?, row.text("query")?, row.text("type_needle_v")?);
    let references = one_or_more(row, if row.has("outputs") { "outputs" } else { "answer" })?;
    let has_many = needle.ends_with('s');
    let (hidden, what, are) = if has_many {
        (format!("Some special magic {needle} are hidden"), "What are all", "are")
    } else {
        (format!("A special magic {needle} is hidden"), "What is", "is")
    };
    let prompt = format!(
        "{hidden} within the following text. Make sure to memorize it. I will quiz you about the {needle} afterwards.\n{context}\n\
         {what} the special magic {needle} for {query} mentioned in the provided text?\n\
         The special magic {needle} for {query} mentioned in the provided text {are}"
    );
    Ok(TextRow { prompt, completion: format!(" {}", references.join(", ")), references })
}

fn icl(row: &mut DataRow) -> Result<TextRow, Fault> {
    let (context, question) = (row.text("context")?, row.text("question")?);
    let references = one_or_more(row, "answer")?;
    let task = "Use the provided mapping from the text to label to assign a label to the text. Only output \"label: {label}\" and nothing else. ";
    Ok(first_of(format!("{task}\n\n{context}\n\n{question}\nlabel:"), references))
}

/// Questions about long texts, and summaries. The wording of their demonstrations is drawn by HELMET from data sets of its own.
fn long(row: &mut DataRow, family: HelmetFamily, has_template: bool) -> Result<TextRow, Fault> {
    if row.has("demos") {
        return Err(row.bad("demos", format!("none of the family `{family}`: how HELMET words them is not known"), "some"));
    }
    let context = row.text("context")?;
    let (user, join, cue) = match family {
        HelmetFamily::MultiLexsum => {
            (format!("{LAWSUIT}Legal documents:\n{context}\n\nNow please summarize the case."), "\n\n", "Summary:")
        }
        HelmetFamily::InfbenchSum => (format!("{BOOK}{context}\n\nNow summarize the book."), "\n\n", "Summary:"),
        HelmetFamily::InfbenchChoice => {
            let (question, options) = (row.text("question")?, row.texts("options")?);
            let [a, b, c, d] = &options[..] else {
                return Err(row.bad("options", "4 texts", options.len().to_string()));
            };
            let options = format!("A. {a}\nB. {b}\nC. {c}\nD. {d}");
            (format!("{STORY_CHOICE}{context}\n\nQuestion: {question}\nOptions:\n{options}"), "\n\n", "Answer:")
        }
        _ => {
            let is_story = family == HelmetFamily::NarrativeQa;
            let (task, join) = if is_story { (STORY_QUESTION, "\n") } else { (STORY, "\n\n") };
            (format!("{task}{context}\n\nQuestion: {}", row.text("question")?), join, "Answer:")
        }
    };
    let references = one_or_more(row, "answer")?;
    if has_template {
        return Ok(TextRow { prompt: user, completion: references[0].clone(), references });
    }
    Ok(first_of(format!("{user}{join}{cue}"), references))
}

/// A prompt that the first of the right answers completes.
fn first_of(prompt: String, references: Vec<String>) -> TextRow {
    TextRow { prompt, completion: references.first().map(|answer| format!(" {answer}")).unwrap_or_default(), references }
}

fn one_or_more(row: &mut DataRow, field: &str) -> Result<Vec<String>, Fault> {
    if row.fields().get(field).is_some_and(Value::is_string) { Ok(vec![row.text(field)?]) } else { row.texts(field) }
}

/// The rows in a field, which may be missing; errors name the row around them.
fn rows_of(row: &mut DataRow, field: &str) -> Result<Vec<DataRow>, Fault> {
    let objects = row.list(field)?;
    let inner = |(index, value): (usize, Value)| match value {
        Value::Object(fields) => Ok(DataRow::new(fields, row.place())),
        other => Err(row.bad(field, "objects", format!("{other} at index {index}"))),
    };
    objects.into_iter().enumerate().map(inner).collect()
}

/// The passages of a row with a blank line between them.
fn passages(row: &mut DataRow, mut word: impl FnMut(&str, &str, &Map<String, Value>) -> String) -> Result<String, Fault> {
    let Value::Array(ctxs) = row.require("ctxs")? else { return Err(row.bad("ctxs", "an array of passages", "something else")) };
    let mut texts = Vec::with_capacity(ctxs.len());
    for (index, passage) in ctxs.iter().enumerate() {
        let passage = passage.as_object().ok_or_else(|| row.bad("ctxs", "objects", format!("{passage} at index {index}")))?;
        let text = passage.get("text").and_then(Value::as_str);
        let text = text.ok_or_else(|| row.bad("ctxs", "a string as `text`", format!("none at index {index}")))?;
        texts.push(word(passage.get("title").and_then(Value::as_str).unwrap_or_default(), text, passage));
    }
    Ok(texts.join("\n\n"))
}
