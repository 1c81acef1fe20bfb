//! What happened when files were opened, in numbers and in a line that people read.

use std::fmt;

use super::dataset::Samples;
use super::on_too_long::LengthCounts;
use super::source::DataSource;
use super::token_cache::{TokenRecord, Tokens};
use crate::units::counted;

/// What the data files of a split held, and what became of it: their rows are the samples that are kept, dropped and bad.
#[derive(Clone, Debug)]
pub struct FileReport {
    pub source: DataSource,
    pub rows: usize,
    /// Rows that are no samples, and were left out.
    pub bad: usize,
    /// The other rows, by what becomes of them.
    pub samples: LengthCounts,
    /// Tokens that a sample may have.
    pub limit: usize,
    /// Samples with the same tokens as an earlier one. They are not left out.
    pub duplicates: usize,
    pub origin: &'static str,
    /// Why they could not be kept for the next start.
    pub cache_problem: Option<String>,
}

impl FileReport {
    pub(super) fn new(Samples { source, tokens, .. }: &Samples, limit: usize) -> Self {
        let Tokens { file, record: TokenRecord { read, bad, .. }, is_cached, problem, .. } = tokens;
        let made_now = if source.format().has_texts { "tokenised now" } else { "pre-tokenised" };
        let origin = if *is_cached { "tokenised before" } else { made_now };
        let mut fingerprints: Vec<u64> = (0..file.len).map(|sample| file.fingerprint(sample)).collect();
        fingerprints.sort_unstable();
        let duplicates = fingerprints.windows(2).filter(|pair| pair[0] == pair[1]).count();
        Self {
            source: source.clone(),
            rows: read + bad,
            bad: *bad,
            samples: LengthCounts::default(),
            limit,
            duplicates,
            origin,
            cache_problem: problem.clone(),
        }
    }
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, rows, samples, bad, limit, origin, .. } = self;
        let LengthCounts { cut, cut_tokens, split, windows, uncuttable, longest, .. } = samples;
        for note in &source.notes {
            writeln!(f, "{note}")?;
        }
        if let Some(format) = &source.told {
            writeln!(f, "`data.format` is {format}")?;
        }
        let (path, rows, longest) = (source.first().display(), counted(*rows, "row"), counted(*longest, "token"));
        let more = if source.files.len() > 1 { format!(" and {} more files", source.files.len() - 1) } else { String::new() };
        write!(f, "`{path}`{more}: {rows}, longest {longest}, limit {limit}: ")?;
        write!(f, "{} kept, {} dropped, {bad} bad; {cut} cut", samples.used(), samples.left_out())?;
        if *cut > 0 {
            write!(f, " by {cut_tokens} tokens")?;
        }
        if *split > 0 {
            write!(f, "; {split} split into {windows} windows")?;
        }
        if self.duplicates > 0 {
            write!(f, "; {} with the tokens of an earlier one", self.duplicates)?;
        }
        write!(f, " ({origin})")?;
        if *uncuttable > 0 {
            write!(f, "; {uncuttable} of the dropped have a completion that alone exceeds the limit")?;
        }
        if let Some(problem) = &self.cache_problem {
            write!(f, "; tokens not kept: {problem}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::formats::registered;
    use crate::recipe::DataRecipe;

    #[test]
    fn says_what_was_dropped_and_cut() {
        let source = DataSource {
            files: vec!["train.jsonl".into()],
            format: registered("text").unwrap(),
            told: None,
            notes: Vec::new(),
            rows: DataRecipe::default(),
        };
        let file = FileReport {
            source,
            rows: 13,
            bad: 1,
            samples: LengthCounts {
                whole: 6,
                cut: 3,
                cut_tokens: 500,
                split: 1,
                windows: 4,
                dropped: 1,
                uncuttable: 1,
                longest: 9000,
                shortest: Some(7),
            },
            limit: 4096,
            duplicates: 2,
            origin: "tokenised before",
            cache_problem: None,
        };
        assert_eq!(
            file.to_string(),
            "`train.jsonl`: 13 rows, longest 9000 tokens, limit 4096: 10 kept, 2 dropped, 1 bad; 3 cut by 500 tokens; 1 split into 4 \
             windows; 2 with the tokens of an earlier one (tokenised before); 1 of the dropped have a completion that alone exceeds \
             the limit"
        );
    }
}
