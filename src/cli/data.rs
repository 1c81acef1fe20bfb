//! `kvtune data`: what the files of a recipe say, row by row: which tokens are trained, what is left out and what is cut.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::data::{
    DataError, DataSource, IGNORE, LineOrRecord, ModelLimits, SampleFate, SurveyedRow, SurveyedSample, Tokenizer, survey,
};
use crate::error::Error;
use crate::files;
use crate::model::ModelConfig;
use crate::recipe::{DataPaths, OnBadRow, Recipe, ValidationSource};
use crate::report::console;
use crate::report::table::Table;
use crate::train;

/// Bad rows that are told.
const TOLD: usize = 10;

/// Tokens at either end of a long stretch that are shown.
const SHOWN_TOKENS: usize = 60;

/// Characters of the longest bar of the histogram.
const BAR: usize = 40;

#[derive(Debug, Args)]
pub(super) struct LookAtData {
    /// The recipe.
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
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
    #[arg(long, value_enum, default_value_t = SplitFiles::Train)]
    split: SplitFiles,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SplitFiles {
    Train,
    Validation,
}

impl LookAtData {
    pub(super) fn run(&self) -> Result<(), Error> {
        let resolved = Recipe::load(&self.recipe, &self.set)?;
        resolved.notes.iter().for_each(|note| console::note(note));
        let recipe = resolved.recipe;
        let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
        let tokenizer = train::tokenizer(&recipe.model.path)?;
        let limits = ModelLimits { vocab_size: config.vocab_size, max_positions: config.longest_sequence() };
        let paths = self.paths(&recipe)?;
        let mut dump = self.dump.as_deref().map(Dump::create).transpose()?;
        let mut counts = RowCounts::default();
        let has_colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut take = |row: SurveyedRow| {
            if let Some(dump) = &mut dump {
                dump.write(&row)?;
            }
            if let Ok(sample) = &row.sample
                && counts.samples() < self.show
            {
                let text = shown(sample, tokenizer.as_ref(), has_colour)?;
                console::result(&format!("── {}: {}\n{text}\n", row.place, in_words(sample)))?;
            }
            counts.take(row);
            Ok::<(), Error>(())
        };
        let data = (&recipe.data, &recipe.head);
        let source = survey(data, tokenizer.as_ref(), limits, (paths, self.split == SplitFiles::Train), &mut take)?;
        if let Some(dump) = dump {
            dump.finish()?;
        }
        say(&source);
        console::result(&counts.table().to_string())?;
        console::result(&counts.histogram())?;
        counts.end(recipe.data.on_bad_row == OnBadRow::Drop || self.dump.is_some(), &source)
    }

    fn paths<'a>(&self, recipe: &'a Recipe) -> Result<&'a DataPaths, Error> {
        match (self.split, &recipe.data.validation) {
            (SplitFiles::Train, _) => Ok(&recipe.data.train),
            (SplitFiles::Validation, ValidationSource::File(paths)) => Ok(paths),
            (SplitFiles::Validation, ValidationSource::Fraction(_)) => Err(Error::Usage {
                message: "the recipe names no files of validation samples".into(),
                hint: "leave `--split` out: they are drawn from the training files; or set `data.validation`".into(),
            }),
        }
    }
}

fn say(source: &DataSource) {
    source.notes.iter().for_each(|note| console::note(note));
    if let Some(told) = &source.told {
        console::note(&format!("`data.format` is {told}"));
    }
}

/// What the rows came to. Every row is in exactly one of `bad`, `dropped`, `uncuttable`, `cut`, `split` and `whole`.
#[derive(Debug, Default)]
struct RowCounts {
    rows: usize,
    bad: usize,
    dropped: usize,
    uncuttable: usize,
    cut: usize,
    split: usize,
    windows: usize,
    whole: usize,
    duplicated: usize,
    tokens: usize,
    trained: usize,
    cut_tokens: usize,
    /// By the power of two that is not below them.
    lengths: Vec<usize>,
    longest: usize,
    seen: HashSet<blake3::Hash>,
    first_bad: Vec<DataError>,
}

impl RowCounts {
    fn take(&mut self, row: SurveyedRow) {
        self.rows += 1;
        let sample = match row.sample {
            Ok(sample) => sample,
            Err(error) => {
                self.bad += 1;
                if self.first_bad.len() < TOLD {
                    self.first_bad.push(error);
                }
                return;
            }
        };
        self.longest = self.longest.max(sample.length);
        let power = sample.length.next_power_of_two().ilog2() as usize;
        self.lengths.resize(self.lengths.len().max(power + 1), 0);
        self.lengths[power] += 1;
        match sample.fate {
            SampleFate::Dropped => self.dropped += 1,
            SampleFate::NothingToCut => self.uncuttable += 1,
            SampleFate::Cut(tokens) => {
                self.cut += 1;
                self.cut_tokens += tokens;
            }
            SampleFate::Split(windows) => {
                self.split += 1;
                self.windows += windows;
            }
            SampleFate::Whole => self.whole += 1,
        }
        if matches!(sample.fate, SampleFate::Whole | SampleFate::Cut(_) | SampleFate::Split(_)) {
            self.tokens += sample.ids.len();
            self.trained += num_trained(&sample);
            let labels = sample.ids.iter().zip(&sample.is_trained);
            let bytes: Vec<u8> =
                labels.flat_map(|(id, &trained)| (u64::from(*id) * 2 + u64::from(trained)).to_le_bytes()).collect();
            let class = format!("{:?}", sample.class);
            self.duplicated +=
                usize::from(!self.seen.insert(blake3::Hasher::new().update(&bytes).update(class.as_bytes()).finalize()));
        }
    }

    /// Rows that are samples, used or not.
    fn samples(&self) -> usize {
        self.rows - self.bad
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&["rows", "count"]);
        let mut row = |what: &str, count: usize| table.row(&[what, &count.to_string()]);
        row("read", self.rows);
        row("bad", self.bad);
        row("dropped as too long", self.dropped);
        row("dropped, nothing to cut", self.uncuttable);
        row("used, cut", self.cut);
        if self.split > 0 {
            row("used, split", self.split);
            row("windows of those that are split", self.windows);
        }
        row("used whole", self.whole);
        row("of these the same as an earlier one", self.duplicated);
        row("tokens that are used", self.tokens);
        row("tokens that are trained", self.trained);
        row("tokens that are cut out", self.cut_tokens);
        row("tokens of the longest sample", self.longest);
        table
    }

    /// A line for each doubling of the length.
    fn histogram(&self) -> String {
        let most = self.lengths.iter().copied().max().unwrap_or(0).max(1);
        let first = self.lengths.iter().position(|&count| count > 0).unwrap_or(0);
        let line = |(power, &count): (usize, &usize)| {
            let bar = "█".repeat((count * BAR).div_ceil(most));
            format!("{:>9} tokens {count:>8} {bar}", format!("≤ {}", 1_usize << power)).trim_end().to_owned()
        };
        self.lengths.iter().enumerate().skip(first).map(line).collect::<Vec<_>>().join("\n")
    }

    /// Fails where a run would not start, unless bad rows are left out or stand in a dump.
    fn end(mut self, may_have_bad_rows: bool, source: &DataSource) -> Result<(), Error> {
        let error = match self.bad {
            0 if self.rows > 0 => return Ok(()),
            0 => DataError::Empty { path: source.files.first().cloned().unwrap_or_default() },
            1 => self.first_bad.remove(0),
            count => DataError::BadRows { first: self.first_bad, count, read: self.rows },
        };
        if may_have_bad_rows && self.rows > 0 {
            console::warning(&error.to_string());
            return Ok(());
        }
        Err(error.into())
    }
}

/// How long a sample is, and what becomes of it.
fn in_words(sample: &SurveyedSample) -> String {
    let fate = match sample.fate {
        SampleFate::Whole => String::new(),
        SampleFate::Cut(tokens) => format!(", {tokens} cut out"),
        SampleFate::Split(windows) => format!(", in {windows} windows"),
        SampleFate::Dropped => ", left out as too long".to_owned(),
        SampleFate::NothingToCut => ", left out: its completion alone is too long".to_owned(),
    };
    let class = sample.class.map(|class| format!(", class {class}")).unwrap_or_default();
    format!("{} tokens, {} trained{class}{fate}", sample.ids.len(), num_trained(sample))
}

fn num_trained(sample: &SurveyedSample) -> usize {
    sample.is_trained.iter().filter(|&&trained| trained).count()
}

/// A sample as text: what is trained is set off, and long stretches are shortened.
fn shown(sample: &SurveyedSample, tokenizer: Option<&Tokenizer>, has_colour: bool) -> Result<String, DataError> {
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

/// A file of JSON lines.
struct Dump {
    path: PathBuf,
    /// Where it is written until it is whole.
    staged: PathBuf,
    file: BufWriter<File>,
    /// The data file that was looked at last.
    source: PathBuf,
}

impl Dump {
    fn create(path: &Path) -> Result<Self, Error> {
        let staged = files::temporary_beside(path);
        let file = File::create(&staged).map_err(|source| Self::failed(path, source))?;
        Ok(Self { path: path.to_path_buf(), staged, file: BufWriter::new(file), source: PathBuf::new() })
    }

    fn failed(path: &Path, source: std::io::Error) -> Error {
        DataError::Dump { path: path.to_path_buf(), source }.into()
    }

    fn write(&mut self, row: &SurveyedRow) -> Result<(), Error> {
        if *row.place.path != *self.source {
            self.source = row.place.path.to_path_buf();
            if self.path.canonicalize().is_ok_and(|path| self.source.canonicalize().is_ok_and(|source| source == path)) {
                let source = std::io::Error::other("it is one of the data files");
                return Err(Self::failed(&self.path, source));
            }
        }
        writeln!(self.file, "{}", line(row)).map_err(|source| Self::failed(&self.path, source))
    }

    fn finish(mut self) -> Result<(), Error> {
        let done = self.file.flush().and_then(|()| std::fs::rename(&self.staged, &self.path));
        done.map_err(|source| Self::failed(&self.path, source))
    }
}

/// What was not finished leaves nothing.
impl Drop for Dump {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.staged);
    }
}

/// A row as JSON. A line counts from 1, a record from 0; a file that is one sample has no number.
fn line(row: &SurveyedRow) -> Value {
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
            match sample.fate {
                SampleFate::Whole => {}
                SampleFate::Cut(tokens) => object["cut"] = tokens.into(),
                SampleFate::Split(windows) => object["windows"] = windows.into(),
                SampleFate::Dropped | SampleFate::NothingToCut => object["dropped"] = true.into(),
            }
        }
    }
    object
}
