//! Tensors of files that are missing, too many, or of the wrong shape or dtype.

use std::fmt;
use std::path::Path;

use crate::files::Dtype;
use crate::units::{Fault, abridged, quoted, shape};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorProblem {
    /// One of [`KINDS`].
    kind: &'static str,
    text: String,
}

/// What problems are called, in the order in which they are told.
const KINDS: [&str; 5] = [MISSING, EXTRA, SHAPE, DTYPE, CONTRADICTED];
const MISSING: &str = "missing";
const EXTRA: &str = "extra";
const SHAPE: &str = "wrong shape";
const DTYPE: &str = "unreadable dtype";
const CONTRADICTED: &str = "against `quantization_config`";

impl TensorProblem {
    pub(super) fn missing(name: &str) -> Self {
        Self { kind: MISSING, text: format!("`{}`", quoted(name)) }
    }

    pub(super) fn extra(name: &str) -> Self {
        Self { kind: EXTRA, ..Self::missing(name) }
    }

    pub(super) fn shape(name: &str, expected: &[usize], found: &[usize]) -> Self {
        Self { kind: SHAPE, text: format!("`{}` expected {}, found {}", quoted(name), shape(expected), shape(found)) }
    }

    pub(super) fn dtype(name: &str, found: Dtype) -> Self {
        Self { kind: DTYPE, text: format!("`{}` is {found}", quoted(name)) }
    }

    pub(super) fn contradicted(name: &str, is_packed: bool) -> Self {
        Self { kind: CONTRADICTED, text: format!("`{}` is {}", quoted(name), if is_packed { "packed" } else { "not packed" }) }
    }
}

/// All problems of a file or directory; prints the first of each kind and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorProblems(pub Vec<TensorProblem>);

const NAMED: usize = 8;

/// Whether weights may be of this type.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
}

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
        let of_kind = |title| {
            let all: Vec<&str> = self.0.iter().filter(|problem| problem.kind == title).map(|problem| &*problem.text).collect();
            let (count, named) = (all.len(), all.len().min(NAMED));
            let more = if count > named { format!(" and {} more", count - named) } else { String::new() };
            (count > 0).then(|| format!("{count} {title} ({}{more})", all[..named].join(", ")))
        };
        f.write_str(&KINDS.into_iter().filter_map(of_kind).collect::<Vec<_>>().join("; "))
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
