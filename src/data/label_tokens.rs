//! The classes of a classification head: one token each, or names and numbers.

use serde::Serialize;

use super::faults;
use super::tokenizer::Tokenizer;
use crate::recipe::ClassList;
use crate::units::{Fault, quoted};

/// The token of each class, in the order of the labels: a label given as text is encoded without special tokens and must be
/// exactly one; no two may be the same. The loss is taken over the logits of these.
pub fn label_tokens(classes: &ClassList, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, Fault> {
    let tokens = if let ClassList::Tokens(tokens) = classes {
        tokens.clone()
    } else {
        let tokenizer = tokenizer.ok_or_else(|| faults::no_tokenizer("`head.labels`"))?;
        classes.names().iter().map(|label| single_token(label, tokenizer)).collect::<Result<_, _>>()?
    };
    if tokens.len() < 2 {
        let message = format!("{} labels, expected at least 2", tokens.len());
        return Err(Fault::data(message, "list one entry per class in `head.labels` or `head.label_tokens`"));
    }
    for (second, &token) in tokens.iter().enumerate() {
        if let Some(first) = tokens[..second].iter().position(|&earlier| earlier == token) {
            let message = format!("labels {first} and {second} are both token {token}, expected distinct tokens");
            return Err(Fault::data(message, "give each class a token of its own"));
        }
    }
    Ok(tokens)
}

fn single_token(label: &str, tokenizer: &Tokenizer) -> Result<u32, Fault> {
    let tokens = tokenizer.encode(label)?;
    if let [token] = tokens[..] {
        return Ok(token);
    }
    let (label, count) = (quoted(label), tokens.len());
    let message = format!("label `{label}` is {count} tokens {tokens:?}, expected exactly 1");
    Err(Fault::data(message, "choose labels that are one token each, or give token ids in `head.label_tokens`"))
}

/// Labels as the readers of files need them: to find a sample's class.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Classes {
    /// The token of each class; none where a matrix scores them.
    pub(super) tokens: Vec<u32>,
    texts: Option<Vec<String>>,
    pub(super) count: usize,
}

impl Classes {
    pub(super) fn new(classes: &ClassList, tokenizer: Option<&Tokenizer>) -> Result<Self, Fault> {
        let texts = if let ClassList::Tokens(_) = classes { None } else { Some(classes.names()) };
        let tokens = label_tokens(classes, tokenizer)?;
        Ok(Self { count: tokens.len(), tokens, texts })
    }

    /// Classes that a matrix scores; without names they are numbers from 0.
    pub(super) fn scored(classes: &ClassList) -> Self {
        Self { tokens: Vec::new(), texts: Some(classes.names()), count: classes.count() }
    }

    /// The class whose label is `text`: by its text, or by its one token where labels are given as tokens.
    pub(super) fn find(&self, text: &str, tokenizer: &Tokenizer) -> Result<Option<usize>, Fault> {
        match &self.texts {
            Some(texts) => Ok(texts.iter().position(|label| label.trim() == text)),
            None => match tokenizer.encode(text)?[..] {
                [token] => Ok(self.tokens.iter().position(|&label| label == token)),
                _ => Ok(None),
            },
        }
    }

    pub(super) fn are_numbers(&self) -> bool {
        self.texts.as_ref().is_none_or(|texts| texts.iter().enumerate().all(|(class, text)| *text == class.to_string()))
    }

    /// Whether some are called by a number that is not their place.
    pub(super) fn have_numbers_for_names(&self) -> bool {
        let mut texts = self.texts.iter().flatten().enumerate();
        texts.any(|(class, text)| text.trim().parse().is_ok_and(f64::is_finite) && text.trim() != class.to_string())
    }

    /// For messages: `A`, `B`, `C`.
    pub(super) fn describe(&self) -> String {
        let shown: Vec<String> = match &self.texts {
            Some(texts) => texts.iter().map(|text| format!("`{text}`")).collect(),
            None => self.tokens.iter().map(|token| format!("token {token}")).collect(),
        };
        shown.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn texts(labels: &[&str]) -> ClassList {
        ClassList::Named(labels.iter().map(|&label| label.to_owned()).collect())
    }

    #[test]
    fn labels_that_only_sound_like_numbers_are_names() {
        let have_numbers = |names: &[&str]| {
            let names = names.iter().map(|&name| name.to_owned()).collect();
            Classes::scored(&ClassList::Named(names)).have_numbers_for_names()
        };
        assert!(have_numbers(&["1", "2"]) && have_numbers(&["low", "0.5"]));
        assert!(!have_numbers(&["nan", "inf", "-infinity"]) && !have_numbers(&["0", "1"]));
    }

    #[test]
    fn each_label_is_one_token() {
        let tokenizer = Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2")).unwrap();
        let tokens = label_tokens(&texts(&["A", "B", "C", "D"]), Some(&tokenizer)).unwrap();
        assert_eq!(tokens.iter().map(|&t| tokenizer.decode(&[t]).unwrap()).collect::<String>(), "ABCD");
        assert_eq!(label_tokens(&ClassList::Tokens(vec![40, 41]), None).unwrap(), [40, 41]);

        let error = label_tokens(&texts(&["A", "Zürich"]), Some(&tokenizer)).unwrap_err();
        let expected = tokenizer.encode("Zürich").unwrap();
        assert_eq!(error.to_string(), format!("label `Zürich` is {} tokens {expected:?}, expected exactly 1", expected.len()));
        assert!(label_tokens(&texts(&["A", ""]), Some(&tokenizer)).unwrap_err().to_string().ends_with("expected exactly 1"));
        let error = label_tokens(&ClassList::Tokens(vec![40, 41, 40]), None).unwrap_err();
        assert_eq!(error.to_string(), "labels 0 and 2 are both token 40, expected distinct tokens");
        assert_eq!(label_tokens(&ClassList::Tokens(vec![7]), None).unwrap_err().to_string(), "1 labels, expected at least 2");
        assert!(label_tokens(&texts(&["A", "B"]), None).unwrap_err().to_string().contains("needs a tokenizer"));
    }
}
