//! Tensors of files that are missing, too many, or of the wrong shape or dtype.

use std::path::Path;

use crate::files::Dtype;
use crate::units::{Fault, abridged, quoted, shape};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorProblem {
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

/// So many problems of each kind are told.
const NAMED: usize = 8;

/// Whether weights may be of this type.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
}

/// The fault of the tensors in `dir`, which don't fit `what`: the first problems of each kind, and how many there are.
pub(super) fn unfit(problems: &[TensorProblem], dir: &Path, what: &str) -> Fault {
    let of_kind = |title| {
        let all: Vec<&str> = problems.iter().filter(|problem| problem.kind == title).map(|problem| &*problem.text).collect();
        let (count, named) = (all.len(), all.len().min(NAMED));
        let more = if count > named { format!(" and {} more", count - named) } else { String::new() };
        (count > 0).then(|| format!("{count} {title} ({}{more})", all[..named].join(", ")))
    };
    let told = KINDS.into_iter().filter_map(of_kind).collect::<Vec<_>>().join("; ");
    let message = format!("the tensors in `{}` don't fit {what}: {told}", abridged(dir.display()));
    Fault::data(message, "check that weights and configuration belong together and that all files are complete")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_counted() {
        let missing = (0..20).map(|i| TensorProblem::missing(&format!("m{i}")));
        let problems: Vec<_> = missing.chain([TensorProblem::shape("s", &[2, 3], &[3, 2])]).collect();
        let text = unfit(&problems, Path::new("d"), "the model").to_string();
        assert!(text.starts_with("the tensors in `d` don't fit the model: 20 missing (`m0`, `m1`, "), "{text}");
        assert!(text.ends_with("`m7` and 12 more); 1 wrong shape (`s` expected [2, 3], found [3, 2])"), "{text}");
    }
}
