//! Metrics of `LongBench` v1 that are not F1: ROUGE-L as the package `rouge` 1.0.1 has it, counts, paragraphs, lines of code, classes.

use std::collections::HashSet;
use std::sync::LazyLock;

use regex::Regex;

use super::bags::{compiled, share};
use super::difflib::ratio;
use super::lcs::lcs_indices;
use super::python::{one_if, split};

static NUMBER: LazyLock<Regex> = LazyLock::new(|| compiled(r"\d+"));
static PARAGRAPH: LazyLock<Regex> = LazyLock::new(|| compiled(r"Paragraph (\d+)"));

/// `rouge-l` of the package `rouge` 1.0.1: sentences end at full stops, words count once. It gives up on texts without a sentence, which
/// is 0; but not here on those too long for its recursion.
pub(super) fn rouge_l(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(sentences);
    let words = |sentences: &[Vec<String>]| sentences.iter().flatten().cloned().collect::<HashSet<_>>().len();
    let mut union = HashSet::new();
    for expected in &reference {
        for predicted in &prediction {
            union.extend(lcs_indices(expected, predicted, |up, left| up > left).into_iter().map(|at| &expected[at]));
        }
    }
    let (precision, recall) = (share(union.len(), words(&prediction)), share(union.len(), words(&reference)));
    2.0 * (precision * recall / (precision + recall + 1e-8))
}

/// The words of each sentence; a sentence of white space has one, which is empty.
fn sentences(text: &str) -> Vec<Vec<String>> {
    let sentences = text.split('.').filter(|sentence| !sentence.is_empty());
    sentences.map(|sentence| split(sentence).collect::<Vec<_>>().join(" ").split(' ').map(str::to_owned).collect()).collect()
}

/// The share of the prediction's numbers that are the reference.
pub(super) fn count(prediction: &str, reference: &str) -> f64 {
    let numbers: Vec<&str> = NUMBER.find_iter(prediction).map(|number| number.as_str()).collect();
    share(numbers.iter().filter(|number| **number == reference).count(), numbers.len())
}

/// The number of `Paragraph N`.
pub(super) fn paragraph(reference: &str) -> Option<&str> {
    Some(PARAGRAPH.captures(reference)?.get(1)?.as_str())
}

/// The share of the prediction's numbers that are the reference's paragraph.
pub(super) fn retrieval(prediction: &str, reference: &str) -> f64 {
    paragraph(reference).map_or(0.0, |paragraph| count(prediction, paragraph))
}

/// How similar the first line of code is, in whole per cent: `fuzz.ratio` over difflib.
pub(super) fn code_similarity(prediction: &str, reference: &str) -> f64 {
    let is_code = |line: &&str| !line.contains(['`', '#']) && !line.contains("//");
    let line = prediction.trim_start_matches('\n').split('\n').find(is_code).unwrap_or_default();
    if line.is_empty() || reference.is_empty() {
        return 0.0;
    }
    (100.0 * ratio(line, reference)).round_ties_even() / 100.0
}

/// 1 by the number of classes that the prediction names, if the reference is among them. Those that are a proper part of the reference
/// do not count; but of two such neighbours the second one does, as it does there.
pub fn classification(prediction: &str, reference: &str, classes: &[String]) -> f64 {
    let mut named: Vec<&str> = classes.iter().map(String::as_str).filter(|class| prediction.contains(class)).collect();
    let mut at = 0;
    while let Some(&class) = named.get(at) {
        if class != reference && reference.contains(class) {
            // As in Python: what is removed is the first one of this name, and the walk goes on one place further.
            let first = named.iter().position(|other| *other == class).unwrap_or(at);
            named.remove(first);
        }
        at += 1;
    }
    one_if(named.contains(&reference)) / named.len().max(1) as f64
}
