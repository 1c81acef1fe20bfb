//! What happened when data was opened, in numbers and in a line that people read.

use std::fmt;
use std::path::PathBuf;

/// Where the lengths of samples came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthSource {
    /// The samples are token ids already.
    Given,
    /// The file was tokenised.
    Counted,
    /// The length cache had them: nothing was tokenised.
    Cached,
}

/// What the data files of one split held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReport {
    /// The file, or the first of several.
    pub path: PathBuf,
    /// How many files are read as one.
    pub files: usize,
    /// Rows in them.
    pub read: usize,
    /// Rows left out because they cannot be read.
    pub bad: usize,
    /// Tokens that a sample may have.
    pub limit: usize,
    /// Samples left out because they are too long.
    pub dropped: usize,
    /// Of these, samples whose completion alone is too long: nothing of them may be cut.
    pub uncuttable: usize,
    /// Samples whose prompts were cut in the middle.
    pub cut: usize,
    /// Tokens of the longest sample, before any cut.
    pub longest: usize,
    /// Where the lengths came from.
    pub lengths: LengthSource,
    /// Why the lengths could not be kept for the next start.
    pub cache_problem: Option<String>,
    /// The format, and what it was told from, where the recipe does not say.
    pub format: Option<String>,
    /// What of folders was left out.
    pub notes: Vec<String>,
}

/// What happened when data was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadReport {
    /// One entry per file.
    pub files: Vec<FileReport>,
    /// Samples to train on.
    pub train: usize,
    /// Samples held out.
    pub validation: usize,
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.lengths {
            LengthSource::Given => "pre-tokenised",
            LengthSource::Counted => "tokenised now",
            LengthSource::Cached => "lengths from the cache",
        };
        let Self { read, bad, longest, limit, dropped, cut, uncuttable, .. } = self;
        let samples = if *read == 1 { "sample" } else { "samples" };
        for note in &self.notes {
            writeln!(f, "{note}")?;
        }
        if let Some(format) = &self.format {
            writeln!(f, "`data.format` is {format}")?;
        }
        let more = if self.files > 1 { format!(" and {} more files", self.files - 1) } else { String::new() };
        write!(f, "`{}`{more}: {read} {samples}, longest {longest} tokens, limit {limit}: ", self.path.display())?;
        if *bad > 0 {
            write!(f, "{bad} bad, ")?;
        }
        write!(f, "{dropped} dropped, {cut} cut ({source})")?;
        if *uncuttable > 0 {
            write!(f, "; {uncuttable} of the dropped have a completion that alone exceeds the limit")?;
        }
        if let Some(problem) = &self.cache_problem {
            write!(f, "; lengths not kept: {problem}")?;
        }
        Ok(())
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "{file}")?;
        }
        write!(f, "{} to train on, {} held out", self.train, self.validation)
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
            read: 13,
            bad: 1,
            limit: 4096,
            dropped: 2,
            uncuttable: 1,
            cut: 3,
            longest: 9000,
            lengths: LengthSource::Cached,
            cache_problem: None,
            format: None,
            notes: Vec::new(),
        };
        let report = LoadReport { files: vec![file], train: 9, validation: 1 };
        assert_eq!(
            report.to_string(),
            "`train.jsonl`: 13 samples, longest 9000 tokens, limit 4096: 1 bad, 2 dropped, 3 cut (lengths from the cache); \
             1 of the dropped have a completion that alone exceeds the limit\n9 to train on, 1 held out"
        );
    }
}
