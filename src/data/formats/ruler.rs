//! The format `ruler`: rows as RULER's generators write them. The prompt is `input` and `answer_prefix`; all `outputs` are asked for.

use super::format::{RowFormat, TextRow};
use crate::data::rows::DataRow;
use crate::metrics::Metric;
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    has_prompt: true,
    metrics: |_, _| &[Metric::RulerAll],
    ..DataFormat::of("ruler", "input answer_prefix outputs")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["input", "answer_prefix", "outputs"]],
    ..RowFormat::new(FACTS, |_, row| Ok(text(row)?.example(false)))
};

/// What a row says. `index` is no key: in needle tasks it is a place in the text.
fn text(row: &mut DataRow) -> Result<TextRow, Fault> {
    let prompt = row.text("input")? + &row.text("answer_prefix")?;
    let references = row.texts("outputs")?;
    // A prefix that ends in a blank has the one before the answer.
    let blank = if prompt.ends_with(' ') { "" } else { " " };
    Ok(TextRow { completion: format!("{blank}{}", references.join(", ")), prompt, references })
}
