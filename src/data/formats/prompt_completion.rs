//! The format `prompt-completion`: rows with `prompt` and `completion`, or of a classification `label`; further fields are ignored.

use serde_json::Value;

use super::format::RowFormat;
use crate::data::chat::{is_conversational, prompt_and_completion};
use crate::data::example::{Content, Example};
use crate::data::label_tokens::Classes;
use crate::data::rows::{DataRow, class};
use crate::data::tokenizer::Tokenizer;
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    also: &["prompt_completion"],
    has_prompt: true,
    has_messages: true,
    ..DataFormat::of("prompt-completion", "prompt completion label tools documents chat_template_kwargs")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["prompt", "completion"], &["prompt", "label"]],
    has_classes: true,
    ..RowFormat::new(FACTS, |reader, row| {
        if row.fields().get("prompt").is_some_and(Value::is_string) {
            reader.refuse_text_for_messages(row, "prompt")?;
        }
        let content = content(row, reader.classes, reader.tokenizer()?)?;
        if let Content::Text { prompt, completion } = &content {
            reader.encoder.chat.note_empty(prompt, completion);
        }
        Ok(Example::new(content))
    })
};

/// What a row says. With a classification head `label` is the class; where there is none the completion must be one of their names.
fn content(row: &mut DataRow, classes: Option<&Classes>, tokenizer: &Tokenizer) -> Result<Content, Fault> {
    if classes.is_none() && row.fields().get("prompt").is_some_and(is_conversational) {
        let prompt = row.require("prompt")?;
        return Ok(prompt_and_completion(row, prompt)?.into());
    }
    let prompt = row.text("prompt")?;
    let Some(classes) = classes else {
        let completion = row.text("completion")?;
        if prompt.is_empty() && completion.is_empty() {
            return Err(row.bad("completion", "a text to train on, as there is no prompt", "an empty one"));
        }
        return Ok(Content::Text { prompt, completion });
    };
    let field = if row.has("label") { "label" } else { "completion" };
    classified(row, prompt, field, classes, tokenizer)
}

/// A prompt with the class that a field has, by its number or by its name.
pub(super) fn classified(
    row: &mut DataRow,
    prompt: String,
    field: &str,
    classes: &Classes,
    tokenizer: &Tokenizer,
) -> Result<Content, Fault> {
    let number = row.fields().get(field).filter(|value| field == "label" && value.is_number()).map(Value::to_string);
    if number.is_some() && !classes.have_numbers_for_names() {
        return Ok(Content::TextClass { prompt, class: class(row, classes.count)? });
    }
    let answer = number.map_or_else(|| row.text(field), Ok)?;
    let answer = answer.trim();
    // CSV has texts alone.
    let is_place = field == "label" && !classes.have_numbers_for_names();
    let number = || answer.parse().ok().filter(|&class| is_place && class < classes.count);
    let bad = || row.bad(field, format!("one of the labels {}", classes.describe()), format!("`{answer}`"));
    let class = classes.find(answer, tokenizer)?.or_else(number).ok_or_else(bad)?;
    Ok(Content::TextClass { prompt, class })
}

#[cfg(test)]
mod tests {
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::data::{IGNORE, Targets};
    use crate::recipe::{ClassList, HeadRecipe};

    const LINES: &str = "{\"prompt\": \"the cache\", \"completion\": \" holds\", \"extra\": [1]}\n\n{\"completion\": \"B\", \"prompt\": \"key\"}\n";

    #[test]
    fn trains_on_the_completion_and_its_end() {
        let splits = Fixture::new("prompt-completion", LINES).open().unwrap();
        let tokenizer = tokenizer();
        let (prompt, completion) = (tokenizer.encode("the cache").unwrap(), tokenizer.encode(" holds").unwrap());
        let sequence = splits.train.batch(&[0]).unwrap().sequences.swap_remove(0);
        assert_eq!(sequence.inputs, [prompt.clone(), completion.clone()].concat());
        let Targets::NextToken(targets) = sequence.targets else { panic!("a class") };
        let trained: Vec<i64> = completion.iter().map(|&id| i64::from(id)).chain([0]).collect();
        assert_eq!(targets, [vec![IGNORE; prompt.len() - 1], trained].concat());
        assert_eq!(splits.train.lengths()[0], sequence.inputs.len());
        assert_eq!(splits.train.batch(&[1]).unwrap().sequences[0].sample, 1);
    }

    #[test]
    fn trains_on_the_prompt_where_asked_to() {
        let mut fixture = Fixture::new("prompt-completion", LINES);
        fixture.recipe.train_on_prompt = true;
        let batch = fixture.open().unwrap().train.batch(&[1, 0]).unwrap();
        assert_eq!(batch.num_targets(), batch.num_tokens());
        assert_eq!(batch.sequences.iter().map(|sequence| sequence.sample).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn a_completion_can_be_a_class() {
        let lines = "{\"prompt\": \"key\", \"completion\": \" C\\n\"}\n";
        let splits = Fixture::new("prompt-completion", lines).classify().open().unwrap();
        let sequence = splits.train.batch(&[0]).unwrap().sequences.swap_remove(0);
        assert_eq!(sequence.targets, Targets::Class(2));
        assert_eq!(sequence.inputs, [tokenizer().encode("key").unwrap(), vec![0]].concat());
        assert_eq!(splits.train.lengths(), [sequence.inputs.len()]);
        let number = Fixture::new("prompt-completion", "{\"prompt\": \"key\", \"label\": \"2\"}\n").classify().open().unwrap();
        assert_eq!(number.train.batch(&[0]).unwrap().sequences[0].targets, Targets::Class(2));
        // Where numbers are names of classes, they are nothing else.
        let labelled = |label: &str| {
            let labels = ClassList::Named(["1", "0", "7"].map(String::from).to_vec());
            let mut fixture = Fixture::new("prompt-completion", format!("{{\"prompt\": \"key\", \"label\": {label}}}\n"));
            fixture.head = HeadRecipe::SeqClassificationOnLogits(labels);
            fixture
        };
        for (label, class) in [("7", 2), ("1", 0), ("\"1\"", 0)] {
            let sequences = labelled(label).open().unwrap().train.batch(&[0]).unwrap().sequences;
            assert_eq!(sequences[0].targets, Targets::Class(class));
        }
        for label in ["2", "\"2\""] {
            let expected = "`train.jsonl:1`: field `label`: expected one of the labels `1`, `0`, `7`, found `2`";
            assert_eq!(labelled(label).error(), expected);
        }
        let error = Fixture::new("prompt-completion", LINES).classify().error();
        assert_eq!(error, "`train.jsonl:1`: field `completion`: expected one of the labels `A`, `B`, `C`, `D`, found `holds`");
    }

    #[test]
    fn says_where_a_file_is_wrong() {
        let error = |content: &str| Fixture::new("prompt-completion", content).error();
        let good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
        assert_eq!(error(&format!("{good}\nnot json\n")), "`train.jsonl:3` is not JSON: expected ident at column 2");
        assert_eq!(error("{\"prompt\": \"a\"}"), "`train.jsonl:1`: field `completion` is missing");
        assert_eq!(
            error("{\"completion\": \"a\", \"prompt\": null}"),
            "`train.jsonl:1`: field `prompt`: expected a string, found null"
        );
        assert_eq!(error("[1]\n"), "record 0 (from 0) of `train.jsonl`: expected a JSON object, found a number");
        let chat = "{\"prompt\": [{\"role\": \"user\"}], \"completion\": \"a\"}";
        assert_eq!(error(chat), "`train.jsonl:1`: field `completion`: expected a list of messages, as `prompt` is, found \"a\"");
        let numbers = "{\"prompt\": [1], \"completion\": \"a\"}";
        assert_eq!(error(numbers), "`train.jsonl:1`: field `prompt`: expected a string, found an array");
        assert_eq!(error(""), "`train.jsonl` holds no samples, expected at least 1");
        assert_eq!(error(" \n\n"), "`train.jsonl` holds no samples, expected at least 1");
        assert!(
            Fixture::new("prompt-completion", [0xff, 0xfd, b'\n'])
                .error()
                .starts_with("`train.jsonl:1`: byte 1 is 0xff, which is not UTF-8")
        );
        let nothing = "{\"prompt\": \"\", \"completion\": \"\"}";
        assert_eq!(
            error(nothing),
            "`train.jsonl:1`: field `completion`: expected a text to train on, as there is no prompt, found an empty one"
        );
    }
}
