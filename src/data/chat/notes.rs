//! What is worth telling of all samples that were made tokens, though each could be. It is kept with the tokens, for every start.

use serde::{Deserialize, Serialize};

use crate::units::counted;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct ChatNotes {
    pub(in crate::data) has_conversations: bool,
    /// Whether a token that ends a turn was a target.
    pub(super) ends_are_trained: bool,
    /// The token that begins a text, where a template has written it twice.
    pub(super) doubled_bos: Option<String>,
    /// The tokens at the first border of prompt and completion that is inside of a token: alone, and joined.
    pub(super) border: Option<(String, String)>,
    /// Whether a template writes an answer otherwise, as more follows.
    pub(super) is_rewritten: bool,
    /// Pairs without a prompt, and those without a completion.
    pub(super) empty: [usize; 2],
}

impl ChatNotes {
    pub(in crate::data) fn add(&mut self, others: Self) {
        self.has_conversations |= others.has_conversations;
        self.ends_are_trained |= others.ends_are_trained;
        self.doubled_bos = self.doubled_bos.take().or(others.doubled_bos);
        self.border = self.border.take().or(others.border);
        self.is_rewritten |= others.is_rewritten;
        self.empty = [self.empty[0] + others.empty[0], self.empty[1] + others.empty[1]];
    }

    /// What should be told of samples of which this was noted, in words. `trains_ends`: whether the tokens that end turns are to be trained.
    pub(in crate::data) fn warnings(&self, trains_ends: bool) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.has_conversations && trains_ends && !self.ends_are_trained {
            let why = "no answer's end-of-turn token is trained, so that the model does not learn to stop: the chat template writes none \
                       behind what the assistant says, or leaves it out of its `{% generation %}` tags";
            warnings.push(why.to_owned());
        }
        let empty = [
            ("prompt", ", whose completion is trained as the beginning of a text"),
            ("completion", ": only the end of the text is trained"),
        ];
        for ((field, meaning), count) in empty.into_iter().zip(self.empty).filter(|(_, count)| *count > 0) {
            warnings.push(format!("{} with an empty `{field}`{meaning}", counted(count, "row")));
        }
        if let Some(bos) = &self.doubled_bos {
            warnings.push(format!(
                "texts begin with `{bos}` twice: the chat template writes it, and so do the messages, or the template itself does it twice"
            ));
        }
        if self.is_rewritten {
            let why = "the chat template writes earlier messages of the assistant otherwise than the last one, as without their thoughts. They \
                       are trained as it writes them, but for an end of turn that the model itself does not write. \
                       `data.train_on = \"last\"` trains the last message alone";
            warnings.push(why.to_owned());
        }
        if let Some((alone, joined)) = &self.border {
            warnings.push(format!(
                "`data.boundary = \"joined\"`: a prompt ends inside of a token: alone in {alone}, joined with its completion in {joined}. \
                 After the prompt alone a model meets other tokens than in training"
            ));
        }
        warnings
    }
}
