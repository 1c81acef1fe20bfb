//! Exact match, substring match and F1 over normalised words, as `SQuAD` began them and HELMET, LongBench and `InfiniteBench` have them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use super::python::{harmonic, is_space, one_if, split, strip};

/// The longest runs of what `\b` takes for a word in Python; marks do not belong to one there, as they do in Rust.
static WORDS: LazyLock<Regex> = LazyLock::new(|| compiled(r"[\p{L}\p{N}_]+"));

/// Punctuation that the Chinese normalisation of LongBench and `InfiniteBench` deletes besides ASCII's.
const CHINESE: &str = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.";

/// A regular expression that is known to be right.
#[expect(clippy::expect_used, reason = "the expressions are constants, and each is used by a test")]
pub(super) fn compiled(expression: &str) -> Regex {
    Regex::new(expression).expect("a constant expression")
}

/// `normalize_answer` of `SQuAD`: lower case, without ASCII's punctuation, without articles, single blanks.
pub fn normalize(text: &str) -> String {
    let mut text = text.to_lowercase();
    text.retain(|c| !c.is_ascii_punctuation());
    let without = WORDS.replace_all(&text, |word: &Captures<'_>| match &word[0] {
        "a" | "an" | "the" => " ".to_owned(),
        other => other.to_owned(),
    });
    split(&without).collect::<Vec<_>>().join(" ")
}

/// The characters of `normalize_zh_answer`: lower case, without punctuation and white space.
fn normalize_chinese(text: &str) -> Vec<char> {
    let kept = |c: &char| !c.is_ascii_punctuation() && !CHINESE.contains(*c) && !is_space(*c);
    text.to_lowercase().chars().filter(kept).collect()
}

/// What follows a cue such as `Answer:` (in any case) up to the end of its line; the first line, where there is no cue. A cue that is
/// repeated at once is taken off too. HELMET's `parse_output`.
pub fn after_cue<'a>(output: &'a str, cue: &str) -> &'a str {
    let cue = Regex::new(&format!("(?i){}", regex::escape(cue))).ok();
    let found = cue.as_ref().and_then(|cue| cue.find(output));
    let line = output[found.map_or(0, |found| found.end())..].split('\n').next().unwrap_or_default();
    let line = strip(line);
    let repeated = cue.as_ref().and_then(|cue| cue.find(line)).filter(|again| again.start() == 0);
    strip(&line[repeated.map_or(0, |again| again.end())..])
}

/// Whether the normalised texts are equal. HELMET's `drqa_exact_match_score`.
pub(super) fn exact_match(prediction: &str, reference: &str) -> f64 {
    one_if(normalize(prediction) == normalize(reference))
}

/// Whether the normalised prediction contains the normalised reference; an empty one is always in. HELMET's `substring_exact_match_score`.
pub(super) fn substring(prediction: &str, reference: &str) -> f64 {
    one_if(normalize(prediction).contains(&normalize(reference)))
}

/// F1 of the bags of words, where yes, no and "no answer" must be equal. HELMET's `f1_score`.
pub(super) fn f1(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(normalize);
    let is_closed = |text: &str| ["yes", "no", "noanswer"].contains(&text);
    if prediction != reference && (is_closed(&prediction) || is_closed(&reference)) {
        return 0.0;
    }
    f1_of_bags(&split(&prediction).collect::<Vec<_>>(), &split(&reference).collect::<Vec<_>>())
}

/// F1 of the bags of words. `qa_f1_score` of LongBench and `InfiniteBench`.
pub(super) fn qa_f1(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(normalize);
    f1_of_bags(&split(&prediction).collect::<Vec<_>>(), &split(&reference).collect::<Vec<_>>())
}

/// F1 of the bags of characters. `qa_f1_score_zh` of `InfiniteBench`.
pub(super) fn qa_f1_zh(prediction: &str, reference: &str) -> f64 {
    f1_of_bags(&normalize_chinese(prediction), &normalize_chinese(reference))
}

fn f1_of_bags<T: Eq + Hash>(prediction: &[T], reference: &[T]) -> f64 {
    let common = common(&bag(prediction), &bag(reference));
    harmonic(share(common, prediction.len()), share(common, reference.len()))
}

/// How often each item occurs.
pub(super) fn bag<T: Eq + Hash>(items: &[T]) -> HashMap<&T, usize> {
    let mut bag = HashMap::new();
    for item in items {
        *bag.entry(item).or_default() += 1;
    }
    bag
}

/// How many items two bags have in common.
pub(super) fn common<T: Eq + Hash>(one: &HashMap<T, usize>, other: &HashMap<T, usize>) -> usize {
    one.iter().map(|(item, count)| *count.min(other.get(item).unwrap_or(&0))).sum()
}

/// A part of a whole; 0 of nothing.
pub(super) fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_ends_a_word_as_in_python() {
        // `re.sub(r"\b(a|an|the)\b", " ", "a\u0301 the_x x-the ⓐ")` after the punctuation is gone.
        assert_eq!(normalize("A\u{301} the_x The²"), "\u{301} thex the²");
    }

    #[test]
    fn a_cue_is_text_and_no_expression() {
        assert_eq!(after_cue("x\nAnswer (short): ANSWER (SHORT): Lima \n more", "answer (short):"), "Lima");
        assert_eq!(after_cue("  Lima\nAnswer: x", "Reply:"), "Lima");
    }
}
