//! Names of splits, as files and folders bear them.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum SplitName {
    Train,
    Validation,
    Test,
}

impl SplitName {
    /// The split by the first word of a name that is one for a split.
    pub(super) fn of(name: &str) -> Option<Self> {
        let mut words = name.split(|letter: char| !letter.is_alphanumeric());
        words.find_map(|word| match word.to_ascii_lowercase().as_str() {
            "train" | "training" => Some(Self::Train),
            "validation" | "valid" | "dev" | "val" => Some(Self::Validation),
            "test" | "testing" | "eval" | "evaluation" => Some(Self::Test),
            _ => None,
        })
    }
}

impl fmt::Display for SplitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Test => "test",
        })
    }
}
