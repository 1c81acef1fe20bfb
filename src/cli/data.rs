//! `kvtune data`: what files say, row by row; with a recipe or a model which tokens are trained, what is left out and what is cut.

use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};

use super::recipe_file::{RecipePath, noted, recipe_for};
use crate::data::{
    ColumnLook, DataRequest, FileLook, IGNORE, LengthCounts, LengthOutcome, LineOrRecord, ModelLimits, SampleRow, SplitName,
    Survey, SurveyedSample, Tokenizer, look, survey,
};
use crate::files;
use crate::model::ModelConfig;
use crate::recipe::{DataRecipe, Recipe, ValidationSource};
use crate::report::console;
use crate::report::table::Table;
use crate::train;
use crate::units::{Fault, abridged, quoted};

/// Tokens at either end of a long stretch that are shown.
const SHOWN_TOKENS: usize = 60;

/// Characters at either end of a long text that are shown of a row.
const SHOWN_CHARACTERS: usize = 200;

/// Characters of the longest bar of the histogram.
const BAR: usize = 40;

/// Show the rows of data files: what is trained, dropped and cut.
#[derive(Debug, Args)]
#[command(mut_arg("place", |recipe| recipe.help("The recipe, which ends in `.toml`; or a data file, a folder of them, or a pattern")))]
pub(super) struct LookAtData {
    #[command(flatten)]
    recipe: RecipePath,
    /// With a data file: the directory of the model whose tokenizer and chat template are used.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Print the first N samples, with their trained tokens in colour, or in brackets where there is none.
    #[arg(long, value_name = "N", default_value_t = 0)]
    show: usize,
    /// Write a JSON line for each row: `text`, `input_ids`, `labels` (-100 where a token is not trained), `file` and `row`, or `error`.
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,
    /// The files of `data.train`, from which validation samples may be drawn, or those of `data.validation`.
    #[arg(
        long,
        default_value = "train",
        value_parser = PossibleValuesParser::new(["train", "validation"])
            .map(|name| if name == "train" { SplitName::Train } else { SplitName::Validation })
    )]
    split: SplitName,
}

impl LookAtData {
    pub(super) fn run(&self) -> Result<(), Fault> {
        let path = self.recipe.path();
        let is_data = self.recipe.may_be_data();
        let recipe = match &self.model {
            Some(model) if is_data => recipe_for(model, path, &self.set)?,
            None if is_data => return self.show_files(path),
            Some(_) => {
                return Err(Fault::usage(
                    format!("`{}` is a recipe, which names its model", path.display()),
                    "leave `--model` out, or override it with `--set model.path=DIR`",
                ));
            }
            None => noted(Recipe::load(path, &self.set)?),
        };
        let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
        train::check_data(&recipe, &config)?;
        let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
        let limits = train::limits(&config);
        let mut surveys = Vec::new();
        match &self.dump {
            None => surveys = self.surveys(&recipe, limits, tokenizer.as_ref(), &mut |_| Ok(()))?,
            Some(path) => files::write_named(path, |out| {
                let mut source = None;
                let mut write = |row: &SampleRow<SurveyedSample>| {
                    if source.as_ref() != Some(&row.place.path) {
                        refuse_own_data(path, &row.place.path)?;
                        source = Some(row.place.path.clone());
                    }
                    writeln!(out, "{}", line(row)).map_err(files::io_fault("write", path))
                };
                surveys = self.surveys(&recipe, limits, tokenizer.as_ref(), &mut write)?;
                Ok(())
            })?,
        }
        surveys.into_iter().try_for_each(|(data, survey)| {
            let set = recipe.data.sets.iter().find(|set| set.data == *data);
            set.filter(|_| !console::speech().is_json)
                .map_or(Ok(()), |set| console::result(&format!("data set `{}`, weight {}", set.name, set.weight)))?;
            told(survey, self.dump.is_some())
        })
    }

    /// Surveys each data set, shows its first rows, and hands over all.
    fn surveys<'a>(
        &self,
        recipe: &'a Recipe,
        limits: ModelLimits,
        tokenizer: Option<&Tokenizer>,
        write: &mut dyn FnMut(&SampleRow<SurveyedSample>) -> Result<(), Fault>,
    ) -> Result<Vec<(&'a DataRecipe, Survey)>, Fault> {
        let mut shown_yet = 0;
        let has_colour = console::has_colour(&io::stdout()) && !console::speech().is_json;
        let mut take = |row: &SampleRow<SurveyedSample>| {
            write(row)?;
            if let Ok(sample) = &row.sample
                && shown_yet < self.show
            {
                shown_yet += 1;
                let text = shown(sample, tokenizer, has_colour)?;
                let (place, about) = (&row.place, in_words(sample));
                let json = json!({ "place": place.to_string(), "sample": about, "text": text });
                console::outcome(&format!("── {place}: {about}\n{text}\n"), &json)?;
            }
            Ok(())
        };
        let (head, seed) = (&recipe.head, recipe.train.seed);
        let survey = |data: &'a DataRecipe| {
            let request = DataRequest { recipe: data, head, tokenizer, limits, initial: None, seed };
            Ok((data, survey(&request, self.split, self.dump.is_some(), &mut take)?))
        };
        self.looked_at(recipe)?.into_iter().map(survey).collect()
    }

    /// Shows rows without a tokenizer: which columns they have, and which format they tell.
    fn show_files(&self, data: &Path) -> Result<(), Fault> {
        if self.dump.is_some() || !self.set.is_empty() || self.split != SplitName::Train {
            return Err(Fault::usage(
                "`--dump`, `--set` and `--split` need a recipe, or a model beside the data file",
                "name the model's directory with `--model DIR`",
            ));
        }
        let mut shown_yet = 0;
        let look = look(&data.to_path_buf().into(), &mut |place, row| {
            shown_yet += 1;
            if shown_yet > self.show {
                return Ok(());
            }
            let text = format!("{:#}", shortened(row.clone()));
            console::outcome(&format!("── {place}\n{text}\n"), &json!({ "place": place.to_string(), "row": row }))
        })?;
        let FileLook { notes, format, rows, bad, first_bad, columns, lengths } = look;
        for note in &notes {
            console::note(note);
        }
        if let Some(error) = &first_bad {
            console::warning(&error.to_string());
        }
        let mut table = Table::new(&["rows", "count"]);
        table.row(&["read", &rows.to_string()]);
        table.row(&["bad", &bad.to_string()]);
        console::table(&table)?;
        if !console::speech().is_json {
            console::result(&histogram(&lengths, "characters"))?;
        }
        let mut table = Table::of_words(&["column", "rows", "holds", "characters of the longest"]);
        for ColumnLook { name, filled, kinds, longest } in columns {
            let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
            table.row(&[&quoted(&name), &filled.to_string(), &kinds, &longest.to_string()]);
        }
        console::table(&table)?;
        console::note(&format!("`data.format` is {}", format?));
        console::note("add `--model DIR` to count tokens, and to see which of them are trained");
        Ok(())
    }

    /// The data sets of which something is in the split.
    fn looked_at<'a>(&self, recipe: &'a Recipe) -> Result<Vec<&'a DataRecipe>, Fault> {
        let has_split = |data: &&DataRecipe| self.split == SplitName::Train || data.validation != ValidationSource::Fraction(0.0);
        let all: Vec<&DataRecipe> = recipe.data.each().filter(has_split).collect();
        if !all.is_empty() {
            return Ok(all);
        }
        Err(Fault::usage(
            "the recipe holds out no validation samples",
            "set `data.validation` or `data.validation_fraction`, or leave `--split` out",
        ))
    }
}

/// Says what the rows of a data set came to.
fn told(survey: Survey, is_dumped: bool) -> Result<(), Fault> {
    survey.source.notes.iter().for_each(|note| console::note(note));
    if let Some(told) = &survey.source.told {
        console::note(&format!("`data.format` is {told}"));
    }
    for warning in &survey.warnings {
        console::warning(warning);
    }
    console::table(&table(&survey))?;
    if !console::speech().is_json {
        console::result(&histogram(&survey.lengths, "tokens"))?;
    }
    let has_rows = survey.rows() > 0;
    match survey.verdict() {
        Ok(left_out) => left_out.iter().for_each(|error| console::warning(&error.to_string())),
        Err(error) if is_dumped && has_rows => console::warning(&error.to_string()),
        Err(error) => return Err(error),
    }
    Ok(())
}

fn table(survey: &Survey) -> Table {
    let LengthCounts { whole, cut, cut_tokens, split, windows, dropped, uncuttable, longest, .. } = survey.samples;
    let if_any = |count: usize| (count > 0).then_some(count);
    let rows = [
        ("read", Some(survey.rows())),
        ("bad", Some(survey.bad())),
        ("too long, which stops a run", if_any(survey.too_long)),
        ("dropped as too long", Some(dropped)),
        ("dropped, nothing to cut", Some(uncuttable)),
        ("used, cut", Some(cut)),
        ("used, split", if_any(split)),
        ("windows of those that are split", if_any(split).map(|_| windows)),
        ("used whole", Some(whole)),
        ("with the tokens of an earlier one", Some(survey.duplicates)),
        ("tokens that are used", Some(survey.tokens)),
        ("tokens that are trained", Some(survey.trained)),
        ("tokens that are cut out", Some(cut_tokens)),
        ("tokens of the longest sample", Some(longest)),
        ("held out, and trained on, too", if_any(survey.shared)),
    ];
    let mut table = Table::new(&["rows", "count"]);
    for (what, count) in rows {
        table.figure(what, count);
    }
    table
}

/// A line for each doubling of the length.
fn histogram(lengths: &[usize], unit: &str) -> String {
    let most = lengths.iter().copied().max().unwrap_or(0).max(1);
    let first = lengths.iter().position(|&count| count > 0).unwrap_or(0);
    let line = |(power, &count): (usize, &usize)| {
        let bar = "█".repeat((count * BAR).div_ceil(most));
        format!("{:>9} {unit} {count:>8} {bar}", format!("≤ {}", 1_usize << power)).trim_end().to_owned()
    };
    lengths.iter().enumerate().skip(first).map(line).collect::<Vec<_>>().join("\n")
}

/// A row whose long texts lose their middle.
fn shortened(value: Value) -> Value {
    match value {
        Value::String(text) => {
            let hidden = text.chars().count().saturating_sub(2 * SHOWN_CHARACTERS);
            if hidden <= SHOWN_CHARACTERS {
                return text.into();
            }
            let first: String = text.chars().take(SHOWN_CHARACTERS).collect();
            let last: String = text.chars().skip(SHOWN_CHARACTERS + hidden).collect();
            format!("{first} … {hidden} characters … {last}").into()
        }
        Value::Array(values) => values.into_iter().map(shortened).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, shortened(value))).collect(),
        other => other,
    }
}

/// How long a sample is, and what becomes of it.
fn in_words(sample: &SurveyedSample) -> String {
    let outcome = match &sample.outcome {
        LengthOutcome::Whole => String::new(),
        LengthOutcome::Cut(range) => format!(", {} cut out", range.len()),
        LengthOutcome::Split(windows) => format!(", in {} windows", windows.len()),
        LengthOutcome::Dropped => ", left out as too long".to_owned(),
        LengthOutcome::NothingToCut => ", left out: its completion alone is too long".to_owned(),
    };
    let class = sample.class.map(|class| format!(", class {class}")).unwrap_or_default();
    format!("{} tokens, {} trained{class}{outcome}", sample.ids.len(), sample.num_trained())
}

/// A sample as text: what is trained is set off, and long stretches are shortened.
fn shown(sample: &SurveyedSample, tokenizer: Option<&Tokenizer>, has_colour: bool) -> Result<String, Fault> {
    let text = |ids: &[u32]| match tokenizer {
        Some(tokenizer) => tokenizer.decode_with_special(ids),
        None => Ok(ids.iter().map(|id| format!("{id} ")).collect::<Vec<_>>().concat()),
    };
    let mut parts = Vec::new();
    let mut first = 0;
    for stretch in sample.is_trained.chunk_by(|a, b| a == b) {
        let ids = &sample.ids[first..first + stretch.len()];
        let words = match ids.len().checked_sub(2 * SHOWN_TOKENS).filter(|&hidden| hidden > SHOWN_TOKENS) {
            None => text(ids)?,
            Some(hidden) => {
                format!("{}\n  … {hidden} tokens …\n{}", text(&ids[..SHOWN_TOKENS])?, text(&ids[ids.len() - SHOWN_TOKENS..])?)
            }
        };
        parts.push(match (stretch[0], has_colour) {
            (false, _) => words,
            (true, true) => format!("\u{1b}[1;32m{words}\u{1b}[0m"),
            (true, false) => format!("⟦{words}⟧"),
        });
        first += stretch.len();
    }
    Ok(parts.concat())
}

/// Fails where a file that is to be written is one of those that are read.
fn refuse_own_data(dump: &Path, source: &Path) -> Result<(), Fault> {
    if dump.canonicalize().is_ok_and(|dump| source.canonicalize().is_ok_and(|source| source == dump)) {
        let message = format!("cannot write `{}`: it is one of the data files", abridged(dump.display()));
        return Err(Fault::usage(message, "name another file with `--dump`"));
    }
    Ok(())
}

/// A row as JSON. A line counts from 1, a record from 0; a file that is one sample has no number.
fn line(row: &SampleRow<SurveyedSample>) -> Value {
    let number = match row.place.at {
        LineOrRecord::Line(number) | LineOrRecord::Record(number) => Some(number),
        LineOrRecord::Whole => None,
    };
    let mut object = json!({ "file": row.place.path.as_ref(), "row": number });
    match &row.sample {
        Err(error) => object["error"] = error.to_string().into(),
        Ok(sample) => {
            let labels = sample.ids.iter().zip(&sample.is_trained);
            let labels: Vec<i64> = labels.map(|(&id, &trained)| if trained { id.into() } else { IGNORE }).collect();
            object["text"] = json!(sample.text);
            object["input_ids"] = json!(sample.ids);
            object["labels"] = json!(labels);
            if let Some(class) = sample.class {
                object["class"] = class.into();
            }
            match &sample.outcome {
                LengthOutcome::Whole => {}
                LengthOutcome::Cut(range) => object["cut"] = range.len().into(),
                LengthOutcome::Split(windows) => object["windows"] = windows.len().into(),
                LengthOutcome::Dropped | LengthOutcome::NothingToCut => object["dropped"] = true.into(),
            }
        }
    }
    object
}
