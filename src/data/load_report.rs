//! What happened when data was opened, in numbers and in a line that people read.

use std::fmt;
use std::path::PathBuf;

use super::on_too_long::Fit;
use super::source::DataSource;
use super::token_cache::Tokens;
use crate::recipe::DataFormat;
use crate::units::counted;

/// Where the tokens of samples came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenOrigin {
    /// The samples are token ids already.
    Given,
    Tokenised,
    /// An earlier start has left them.
    Cached,
}

/// What the data files of a split held, and what became of it: their rows are the samples that are kept, dropped and bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// The file, or the first of several.
    pub path: PathBuf,
    /// How many files are read as one.
    pub files: usize,
    pub rows: usize,
    /// Rows that are no samples, and were left out.
    pub bad: usize,
    /// Samples that are run, whole or not.
    pub kept: usize,
    /// Samples left out because they are too long.
    pub dropped: usize,
    /// Of these, samples whose completion alone is too long: nothing of them may be cut.
    pub uncuttable: usize,
    /// Tokens that a sample may have.
    pub limit: usize,
    /// Of the kept, samples whose prompts were cut in the middle.
    pub cut: usize,
    pub cut_tokens: usize,
    /// Of the kept, samples that became windows.
    pub split: usize,
    pub windows: usize,
    /// Samples with the same tokens as an earlier one. They are not left out.
    pub duplicates: usize,
    /// Tokens of the longest sample, before any cut.
    pub longest: usize,
    /// Where the tokens came from.
    pub origin: TokenOrigin,
    /// Why they could not be kept for the next start.
    pub cache_problem: Option<String>,
    /// The format, and what it was told from, where the recipe does not say.
    pub format: Option<String>,
    /// What of folders was left out.
    pub notes: Vec<String>,
}

impl FileReport {
    /// Before any sample was looked at.
    pub(super) fn new(source: &DataSource, limit: usize, tokens: &Tokens) -> Self {
        let Tokens { file, counts, is_cached, problem, .. } = tokens;
        let origin = match (source.format == DataFormat::Tokens, is_cached) {
            (_, true) => TokenOrigin::Cached,
            (true, _) => TokenOrigin::Given,
            (false, _) => TokenOrigin::Tokenised,
        };
        let mut fingerprints: Vec<u64> = (0..file.len()).map(|sample| file.fingerprint(sample)).collect();
        fingerprints.sort_unstable();
        let duplicates = fingerprints.windows(2).filter(|pair| pair[0] == pair[1]).count();
        Self {
            path: source.files.first().cloned().unwrap_or_default(),
            files: source.files.len(),
            rows: counts.read + counts.bad,
            bad: counts.bad,
            kept: 0,
            dropped: 0,
            uncuttable: 0,
            limit,
            cut: 0,
            cut_tokens: 0,
            split: 0,
            windows: 0,
            duplicates,
            longest: 0,
            origin,
            cache_problem: problem.clone(),
            format: source.told.clone(),
            notes: source.notes.clone(),
        }
    }

    /// Counts a sample of so many tokens that becomes so many pieces.
    pub(super) fn count(&mut self, total: usize, fit: &Fit, pieces: usize) {
        self.longest = self.longest.max(total);
        let is_kept = pieces > 0;
        self.kept += usize::from(is_kept);
        self.dropped += usize::from(!is_kept);
        match fit {
            Fit::Whole | Fit::Dropped => {}
            Fit::NothingToCut => self.uncuttable += 1,
            Fit::Cut(range) => {
                self.cut += 1;
                self.cut_tokens += range.len();
            }
            Fit::Split => {
                self.split += 1;
                self.windows += pieces;
            }
        }
    }
}

/// What happened when data was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadReport {
    pub files: Vec<FileReport>,
    pub train: usize,
    pub validation: usize,
    /// Of these, samples with the tokens of one to train on.
    pub shared: usize,
    /// What may be wrong with the samples, though all could be read.
    pub warnings: Vec<String>,
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = match self.origin {
            TokenOrigin::Given => "pre-tokenised",
            TokenOrigin::Tokenised => "tokenised now",
            TokenOrigin::Cached => "tokens from the cache",
        };
        let Self { rows, kept, dropped, bad, cut, cut_tokens, longest, limit, .. } = self;
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        if let Some(format) = &self.format {
            writeln!(f, "`data.format` is {format}")?;
        }
        let more = if self.files > 1 { format!(" and {} more files", self.files - 1) } else { String::new() };
        write!(
            f,
            "`{}`{more}: {}, longest {}, limit {limit}: ",
            self.path.display(),
            counted(*rows, "row"),
            counted(*longest, "token")
        )?;
        write!(f, "{kept} kept, {dropped} dropped, {bad} bad; {cut} cut")?;
        if *cut > 0 {
            write!(f, " by {cut_tokens} tokens")?;
        }
        if self.split > 0 {
            write!(f, "; {} split into {} windows", self.split, self.windows)?;
        }
        if self.duplicates > 0 {
            write!(f, "; {} with the tokens of an earlier one", self.duplicates)?;
        }
        write!(f, " ({origin})")?;
        if self.uncuttable > 0 {
            write!(f, "; {} of the dropped have a completion that alone exceeds the limit", self.uncuttable)?;
        }
        if let Some(problem) = &self.cache_problem {
            write!(f, "; tokens not kept: {problem}")?;
        }
        Ok(())
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "{file}")?;
        }
        write!(f, "{} to train on, {} held out", self.train, self.validation)?;
        if self.shared > 0 {
            write!(
                f,
                "\nwarning: {} of those held out are trained on, too: their loss is no measure of what is new",
                self.shared
            )?;
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\nwarning: {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_was_dropped_and_cut() {
        let file = FileReport {
            path: "train.jsonl".into(),
            files: 1,
            rows: 13,
            bad: 1,
            kept: 10,
            dropped: 2,
            uncuttable: 1,
            limit: 4096,
            cut: 3,
            cut_tokens: 500,
            split: 1,
            windows: 4,
            duplicates: 2,
            longest: 9000,
            origin: TokenOrigin::Cached,
            cache_problem: None,
            format: None,
            notes: Vec::new(),
        };
        let report = LoadReport { files: vec![file], train: 9, validation: 1, shared: 1, warnings: Vec::new() };
        assert_eq!(
            report.to_string(),
            "`train.jsonl`: 13 rows, longest 9000 tokens, limit 4096: 10 kept, 2 dropped, 1 bad; 3 cut by 500 tokens; 1 split into 4 \
             windows; 2 with the tokens of an earlier one (tokens from the cache); 1 of the dropped have a completion that alone exceeds \
             the limit\n9 to train on, 1 held out\nwarning: 1 of those held out are trained on, too: their loss is no measure of what is new"
        );
    }
}
