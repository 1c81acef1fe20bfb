//! A look at every row of the data files: what it says, which of its tokens are trained, what becomes of it, and whether a run would start.

use std::collections::{BTreeMap, HashSet};

use super::bad_rows::BadRows;
use super::encoded_rows::{SampleRow, each_row};
use super::encoded_sample::{Aim, EncodedSample};
use super::example::Example;
use super::faults::{self, RowFault};
use super::on_too_long::{LengthCounts, LengthOutcome};
use super::open::{DataRequest, Opener};
use super::rows::SplitName;
use super::sample_place::SamplePlace;
use super::source::DataSource;
use super::split::held_out;
use super::token_file::fingerprint;
use crate::recipe::{DataPaths, OnBadRow, ValidationSource};
use crate::units::Fault;

/// What the rows of some files came to: each is bad, too long, or one of the samples.
#[derive(Debug)]
pub struct Survey {
    pub source: DataSource,
    bad: BadRows,
    /// Samples that stop a run as too long.
    pub too_long: usize,
    first_too_long: Option<Fault>,
    /// The others, by what becomes of them.
    pub samples: LengthCounts,
    /// Samples with the same tokens as an earlier one, used or not.
    pub duplicates: usize,
    pub tokens: usize,
    pub trained: usize,
    /// Samples by the power of two that is not below their length.
    pub lengths: Vec<usize>,
    limit: usize,
    seen: HashSet<u64>,
    /// Samples that are held out and have the tokens of one to train on.
    pub shared: usize,
    pub warnings: Vec<String>,
}

/// Hands over each row of a split, bad or not, whatever `data.on_bad_row` says: of all files to train on, or of the samples that are held out,
/// from files of their own or drawn from those. `skips_errors`: also where no row can be encoded, which ends a run.
///
/// # Errors
/// Files are missing or damaged, there is no sample among the first rows, or `sink` refuses.
pub fn survey(
    request: &DataRequest<'_>,
    split: SplitName,
    skips_errors: bool,
    sink: &mut dyn FnMut(&SampleRow<SurveyedSample>) -> Result<(), Fault>,
) -> Result<Survey, Fault> {
    let opener = Opener::new(request)?;
    let recipe = request.recipe;
    let source = match (split, &recipe.validation) {
        (SplitName::Validation, ValidationSource::File(paths)) => DataSource::find(recipe, paths, split)?,
        _ => DataSource::find(recipe, &recipe.train, SplitName::Train)?,
    };
    // The samples that are held out, in order, by their numbers among all samples.
    let drawn = match (split, &recipe.validation) {
        (SplitName::Validation, ValidationSource::Fraction(fraction)) => {
            Some(drawn(&opener.used(&recipe.train, SplitName::Train)?, *fraction, request.seed))
        }
        _ => None,
    };
    let mut survey = Survey::new(source.clone(), recipe.on_bad_row, opener.limit);
    opener.encoder.chat.take_notes();
    let used = opener.survey_rows(&source, &mut |number, row| {
        if drawn.as_ref().is_none_or(|drawn| row.sample.is_ok() && drawn.binary_search(&number).is_ok()) {
            sink(&row)?;
            survey.take(row, skips_errors)?;
        }
        Ok(())
    })?;
    let chat = &opener.encoder.chat;
    survey.warnings = chat.take_notes().warnings(chat.recipe.train_on_end_of_turn);
    let (held_out, trained): (BTreeMap<_, _>, BTreeMap<_, _>) = match (&recipe.validation, split) {
        (ValidationSource::Fraction(fraction), _) => {
            let held_out = drawn.unwrap_or_else(|| self::drawn(&used, *fraction, request.seed));
            used.into_iter().partition(|(number, _)| held_out.binary_search(number).is_ok())
        }
        (ValidationSource::File(_), SplitName::Validation) => (used, opener.used(&recipe.train, SplitName::Train)?),
        (ValidationSource::File(paths), _) => (opener.used(paths, SplitName::Validation)?, used),
    };
    let trained: HashSet<u64> = trained.into_values().collect();
    survey.shared = held_out.values().filter(|fingerprint| trained.contains(fingerprint)).count();
    Ok(survey)
}

fn drawn(used: &BTreeMap<usize, u64>, fraction: f64, seed: u64) -> Vec<usize> {
    held_out(&used.keys().copied().collect::<Vec<_>>(), fraction, seed)
}

impl Opener<'_> {
    /// The samples that are used, by their numbers among all samples, with the fingerprints of their tokens.
    fn used(&self, paths: &DataPaths, split: SplitName) -> Result<BTreeMap<usize, u64>, Fault> {
        self.survey_rows(&DataSource::find(self.recipe, paths, split)?, &mut |_, _| Ok(()))
    }

    /// Hands over each row with the number of the sample that it is, if it is one; returns those that are used, as [`used`](Self::used) does.
    fn survey_rows(
        &self,
        source: &DataSource,
        sink: &mut dyn FnMut(usize, SampleRow<SurveyedSample>) -> Result<(), Fault>,
    ) -> Result<BTreeMap<usize, u64>, Fault> {
        let (mut samples, mut used) = (0, BTreeMap::new());
        each_row(source, &self.reader(source)?, |SampleRow { place, sample }| {
            let sample = sample.and_then(|(example, tokens)| self.surveyed(&place, &example, tokens));
            let number = samples;
            if let Ok(sample) = &sample {
                samples += 1;
                used.extend(sample.outcome.is_used().then_some((number, sample.fingerprint)));
            }
            sink(number, SampleRow { place, sample })
        })?;
        Ok(used)
    }

    fn surveyed(&self, place: &SamplePlace, example: &Example, mut sample: EncodedSample) -> Result<SurveyedSample, Fault> {
        let (length, fingerprint) = (sample.length(), fingerprint(&sample.ids));
        let outcome = LengthOutcome::of(self.recipe, self.limit, length, || Ok(place.clone()))?;
        if let LengthOutcome::Cut(range) = &outcome {
            sample.cut(range.clone());
        }
        // Nothing predicts it.
        sample.without_targets_before(1);
        let text = self.encoder.source_text(&example.content, place)?;
        let EncodedSample { ids, aim, .. } = sample;
        let (is_trained, class) = match aim {
            Aim::Tokens(is_trained) => (is_trained, None),
            Aim::Class(class) => (vec![false; ids.len()], Some(class)),
        };
        Ok(SurveyedSample { text, ids, is_trained, class, length: length.total, outcome, fingerprint })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedSample {
    /// What was tokenised; `None` of samples that are token ids already.
    pub text: Option<String>,
    /// The tokens, without those that are cut out.
    pub ids: Vec<u32>,
    pub is_trained: Vec<bool>,
    /// The class, where the head has classes: the only target.
    pub class: Option<usize>,
    /// How many tokens it had before anything was cut.
    pub length: usize,
    pub outcome: LengthOutcome,
    /// A hash of its tokens before anything was cut: tells samples apart.
    fingerprint: u64,
}

impl SurveyedSample {
    pub fn num_trained(&self) -> usize {
        self.is_trained.iter().filter(|&&trained| trained).count()
    }
}

impl Survey {
    fn new(source: DataSource, on_bad_row: OnBadRow, limit: usize) -> Self {
        Self {
            source,
            bad: BadRows::new(on_bad_row),
            too_long: 0,
            first_too_long: None,
            samples: LengthCounts::default(),
            duplicates: 0,
            tokens: 0,
            trained: 0,
            lengths: Vec::new(),
            limit,
            seen: HashSet::new(),
            shared: 0,
            warnings: Vec::new(),
        }
    }

    /// Counts a row; fails where it says that no row can be encoded, unless `skips_errors`.
    fn take(&mut self, row: SampleRow<SurveyedSample>, skips_errors: bool) -> Result<(), Fault> {
        let sample = match row.sample {
            Ok(sample) => sample,
            Err(error) => {
                match error.payload::<RowFault>() {
                    Some(RowFault { is_too_long: true, .. }) => {
                        self.bad.read += 1;
                        self.too_long += 1;
                        self.first_too_long.get_or_insert(error);
                    }
                    None if !skips_errors => return Err(error),
                    _ => self.bad.note(error),
                }
                return Ok(());
            }
        };
        self.bad.read += 1;
        self.duplicates += usize::from(!self.seen.insert(sample.fingerprint));
        self.samples.add(sample.length, &sample.outcome);
        count_length(&mut self.lengths, sample.length);
        if sample.outcome.is_used() {
            self.tokens += sample.ids.len();
            self.trained += sample.num_trained();
        }
        Ok(())
    }

    pub fn rows(&self) -> usize {
        self.bad.read
    }

    pub fn bad(&self) -> usize {
        self.bad.count
    }

    /// What a run would leave out without stopping, if there is any.
    ///
    /// # Errors
    /// It would not start: what it would say.
    pub fn verdict(self) -> Result<Option<Fault>, Fault> {
        let (used, read, bad) = (self.samples.used(), self.bad.read, self.bad.count);
        let path = self.source.first();
        let left_out = self.bad.finish(path)?;
        if let Some(error) = self.first_too_long {
            return Err(error);
        }
        if used == 0 {
            return Err(faults::nothing_fits(path, read - bad, self.limit, self.samples.shortest.unwrap_or(0)));
        }
        Ok(left_out)
    }
}

/// Counts a length by the power of two that is not below it.
pub(super) fn count_length(counts: &mut Vec<usize>, length: usize) {
    let power = length.max(1).next_power_of_two().ilog2() as usize;
    counts.resize(counts.len().max(power + 1), 0);
    counts[power] += 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::recipe::{OnTooLong, TemplateChoice};
    use crate::units::Exit;

    fn surveyed(fixture: &Fixture, split: SplitName) -> Result<(Survey, Vec<SampleRow<SurveyedSample>>), Fault> {
        let mut rows = Vec::new();
        let mut sink = |row: &SampleRow<SurveyedSample>| {
            rows.push(SampleRow {
                place: row.place.clone(),
                sample: row.sample.as_ref().map_or_else(|_| Err(Fault::new(Exit::Failed, "x")), |sample| Ok(sample.clone())),
            });
            Ok(())
        };
        let survey = survey(&fixture.request(Some(&tokenizer())), split, false, &mut sink)?;
        Ok((survey, rows))
    }

    /// Each kind of row that is none, of the format that it can be in; `{long}` becomes a text of many tokens.
    const KINDS: &[(&str, &str)] = &[
        ("prompt-completion", "{"),
        ("prompt-completion", "[1]"),
        ("prompt-completion", r#"{"prompt": "a"}"#),
        ("prompt-completion", r#"{"prompt": 1, "completion": "b"}"#),
        ("prompt-completion", r#"{"prompt": "", "completion": ""}"#),
        ("prompt-completion", r#"{"prompt": "{long}", "completion": "b"}"#),
        ("prompt-completion", r#"{"prompt": "a", "completion": "{long}"}"#),
        ("tokens", r#"{"input_ids": [1, 512], "labels": [1, 512]}"#),
        ("tokens", r#"{"input_ids": [1, 2], "labels": [1, -100]}"#),
        ("messages", r#"{"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "a"}]}"#),
        ("messages", r#"{"messages": [{"role": "user", "content": "a"}]}"#),
        ("messages", r#"{"messages": [{"content": "a"}]}"#),
        ("messages", r#"{"messages": [{"role": "user", "content": "a"}], "documents": "d"}"#),
    ];

    const TEMPLATE: &str =
        "{% for m in messages %}{{ raise_exception('refused') if m.content == 'no' }}{{ m.role ~ m.content }}{% endfor %}";

    fn sound(format: &str) -> &'static str {
        match format {
            "tokens" => r#"{"input_ids": [1, 2], "labels": [1, 2]}"#,
            "messages" => r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
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
                        let run = fixture.open().map(|splits| splits.files[0].clone());
                        let survey = surveyed(&fixture, SplitName::Train).map(|(survey, _)| survey);
                        let case = format!("{bad}: {rows:?}, {on_bad_row}, {on_too_long}");
                        let survey = match survey {
                            Ok(survey) => survey,
                            Err(error) => {
                                assert_eq!(run.unwrap_err().to_string(), error.to_string(), "{case}");
                                continue;
                            }
                        };
                        if let Ok(run) = &run {
                            assert_eq!(
                                (survey.rows(), survey.bad(), &survey.samples),
                                (run.rows, run.bad, &run.samples),
                                "{case}"
                            );
                            assert_eq!(survey.duplicates, run.duplicates, "{case}");
                        }
                        let verdict = survey.verdict().map(|_| ()).map_err(|error| error.to_string());
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
        let mut fixture = Fixture::new("prompt-completion", rows.join("\n")).limit(30, OnTooLong::Drop);
        fixture.recipe.on_bad_row = OnBadRow::Drop;
        fixture.recipe.validation = ValidationSource::Fraction(0.3);
        let validation = fixture.open().unwrap().validation.unwrap();
        let (survey, rows) = surveyed(&fixture, SplitName::Validation).unwrap();
        assert!(validation.len() == 4 && survey.samples.used() == 4 && survey.rows() == 4);
        for (index, row) in rows.into_iter().enumerate() {
            let mut ids = row.sample.unwrap().ids;
            ids.pop();
            assert_eq!(validation.batch(&[index]).unwrap().sequences[0].inputs, ids);
        }
    }

    #[test]
    fn warnings_are_told_by_a_survey_too() {
        let mut fixture = Fixture::new("messages", sound("messages"));
        fixture.recipe.chat.chat_template = Some(TemplateChoice(TEMPLATE.to_owned()));
        let warnings = surveyed(&fixture, SplitName::Train).unwrap().0.warnings;
        assert!(warnings[0].starts_with("no answer's end-of-turn token is trained"), "{warnings:?}");
        assert_eq!(fixture.open().unwrap().warnings, warnings);
        let turns =
            |answer: &str| format!(r#"{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{answer}"}}"#);
        let row = format!(r#"{{"messages": [{}, {}]}}"#, turns("<think>b</think>c"), turns("d"));
        let mut fixture = Fixture::new("messages", row);
        let thoughtless = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '|' ~ (m.content if loop.last else m.content.split('</think>')[-1]) \
            ~ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant|' if add_generation_prompt }}";
        fixture.recipe.chat.chat_template = Some(TemplateChoice(thoughtless.to_owned()));
        let (survey, rows) = surveyed(&fixture, SplitName::Train).unwrap();
        let sample = rows[0].sample.as_ref().unwrap();
        let trained: Vec<u32> =
            sample.ids.iter().zip(&sample.is_trained).filter(|(_, trained)| **trained).map(|(&id, _)| id).collect();
        assert_eq!(tokenizer().decode_with_special(&trained).unwrap(), "c<|im_end|>d<|im_end|>");
        assert!(survey.warnings[0].contains("earlier messages of the assistant otherwise"), "{:?}", survey.warnings);
    }
}
