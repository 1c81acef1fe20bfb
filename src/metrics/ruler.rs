//! RULER's string match, as shares between 0 and 1; RULER prints percent.

use super::bags::share;
use super::python::strip;

/// `postprocess_pred`: control characters end lines.
fn cleaned(prediction: &str) -> String {
    strip(&strip(prediction).replace(|c: char| c < ' ', "\n")).to_lowercase()
}

fn found(prediction: &str, references: &[String]) -> usize {
    references.iter().filter(|reference| prediction.contains(&reference.to_lowercase())).count()
}

/// `string_match_all`: the share of the references that occur.
pub(super) fn all(prediction: &str, references: &[String]) -> f64 {
    share(found(&cleaned(prediction), references), references.len())
}

/// `string_match_part`: whether one of the references occurs.
pub(super) fn part(prediction: &str, references: &[String]) -> f64 {
    share(found(&cleaned(prediction), references).min(1), 1)
}

/// HELMET's `ruler_recall`: as [`all`], with control characters left as they are.
pub(super) fn recall(prediction: &str, references: &[String]) -> f64 {
    share(found(&prediction.to_lowercase(), references), references.len())
}
