//! Tensors of files that are missing, too many, or of the wrong shape or dtype.

use std::fmt;
use std::path::Path;

use crate::units::{Fault, abridged, quoted, shape};

/// One tensor that isn't as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TensorProblem {
    Missing {
        name: String,
    },
    Extra {
        name: String,
    },
    Shape {
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    /// It has a dtype that can't be read.
    Dtype {
        name: String,
        found: String,
    },
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
        let kinds = ["missing", "extra", "wrong shape", "unreadable dtype"];
        let mut separator = "";
        for (kind, title) in kinds.iter().enumerate() {
            let of_kind: Vec<&TensorProblem> = self.0.iter().filter(|problem| problem.kind() == kind).collect();
            if of_kind.is_empty() {
                continue;
            }
            write!(f, "{separator}{} {title} (", of_kind.len())?;
            for (i, problem) in of_kind.iter().take(NAMED).enumerate() {
                write!(f, "{}{problem}", if i == 0 { "" } else { ", " })?;
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

impl TensorProblem {
    fn kind(&self) -> usize {
        match self {
            Self::Missing { .. } => 0,
            Self::Extra { .. } => 1,
            Self::Shape { .. } => 2,
            Self::Dtype { .. } => 3,
        }
    }
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name } | Self::Extra { name } => write!(f, "`{}`", quoted(name)),
            Self::Shape { name, expected, found } => {
                write!(f, "`{}` expected {}, found {}", quoted(name), shape(expected), shape(found))
            }
            Self::Dtype { name, found } => write!(f, "`{}` is {found}", quoted(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_counted() {
        let missing = (0..20).map(|i| TensorProblem::Missing { name: format!("m{i}") });
        let shape = TensorProblem::Shape { name: "s".into(), expected: vec![2, 3], found: vec![3, 2] };
        let text = TensorProblems(missing.chain([shape]).collect()).to_string();
        assert!(text.starts_with("20 missing (`m0`, `m1`, "), "{text}");
        assert!(text.ends_with("`m7` and 12 more); 1 wrong shape (`s` expected [2, 3], found [3, 2])"), "{text}");
    }
}
