//! Several data sets as one: mixed by their weights, counted by their names.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::dataset::Dataset;
use super::faults;
use super::load_report::FileReport;
use super::split::held_out;
use crate::recipe::{DataSet, TemplateDate};
use crate::units::{Fault, counted};

#[derive(Debug)]
pub struct Splits {
    pub train: Dataset,
    /// What is held out; `None` for a fraction of 0 or a file of one sample.
    pub validation: Option<Dataset>,
    /// What `data.on_too_long = "drop"` has left out of the training file, as far as the model has positions; `None` where that is none.
    pub rest: Option<Dataset>,
    pub files: Vec<FileReport>,
    /// Samples that are held out and have the tokens of one to train on.
    pub shared: usize,
    /// What may be wrong with the samples, though all could be read.
    pub warnings: Vec<String>,
    /// What of the model's folder has decided the tokens of texts, by name and hash.
    pub origins: BTreeMap<String, String>,
    /// The day that a chat template was told, where it prints one and the recipe names none.
    pub chat_template_date: Option<TemplateDate>,
}

impl fmt::Display for Splits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "{file}")?;
        }
        let held_out = self.validation.as_ref().map_or(0, Dataset::len);
        write!(f, "{}, {}", counted(self.train.len(), "training sample"), counted(held_out, "validation sample"))?;
        if self.shared > 0 {
            let shared = counted(self.shared, "validation sample");
            write!(f, "\nwarning: {shared} also for training: their loss does not measure generalisation")?;
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\nwarning: {warning}"))
    }
}

/// Joins what was opened of each data set. `date` is what the recipe says of all sets' templates.
pub(super) fn joined(opened: Vec<(&DataSet, Splits)>, date: Option<TemplateDate>, seed: u64) -> Result<Splits, Fault> {
    let (mut files, mut warnings) = (Vec::new(), Vec::new());
    let (mut origins, mut chat_template_date) = (BTreeMap::new(), date);
    let (mut train, mut validation, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for (set, mut one) in opened {
        let DataSet { name, weight, data, .. } = set;
        let (trained, samples) = (one.train.len(), one.train.samples());
        let copies = weight.trunc() as usize;
        // Of a single sample something stays.
        let once_more = if copies == 0 && samples.len() == 1 { samples } else { held_out(&samples, weight.fract(), seed) };
        let drawn = one.train.repeated(copies, &once_more);
        let held_out = one.validation.as_ref().map_or(0, Dataset::len);
        let counts = format!(
            "data set `{name}`: {trained} training samples × {weight} = {} an epoch, {held_out} validation samples",
            drawn.len()
        );
        one.files[0].source.notes.insert(0, counts);
        files.extend(one.files);
        warnings.extend(one.warnings.iter().map(|warning| format!("data set `{name}`: {warning}")));
        origins.extend(one.origins.into_iter().map(|(what, hash)| (format!("{what} for the data set `{name}`"), hash)));
        // A date of its own is the set's alone.
        let told = one.chat_template_date.filter(|_| data.chat.chat_template_date.is_none());
        chat_template_date = chat_template_date.or(told);
        train.push((name.clone(), drawn));
        validation.extend(one.validation.map(|held_out| (name.clone(), held_out)));
        rest.extend(one.rest.map(|dropped| (name.clone(), dropped)));
    }
    let train = Dataset::joined(train.into_iter()).ok_or_else(|| faults::empty(Path::new("")))?;
    let (validation, rest) = (Dataset::joined(validation.into_iter()), Dataset::joined(rest.into_iter()));
    Ok(Splits { train, validation, rest, files, shared: 0, warnings, origins, chat_template_date })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::recipe::{Recipe, ValidationSource};

    /// A set of so many texts that begin with a word, of which the first ones are there twice.
    fn rows(word: &str, count: usize, doubled: usize) -> String {
        let row = |index: usize| format!("{{\"text\": \"{word} {index}\"}}\n");
        (0..count).chain(0..doubled).map(row).collect()
    }

    #[test]
    fn weights_say_how_often_an_epoch_has_a_sample() {
        let mut fixture = Fixture::new("text", "");
        let talk = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]}\n";
        for (name, content) in [("a.jsonl", rows("a", 10, 0)), ("b.jsonl", rows("b", 9, 1)), ("c.jsonl", talk.repeat(4))] {
            fixture.write(name, content);
        }
        let words = "model.path = 'm'\n[data]\nvalidation_fraction = 0\nchat_template = '{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}'\n\
                     [[data.sets]]\npath = 'a.jsonl'\nweight = 2.3\n[[data.sets]]\npath = 'b.jsonl'\nvalidation_fraction = 0.5\nweight = 0.5\n\
                     [[data.sets]]\npath = 'c.jsonl'\nformat = 'messages'\n";
        fixture.recipe = Recipe::parse(words.to_owned(), &fixture.dir.path().join("r.toml"), &[]).unwrap().recipe.data;
        let splits = fixture.open().unwrap();
        // 10 × 2.3, and of the 5 that are not held out a half.
        let sizes: Vec<usize> = ["a", "b", "c"]
            .map(|name| (0..splits.train.len()).filter(|&sample| splits.train.set_of(sample) == Some(name)).count())
            .into();
        assert_eq!(sizes, [23, 3, 4]);
        assert!(splits.train.format().is_none());
        let text = |data: &Dataset, sample| tokenizer().decode(&data.batch(&[sample]).unwrap().sequences[0].inputs).unwrap();
        let mut often = BTreeMap::<String, usize>::new();
        (0..23).for_each(|sample| *often.entry(text(&splits.train, sample)).or_default() += 1);
        let mut copies: Vec<usize> = often.into_values().collect();
        copies.sort_unstable();
        assert_eq!(copies, [2, 2, 2, 2, 2, 2, 2, 3, 3, 3]);
        assert!((23..26).all(|sample| text(&splits.train, sample).starts_with("b ")));
        let held_out = splits.validation.as_ref().unwrap();
        assert!((0..held_out.len()).all(|sample| held_out.set_of(sample) == Some("b")));
        // The same again; other samples by another seed; and the sets' samples have numbers of their own.
        assert_eq!(fixture.open().unwrap().train.samples(), splits.train.samples());
        let numbers = splits.train.samples();
        assert!(numbers.is_sorted() && numbers.last() == Some(&23), "{numbers:?}");
        assert_eq!(splits.train.batch(&[29]).unwrap().sequences[0].sample, 23);
        let said = splits.to_string();
        for counts in [
            "`a`: 10 training samples × 2.3 = 23 an epoch, 0 validation samples",
            "`b`: 5 training samples × 0.5 = 3 an epoch, 5 validation samples",
        ] {
            assert!(said.contains(&format!("data set {counts}")), "{said}");
        }
        assert!(said.contains("\n30 training samples, 5 validation samples"), "{said}");
    }

    #[test]
    fn what_is_held_out_and_trained_on_is_counted() {
        let mut fixture = Fixture::new("text", rows("a", 6, 2));
        fixture.recipe.validation = ValidationSource::File(fixture.write("v.jsonl", rows("a", 3, 0) + &rows("b", 3, 0)).into());
        let splits = fixture.open().unwrap();
        assert_eq!(splits.shared, 3);
        let said = splits.to_string();
        let end = "\n8 training samples, 6 validation samples\nwarning: 3 validation samples also for training: their loss does not measure \
                   generalisation";
        assert!(said.ends_with(end), "{said}");
        fixture.recipe.validation = ValidationSource::Fraction(0.0);
        assert_eq!(fixture.open().unwrap().shared, 0);
    }

    #[test]
    fn files_of_other_formats_are_other_data_sets() {
        let mut fixture = Fixture::new("text", rows("a", 12, 0));
        let other = fixture.write("o.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
        fixture.recipe.format = None;
        let both = serde_json::json!([fixture.recipe.train.paths()[0], other]);
        fixture.recipe.train = serde_json::from_value(both).unwrap();
        let error = fixture.open().unwrap_err();
        let said = error.to_string();
        assert!(said.contains("`prompt-completion` by") && said.contains("`text` by"), "{said}");
        assert!(error.hint().unwrap().contains("[[data.sets]]"));
    }
}
