//! Tensors of files that are missing, too many, or of the wrong shape or dtype.

use std::fmt;
use std::path::Path;

use crate::files::Dtype;
use crate::units::{Fault, abridged, quoted, shape};

/// One tensor that isn't as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorProblem {
    /// One of [`KINDS`].
    kind: &'static str,
    text: String,
}

/// What problems are called, in the order in which they are told.
const KINDS: [&str; 4] = [MISSING, EXTRA, SHAPE, DTYPE];
const MISSING: &str = "missing";
const EXTRA: &str = "extra";
const SHAPE: &str = "wrong shape";
const DTYPE: &str = "unreadable dtype";

impl TensorProblem {
    pub(super) fn missing(name: &str) -> Self {
        Self { kind: MISSING, text: format!("`{}`", quoted(name)) }
    }

    pub(super) fn extra(name: &str) -> Self {
        Self { kind: EXTRA, ..Self::missing(name) }
    }

    /// It has another shape than it should have.
    pub(super) fn shape(name: &str, expected: &[usize], found: &[usize]) -> Self {
        Self { kind: SHAPE, text: format!("`{}` expected {}, found {}", quoted(name), shape(expected), shape(found)) }
    }

    /// It has a dtype that can't be read.
    pub(super) fn dtype(name: &str, found: Dtype) -> Self {
        Self { kind: DTYPE, text: format!("`{}` is {found}", quoted(name)) }
    }
}

/// All problems of a file or directory; prints the first of each kind and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorProblems(pub Vec<TensorProblem>);

const NAMED: usize = 8;

impl TensorProblems {
    /// The fault of the tensors in `dir`, which don't fit `what`, as the model or its `config.json`.
    pub(super) fn of(self, dir: &Path, what: &str) -> Fault {
        let hint = "check that weights and configuration belong together and that all files are complete";
        let message = format!("the tensors in `{}` don't fit {what}: {self}", abridged(dir.display()));
        Fault::data(message, hint).carrying(self)
    }
}

impl fmt::Display for TensorProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for title in KINDS {
            let of_kind: Vec<&TensorProblem> = self.0.iter().filter(|problem| problem.kind == title).collect();
            if of_kind.is_empty() {
                continue;
            }
            write!(f, "{separator}{} {title} (", of_kind.len())?;
            for (i, problem) in of_kind.iter().take(NAMED).enumerate() {
                write!(f, "{}{}", if i == 0 { "" } else { ", " }, problem.text)?;
            }
            if of_kind.len() > NAMED {
                write!(f, " and {} more", of_kind.len() - NAMED)?;
            }
            f.write_str(")")?;
            separator = "; ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_counted() {
        let missing = (0..20).map(|i| TensorProblem::missing(&format!("m{i}")));
        let shape = TensorProblem::shape("s", &[2, 3], &[3, 2]);
        let text = TensorProblems(missing.chain([shape]).collect()).to_string();
        assert!(text.starts_with("20 missing (`m0`, `m1`, "), "{text}");
        assert!(text.ends_with("`m7` and 12 more); 1 wrong shape (`s` expected [2, 3], found [3, 2])"), "{text}");
    }
}
