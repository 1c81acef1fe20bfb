//! Metrics of `InfiniteBench`. Those of one label take the first reference.

use super::python::{one_if, split, strip};

const LETTERS: &str = "ABCD";

/// `passkey` and `number_string`: the first run of digits is the label.
pub(super) fn first_number(prediction: &str, references: &[String]) -> f64 {
    let number = prediction.split(|c: char| !c.is_ascii_digit()).find(|run| !run.is_empty()).unwrap_or_default();
    one_if(references.first().is_some_and(|label| label == number))
}

/// `kv_retrieval`: the label is one of the words.
pub(super) fn kv_retrieval(prediction: &str, references: &[String]) -> f64 {
    let text = prediction.replace(['\n', ':', '"', '\'', '.', ',', '?', '!', '{', '}'], " ");
    one_if(references.first().is_some_and(|label| split(&text).any(|word| word == label)))
}

/// `longbook_choice_eng`: the first letter, the whole text, what follows a cue, or the first word that is a letter, is a reference.
pub(super) fn choice(prediction: &str, references: &[String]) -> f64 {
    let text = strip(prediction);
    let is_label = |text: &str| references.iter().any(|label| label == text);
    if let Some(first) = text.chars().next().filter(|first| LETTERS.contains(*first)) {
        return one_if(is_label(&first.to_string()));
    }
    if text.is_empty() {
        return 0.0;
    }
    if is_label(text) {
        return 1.0;
    }
    let mut text = text.replace(['\n', '"', '\'', '.', ',', '?', '!', '{', '}'], " ");
    while text.contains("  ") {
        text = text.replace("  ", " ");
    }
    for cue in ["answer is:", "answer:", "answer is", "option is"] {
        if let Some((_, after)) = text.split_once(cue) {
            let mut characters = after.chars();
            let has_more = characters.next().is_some();
            return one_if(has_more && references.iter().any(|label| characters.as_str().starts_with(label.as_str())));
        }
    }
    // Any part of `ABCD` is a letter there, such as `CD`.
    split(&text).find(|word| LETTERS.contains(word)).map_or(0.0, |word| one_if(is_label(word)))
}
