//! From a row to its example, by the format.

use serde_json::{Value, json};

use super::format::{ExampleReader, RowFormat};
use super::{alpaca, helmet, longbench_v2, messages, prompt_completion, ruler, sharegpt, text, tokens};
use crate::data::encode::Encoder;
use crate::data::example::Example;
use crate::data::label_tokens::Classes;
use crate::data::media;
use crate::data::rows::DataRow;
use crate::recipe::{DataFormat, DataRecipe, HelmetFamily, LongBenchPrompt};
use crate::units::Fault;

/// All formats; of those whose fields a row has, the first counts.
pub(super) const FORMATS: [&RowFormat; 9] = [
    &longbench_v2::FORMAT,
    &tokens::FORMAT,
    &prompt_completion::FORMAT,
    &messages::FORMAT,
    &sharegpt::FORMAT,
    &alpaca::FORMAT,
    &ruler::FORMAT,
    &helmet::FORMAT,
    &text::FORMAT,
];

impl<'a> ExampleReader<'a> {
    /// # Errors
    /// The recipe contradicts the format; the format needs a tokenizer and there is none; or it has no classes, which the head asks for.
    pub(in crate::data) fn new(
        recipe: &'a DataRecipe,
        name: DataFormat,
        classes: Option<&'a Classes>,
        encoder: &'a Encoder,
    ) -> Result<Self, Fault> {
        if let Some((_, error)) = recipe.contradiction(name) {
            return Err(error);
        }
        let format = FORMATS.into_iter().find(|format| format.name == name);
        let format = format.ok_or_else(|| Fault::defect(format!("`{name}` is no registered format")))?;
        let mut reader = Self { format, recipe, classes, encoder, has_template: false };
        if format.has_texts {
            reader.tokenizer()?;
        }
        if !format.has_classes && classes.is_some() {
            let message = format!("`data.format = \"{name}\"` has no classes, which the head asks for");
            return Err(Fault::data(message, "use `head.kind = \"next_token\"`, or rows with `prompt` and `label`"));
        }
        reader.has_template = classes.is_none() && (format.is_message)(recipe) && encoder.chat.has_template()?;
        Ok(reader)
    }

    pub(in crate::data) fn format(&self) -> DataFormat {
        self.format.name
    }

    /// All that decides what it makes of a row, key by key.
    pub(in crate::data) fn identity(&self) -> Value {
        let DataRecipe { prompt, max_prompt_tokens, family, .. } = self.recipe;
        json!({
            "format": self.format.name.name(), "classes": self.classes, "prompt": prompt.map(LongBenchPrompt::name),
            "max_prompt_tokens": max_prompt_tokens, "family": family.map(HelmetFamily::name), "has_template": self.has_template,
        })
    }

    pub(in crate::data) fn reply_prefix(&self) -> &'static str {
        (self.format.reply_prefix)(self.recipe)
    }

    pub(in crate::data) fn example(&self, mut row: DataRow) -> Result<Example, Fault> {
        media::refuse(&row)?;
        (self.format.read)(self, &mut row)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::data::fixtures::Fixture;

    #[test]
    fn each_format_of_a_recipe_is_registered_once_and_known_by_its_fields() {
        for &name in DataFormat::ALL {
            let named: Vec<_> = FORMATS.into_iter().filter(|format| format.name == name).collect();
            let [format] = named[..] else { panic!("`{name}` is registered {} times", named.len()) };
            assert!(!format.known_by.is_empty());
            for fields in format.known_by {
                assert!(fields.iter().all(|field| name.fields().contains(field)), "{fields:?}");
                let row: Value = fields.iter().map(|&field| (field.to_owned(), json!("x"))).collect();
                let fixture = Fixture::new(name, format!("{row}\n"));
                let detected = super::super::detect(&[fixture.dir.path().join("train.jsonl")], &DataRecipe::default()).unwrap();
                assert_eq!(detected.format, name, "{fields:?}");
            }
        }
        assert_eq!(FORMATS.len(), DataFormat::ALL.len());
    }
}
