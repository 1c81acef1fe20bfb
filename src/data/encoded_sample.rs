//! A sample as token ids, with what of them is a target: whole, cut, and as the model runs it.

use std::ops::Range;

use super::batch::{IGNORE, Sequence, Targets};
use super::initial_part::after_cut;
use super::on_too_long::Length;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct EncodedSample {
    pub(super) ids: Vec<u32>,
    /// Leading tokens that may be cut.
    pub(super) prompt: usize,
    pub(super) aim: Aim,
    pub(super) initial: Option<Range<usize>>,
    /// The end of the prompt's text that is in the first token behind the prompt.
    pub(super) border: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Aim {
    Tokens(Vec<bool>),
    Class(usize),
}

impl EncodedSample {
    pub(super) fn new(ids: Vec<u32>, prompt: usize, aim: Aim) -> Self {
        Self { ids, prompt, aim, initial: None, border: None }
    }

    pub(super) fn length(&self) -> Length {
        // The first may be none: nothing predicts it.
        let is_plain_text = matches!(&self.aim, Aim::Tokens(is_trained) if is_trained.iter().skip(1).all(|&trained| trained));
        Length { total: self.ids.len(), prompt: self.prompt, is_plain_text }
    }

    pub(super) fn cut(&mut self, range: Range<usize>) {
        self.prompt -= range.len();
        self.ids.drain(range.clone());
        self.initial = self.initial.take().map(|initial| after_cut(&initial, &range));
        if let Aim::Tokens(is_trained) = &mut self.aim {
            is_trained.drain(range);
        }
    }

    /// Makes the first tokens mere context: none of them is a target.
    pub(super) fn without_targets_before(&mut self, context: usize) {
        if let Aim::Tokens(is_trained) = &mut self.aim {
            is_trained[..context].fill(false);
        }
    }

    /// The sequence to run. A classified sequence runs whole; else its last token is only ever a target.
    pub(super) fn into_sequence(self, sample: usize) -> Sequence {
        let Self { ids: mut inputs, aim, initial, .. } = self;
        let targets = match aim {
            Aim::Class(class) => Targets::Class(class),
            Aim::Tokens(is_trained) => {
                let target = |(&id, &trained): (&u32, &bool)| if trained { i64::from(id) } else { IGNORE };
                let targets = inputs.iter().zip(&is_trained).skip(1).map(target).collect();
                inputs.pop();
                Targets::NextToken(targets)
            }
        };
        let initial = initial.map(|range| (range.start.min(inputs.len()), range.end.min(inputs.len())));
        Sequence { sample: sample as u64, inputs, targets, initial }
    }
}
