//! A look at every row of the data files: what it says, which of its tokens are trained, and what becomes of it. Nothing is kept.

use std::collections::HashSet;

use super::faults::RowFault;
use super::formats::ExampleReader;
use super::on_too_long::{Fit, fit, no_plain_text};
use super::open::{ModelLimits, Opener};
use super::row_counts::RowCounts;
use super::rows::{self, DataRow, SplitName};
use super::sample_place::{LineOrRecord, SamplePlace};
use super::source::DataSource;
use super::split::held_out;
use super::surveyed_row::{SampleFate, SurveyedRow, SurveyedSample};
use super::token_file::fingerprint;
use super::tokenizer::Tokenizer;
use super::windows::windows;
use crate::recipe::{DataPaths, DataRecipe, HeadRecipe, ValidationSource};
use crate::units::Fault;

/// Which rows are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SurveyedPart {
    /// All of the files to train on, from which validation samples may be drawn.
    Train,
    /// Those held out: of files of their own, or drawn from the samples to train on.
    Validation,
}

#[derive(Debug)]
pub struct Survey {
    pub source: DataSource,
    /// What their rows came to.
    pub counts: RowCounts,
    /// Samples that are held out and have the tokens of one to train on.
    pub shared: usize,
    /// What may be wrong with the samples, though all could be read.
    pub warnings: Vec<String>,
}

/// Hands over each row of some of a recipe's files, bad or not, whatever `data.on_bad_row` says. `goes_on`: also where no row can be
/// encoded, which ends a run. `seed` draws the samples that are held out.
///
/// # Errors
/// Files are missing or damaged, there is no sample among the first rows, or `sink` refuses.
pub fn survey<E: From<Fault>>(
    (recipe, head): (&DataRecipe, &HeadRecipe),
    tokenizer: Option<&Tokenizer>,
    limits: ModelLimits,
    (part, seed, goes_on): (SurveyedPart, u64, bool),
    sink: &mut dyn FnMut(&SurveyedRow) -> Result<(), E>,
) -> Result<Survey, E> {
    let opener = Opener::new(recipe, head, tokenizer, limits)?;
    let (paths, split, drawn): (&DataPaths, _, _) = match (part, &recipe.validation) {
        (SurveyedPart::Train, _) => (&recipe.train, SplitName::Train, None),
        (SurveyedPart::Validation, ValidationSource::File(paths)) => (paths, SplitName::Validation, None),
        (SurveyedPart::Validation, ValidationSource::Fraction(fraction)) => (&recipe.train, SplitName::Train, Some(*fraction)),
    };
    let source = DataSource::find(recipe, paths, split)?;
    let reader = opener.reader(&source)?;
    let mut used = Vec::new();
    // The samples that are held out, in order, by their numbers among all samples.
    let drawn = match drawn {
        None => None,
        Some(fraction) => {
            used = opener.used(recipe, &recipe.train, SplitName::Train)?;
            Some(held_out(&numbers(&used), fraction, seed))
        }
    };
    let (mut counts, mut number) = (RowCounts::new(recipe.on_bad_row, opener.limit.tokens), 0);
    opener.encoder.chat.take_notes();
    opener.each_row(&source, &reader, &mut |row| {
        let is_sample = row.sample.is_ok();
        number += usize::from(is_sample);
        let is_wanted = |drawn: &Vec<usize>| is_sample && drawn.binary_search(&(number - 1)).is_ok();
        if drawn.as_ref().is_none_or(is_wanted) {
            if drawn.is_none() {
                used.extend(
                    row.sample
                        .as_ref()
                        .ok()
                        .filter(|sample| sample.fate.is_used())
                        .map(|sample| (number - 1, sample.fingerprint)),
                );
            }
            sink(&row)?;
            counts.take(row, goes_on)?;
        }
        Ok::<(), E>(())
    })?;
    let warnings = opener.encoder.chat.warnings(&opener.encoder.chat.take_notes());
    let (held_out, trained): (UsedSamples, UsedSamples) = match (&recipe.validation, part) {
        (ValidationSource::Fraction(fraction), _) => {
            let held_out = drawn.unwrap_or_else(|| held_out(&numbers(&used), *fraction, seed));
            used.into_iter().partition(|(number, _)| held_out.binary_search(number).is_ok())
        }
        (ValidationSource::File(paths), SurveyedPart::Train) => (opener.used(recipe, paths, SplitName::Validation)?, used),
        (ValidationSource::File(_), SurveyedPart::Validation) => (used, opener.used(recipe, &recipe.train, SplitName::Train)?),
    };
    let trained: HashSet<u64> = trained.into_iter().map(|(_, fingerprint)| fingerprint).collect();
    let shared = held_out.iter().filter(|(_, fingerprint)| trained.contains(fingerprint)).count();
    Ok(Survey { source, counts, shared, warnings })
}

/// Samples that are used, by their numbers among all samples, with the fingerprints of their tokens.
type UsedSamples = Vec<(usize, u64)>;

fn numbers(used: &UsedSamples) -> Vec<usize> {
    used.iter().map(|(number, _)| *number).collect()
}

impl Opener<'_> {
    fn used(&self, recipe: &DataRecipe, paths: &DataPaths, split: SplitName) -> Result<UsedSamples, Fault> {
        let source = DataSource::find(recipe, paths, split)?;
        let (mut number, mut used) = (0, Vec::new());
        self.each_row(&source, &self.reader(&source)?, &mut |row| {
            let Ok(sample) = row.sample else { return Ok(()) };
            used.extend(sample.fate.is_used().then_some((number, sample.fingerprint)));
            number += 1;
            Ok::<_, Fault>(())
        })?;
        Ok(used)
    }

    fn each_row<E: From<Fault>>(
        &self,
        source: &DataSource,
        reader: &ExampleReader<'_>,
        sink: &mut dyn FnMut(SurveyedRow) -> Result<(), E>,
    ) -> Result<(), E> {
        source.files.iter().try_for_each(|file| {
            rows::each(file, &source.rows, &mut |row| {
                let whole = || SamplePlace { path: file.as_path().into(), at: LineOrRecord::Whole };
                let place = match &row {
                    Ok(row) => row.place(),
                    Err(error) => error.of_type::<RowFault>().map_or_else(whole, |row| row.place.clone()),
                };
                sink(SurveyedRow { place, sample: row.and_then(|row| self.surveyed(reader, row)) })
            })
        })
    }

    fn surveyed(&self, reader: &ExampleReader<'_>, row: DataRow) -> Result<SurveyedSample, Fault> {
        let example = reader.example(row)?;
        let place = || example.place.clone();
        let mut sample = self.encoder.encode(&example.content, &place)?;
        let (length, fingerprint) = (sample.length(), fingerprint(&sample.ids));
        let fate = match fit(length, self.limit.tokens, self.recipe.on_too_long, || Ok(place()))? {
            Fit::Whole => SampleFate::Whole,
            Fit::Dropped => SampleFate::Dropped,
            Fit::NothingToCut => SampleFate::NothingToCut,
            Fit::Split if !sample.is_plain_text() => {
                return Err(no_plain_text(place(), length, self.limit.tokens));
            }
            Fit::Split => SampleFate::Split(windows(length.total, self.limit.tokens, self.limit.overlap).count()),
            Fit::Cut(range) => {
                let cut = range.len();
                sample.cut(range);
                SampleFate::Cut(cut)
            }
        };
        let text = self.encoder.source_text(&example.content, &place)?;
        let (ids, is_trained, class) = sample.into_parts();
        Ok(SurveyedSample { text, ids, is_trained, class, length: length.total, fate, fingerprint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::faults;
    use crate::data::fixtures::{Fixture, LIMITS, tokenizer};
    use crate::recipe::{DataFormat, OnBadRow, OnTooLong, TemplateChoice};

    fn surveyed(fixture: &Fixture, part: SurveyedPart) -> Result<(Survey, Vec<SurveyedRow>), Fault> {
        let mut rows = Vec::new();
        let mut sink = |row: &SurveyedRow| {
            rows.push(SurveyedRow {
                place: row.place.clone(),
                sample: row
                    .sample
                    .as_ref()
                    .map_or_else(|_| Err(faults::empty(std::path::Path::new("x"))), |sample| Ok(sample.clone())),
            });
            Ok::<(), Fault>(())
        };
        let survey = survey((&fixture.recipe, &fixture.head), Some(&tokenizer()), LIMITS, (part, 1, false), &mut sink)?;
        Ok((survey, rows))
    }

    /// Each kind of row that is none, of the format that it can be in; `{long}` becomes a text of many tokens.
    const KINDS: &[(DataFormat, &str)] = &[
        (DataFormat::PromptCompletion, "{"),
        (DataFormat::PromptCompletion, "[1]"),
        (DataFormat::PromptCompletion, r#"{"prompt": "a"}"#),
        (DataFormat::PromptCompletion, r#"{"prompt": 1, "completion": "b"}"#),
        (DataFormat::PromptCompletion, r#"{"prompt": "", "completion": ""}"#),
        (DataFormat::PromptCompletion, r#"{"prompt": "{long}", "completion": "b"}"#),
        (DataFormat::PromptCompletion, r#"{"prompt": "a", "completion": "{long}"}"#),
        (DataFormat::Tokens, r#"{"input_ids": [1, 512], "labels": [1, 512]}"#),
        (DataFormat::Tokens, r#"{"input_ids": [1, 2], "labels": [1, -100]}"#),
        (DataFormat::Messages, r#"{"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "a"}]}"#),
        (DataFormat::Messages, r#"{"messages": [{"role": "user", "content": "a"}]}"#),
        (DataFormat::Messages, r#"{"messages": [{"content": "a"}]}"#),
        (DataFormat::Messages, r#"{"messages": [{"role": "user", "content": "a"}], "documents": "d"}"#),
    ];

    const TEMPLATE: &str =
        "{% for m in messages %}{{ raise_exception('refused') if m.content == 'no' }}{{ m.role ~ m.content }}{% endfor %}";

    fn sound(format: DataFormat) -> &'static str {
        match format {
            DataFormat::Tokens => r#"{"input_ids": [1, 2], "labels": [1, 2]}"#,
            DataFormat::Messages => r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            _ => r#"{"prompt": "a", "completion": "b"}"#,
        }
    }

    #[test]
    fn a_survey_says_of_each_kind_of_row_what_a_run_says() {
        for &(format, bad) in KINDS {
            let (sound, bad) = (sound(format), bad.replace("{long}", &"word ".repeat(40)));
            for rows in [vec![sound, &bad, sound], vec![&bad, sound, &bad], vec![&bad], vec![&bad, &bad], vec![]] {
                let mut fixture = Fixture::new(format, rows.join("\n"));
                fixture.recipe.chat.chat_template = Some(TemplateChoice(TEMPLATE.to_owned()));
                fixture.recipe.max_seq_length = Some(40);
                for on_bad_row in [OnBadRow::Error, OnBadRow::Drop] {
                    for on_too_long in [OnTooLong::Error, OnTooLong::Drop, OnTooLong::Truncate, OnTooLong::Split] {
                        (fixture.recipe.on_bad_row, fixture.recipe.on_too_long) = (on_bad_row, on_too_long);
                        let run = fixture.open().map(|splits| splits.report.files[0].clone());
                        let survey = surveyed(&fixture, SurveyedPart::Train).map(|(survey, _)| survey);
                        let case = format!("{bad}: {rows:?}, {on_bad_row}, {on_too_long}");
                        let Survey { source, counts, .. } = match survey {
                            Ok(survey) => survey,
                            Err(error) => {
                                assert_eq!(run.unwrap_err().to_string(), error.to_string(), "{case}");
                                continue;
                            }
                        };
                        if let Ok(run) = &run {
                            assert_eq!((counts.rows(), counts.bad(), counts.used()), (run.rows, run.bad, run.kept), "{case}");
                            assert_eq!((counts.dropped + counts.uncuttable, counts.cut), (run.dropped, run.cut), "{case}");
                            let found = (counts.cut_tokens, counts.longest, counts.duplicates);
                            assert_eq!(found, (run.cut_tokens, run.longest, run.duplicates), "{case}");
                        }
                        let verdict = counts.verdict(&source).map(|_| ()).map_err(|error| error.to_string());
                        assert_eq!(run.map(|_| ()).map_err(|error| error.to_string()), verdict, "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn those_that_are_drawn_to_validate_are_those_of_the_run() {
        let rows: Vec<String> = (0..20)
            .map(|i| match i % 5 {
                1 => "{}".to_owned(),
                3 => format!(r#"{{"prompt": "{}", "completion": "b"}}"#, "word ".repeat(40)),
                _ => format!(r#"{{"prompt": "{i}", "completion": "b"}}"#),
            })
            .collect();
        let mut fixture = Fixture::new(DataFormat::PromptCompletion, rows.join("\n")).limit(30, OnTooLong::Drop);
        fixture.recipe.on_bad_row = OnBadRow::Drop;
        fixture.recipe.validation = ValidationSource::Fraction(0.3);
        let validation = fixture.open().unwrap().validation.unwrap();
        let (survey, rows) = surveyed(&fixture, SurveyedPart::Validation).unwrap();
        assert!(validation.len() == 4 && survey.counts.used() == 4 && survey.counts.rows() == 4);
        for (index, row) in rows.into_iter().enumerate() {
            let mut ids = row.sample.unwrap().ids;
            ids.pop();
            assert_eq!(validation.batch(&[index]).unwrap().sequences[0].inputs, ids);
        }
    }

    #[test]
    fn warnings_are_told_by_a_survey_too() {
        let mut fixture = Fixture::new(DataFormat::Messages, sound(DataFormat::Messages));
        fixture.recipe.chat.chat_template = Some(TemplateChoice(TEMPLATE.to_owned()));
        let warnings = surveyed(&fixture, SurveyedPart::Train).unwrap().0.warnings;
        assert!(warnings[0].starts_with("no answer's end-of-turn token is trained"), "{warnings:?}");
        assert_eq!(fixture.open().unwrap().report.warnings, warnings);
        let turns =
            |answer: &str| format!(r#"{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{answer}"}}"#);
        let row = format!(r#"{{"messages": [{}, {}]}}"#, turns("<think>b</think>c"), turns("d"));
        let mut fixture = Fixture::new(DataFormat::Messages, row);
        let thoughtless = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '|' ~ (m.content if loop.last else m.content.split('</think>')[-1]) \
            ~ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant|' if add_generation_prompt }}";
        fixture.recipe.chat.chat_template = Some(TemplateChoice(thoughtless.to_owned()));
        let (survey, rows) = surveyed(&fixture, SurveyedPart::Train).unwrap();
        let sample = rows[0].sample.as_ref().unwrap();
        let trained: Vec<u32> =
            sample.ids.iter().zip(&sample.is_trained).filter(|(_, trained)| **trained).map(|(&id, _)| id).collect();
        assert_eq!(tokenizer().decode_with_special(&trained).unwrap(), "c<|im_end|>d<|im_end|>");
        assert!(survey.warnings[0].contains("earlier messages of the assistant otherwise"), "{:?}", survey.warnings);
    }
}
