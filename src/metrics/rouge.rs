//! ROUGE as Google's `rouge_score` has it: words of ASCII's letters and digits, those of more than three letters stemmed if asked for.

use std::fmt;

use super::bags::{bag, common, share};
use super::lcs::{lcs_indices, lcs_length};
use super::porter::stem;
use super::python::harmonic;
use crate::units::named;

named! {
    pub enum RougeKind {
        One = "1",
        Two = "2",
        /// The longest common subsequence of the texts.
        L = "l",
        /// The union of those of the lines.
        LSum = "l_sum",
    }
}

named! {
    /// A figure, and the end of a measure's name that asks for it.
    pub enum RougeFigure {
        F1 = "",
        Precision = "_precision",
        Recall = "_recall",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RougeMeasure {
    pub kind: RougeKind,
    /// Whether words are stemmed first (`use_stemmer`), as HELMET does.
    pub stemmed: bool,
    pub figure: RougeFigure,
}

impl RougeMeasure {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let of_kind = |kind| [true, false].map(move |stemmed| RougeFigure::ALL.map(|figure| Self { kind, stemmed, figure }));
        RougeKind::ALL.into_iter().flat_map(of_kind).flatten()
    }

    pub(super) fn score(self, prediction: &str, reference: &str) -> f64 {
        let words = |text: &str| -> Vec<String> {
            let text = text.to_lowercase();
            let words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            words.map(|word| if self.stemmed && word.len() > 3 { stem(word) } else { word.to_owned() }).collect()
        };
        let [hits, predicted, expected] = match self.kind {
            RougeKind::One => of_ngrams(&words(prediction), &words(reference), 1),
            RougeKind::Two => of_ngrams(&words(prediction), &words(reference), 2),
            RougeKind::L => {
                let (prediction, reference) = (words(prediction), words(reference));
                [lcs_length(&reference, &prediction), prediction.len(), reference.len()]
            }
            RougeKind::LSum => {
                let lines = |text: &str| text.split('\n').filter(|line| !line.is_empty()).map(words).collect::<Vec<_>>();
                of_lines(&lines(prediction), &lines(reference))
            }
        };
        let (precision, recall) = (share(hits, predicted), share(hits, expected));
        match self.figure {
            RougeFigure::F1 => harmonic(precision, recall),
            RougeFigure::Precision => precision,
            RougeFigure::Recall => recall,
        }
    }
}

/// Such as `rouge_l`, `rouge_1_recall`, `rouge_l_sum_plain_precision`.
impl fmt::Display for RougeMeasure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stems = if self.stemmed { "" } else { "_plain" };
        write!(f, "rouge_{}{stems}{}", self.kind.name(), self.figure.name())
    }
}

/// Common n-grams, and those of either side.
fn of_ngrams(prediction: &[String], reference: &[String], n: usize) -> [usize; 3] {
    let [prediction, reference] = [prediction, reference].map(|words| words.windows(n).collect::<Vec<_>>());
    [common(&bag(&prediction), &bag(&reference)), prediction.len(), reference.len()]
}

/// Words of the reference that are in a line's longest common subsequence with one of the prediction, as often as both have them; and all words.
fn of_lines(prediction: &[Vec<String>], reference: &[Vec<String>]) -> [usize; 3] {
    let [all_predicted, all_expected] = [prediction, reference].map(|lines| lines.iter().flatten().collect::<Vec<_>>());
    let mut left = [bag(&all_predicted), bag(&all_expected)];
    let mut hits = 0;
    for line in reference {
        let mut is_in_union = vec![false; line.len()];
        for other in prediction {
            for at in lcs_indices(line, other, |up, left| up >= left) {
                is_in_union[at] = true;
            }
        }
        for (word, _) in line.iter().zip(is_in_union).filter(|(_, is_in)| *is_in) {
            if left.iter().all(|counts| counts.get(&word).is_some_and(|count| *count > 0)) {
                hits += 1;
                left.iter_mut().filter_map(|counts| counts.get_mut(&word)).for_each(|count| *count -= 1);
            }
        }
    }
    [hits, all_predicted.len(), all_expected.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the ROUGE paper: the union of `w1 w2` and `w1 w3 w5` is four of five words.
    #[test]
    fn lines_are_united() {
        let measure = RougeMeasure { kind: RougeKind::LSum, stemmed: false, figure: RougeFigure::Recall };
        assert!((measure.score("w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5") - 0.8).abs() < 1e-15);
    }
}
