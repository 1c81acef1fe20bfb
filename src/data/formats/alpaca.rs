//! The format `alpaca`: `instruction`, `input` and `output`, and `system` and `history` where they are.

use serde_json::Value;

use super::format::RowFormat;
use crate::data::chat::{ChatSample, message, sample, shown};
use crate::data::example::Example;
use crate::data::rows::DataRow;
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    has_messages: true,
    ..DataFormat::of("alpaca", "instruction input output system history tools documents chat_template_kwargs")
};

pub(super) const FORMAT: RowFormat =
    RowFormat { known_by: &[&["instruction", "output"]], ..RowFormat::new(FACTS, |_, row| conversation(row).map(Example::new)) };

fn conversation(row: &mut DataRow) -> Result<ChatSample, Fault> {
    let mut messages = Vec::new();
    if let Some(system) = row.optional_text("system")?.filter(|text| !text.is_empty()) {
        messages.push(message("system", &system));
    }
    if let Some(history) = row.take("history") {
        let pairs = history.as_array().and_then(|pairs| pairs.iter().map(text_pair).collect::<Option<Vec<_>>>());
        let pairs = pairs.ok_or_else(|| {
            row.bad("history", "a list of pairs of texts: what was asked, and what was answered", shown(&history))
        })?;
        messages.extend(pairs.into_iter().flat_map(|(asked, answered)| [message("user", asked), message("assistant", answered)]));
    }
    let mut instruction = row.text("instruction")?;
    if let Some(input) = row.optional_text("input")?.filter(|input| !input.is_empty()) {
        instruction = if instruction.is_empty() { input } else { format!("{instruction}\n{input}") };
    }
    messages.push(message("user", &instruction));
    messages.push(message("assistant", &row.text("output")?));
    sample(row, "instruction", Value::Array(messages))
}

fn text_pair(pair: &Value) -> Option<(&str, &str)> {
    let [asked, answered] = &pair.as_array()?[..] else { return None };
    asked.as_str().zip(answered.as_str())
}
