//! What the engine takes per micro-batch: ragged sequences of token ids with their targets.

use std::sync::Arc;

use crate::recipe::LossMean;

/// The target of an input after which nothing is predicted.
pub const IGNORE: i64 = -100;

/// Samples that are run together, in the order asked for, each of its own length. Those that have ended cost nothing where the longest come first.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// One sequence per sample, never none.
    pub sequences: Vec<Sequence>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// Index of the sample in its file, counted from 0: does not depend on split, order or batch.
    pub sample: u64,
    pub inputs: Vec<u32>,
    pub targets: Targets,
    /// The first position of the prompt's initial part, and the one behind it; `None` where nobody asked.
    pub initial: Option<(usize, usize)>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    /// One entry for each input: entry `i` is what input `i` must predict, or [`IGNORE`].
    NextToken(Vec<i64>),
    /// The same, with what a teacher predicts in these places.
    Distilled(Vec<i64>, Arc<SoftTargets>),
    /// Index of the class, read at the last input.
    Class(usize),
}

/// A teacher's likeliest tokens in each place that has a target, place by place.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftTargets {
    /// Tokens of a place, k.
    pub top_k: usize,
    /// Ids of these tokens `(places, k)`.
    pub tokens: Vec<i32>,
    /// `(places, k)` logarithms of their probabilities at the recipe's temperature, among all tokens of the vocabulary.
    pub log_probs: Vec<f32>,
}

impl Batch {
    pub fn max_len(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.inputs.len()).max().unwrap_or(0)
    }

    /// Inputs of all sequences, each padded on the right to `total`.
    pub fn padded_inputs(&self, total: usize) -> Vec<i64> {
        let padded = |sequence: &Sequence| {
            let mut ids: Vec<i64> = sequence.inputs.iter().map(|&id| i64::from(id)).collect();
            ids.resize(total, 0);
            ids
        };
        self.sequences.iter().flat_map(padded).collect()
    }

    /// Inputs of all sequences, padding not counted.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.inputs.len()).sum()
    }

    /// Positions (or classes) that the loss is summed over.
    pub fn num_targets(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.targets.count()).sum()
    }

    /// How many losses the mean is over: those of targets, or of sequences that have some.
    pub fn num_losses(&self, mean: LossMean) -> usize {
        match mean {
            LossMean::Tokens => self.num_targets(),
            LossMean::Sequences => self.sequences.iter().filter(|sequence| sequence.targets.count() > 0).count(),
        }
    }
}

impl Targets {
    /// How many targets there are, [`IGNORE`] not counted.
    pub fn count(&self) -> usize {
        self.labels().map_or(1, |labels| labels.iter().filter(|&&label| label != IGNORE).count())
    }

    /// What each input must predict; `None` of a class.
    pub fn labels(&self) -> Option<&[i64]> {
        match self {
            Self::NextToken(labels) | Self::Distilled(labels, _) => Some(labels),
            Self::Class(_) => None,
        }
    }

    /// What a teacher predicts, where one was asked.
    pub fn soft(&self) -> Option<&Arc<SoftTargets>> {
        if let Self::Distilled(_, soft) = self { Some(soft) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_leave_out_what_is_ignored() {
        let next = Sequence { sample: 0, inputs: vec![5, 6, 7], targets: Targets::NextToken(vec![IGNORE, 7, 0]), initial: None };
        let class = Sequence { sample: 1, inputs: vec![5], targets: Targets::Class(2), initial: None };
        let batch = Batch { sequences: vec![next, class] };
        assert_eq!((batch.max_len(), batch.num_tokens(), batch.num_targets()), (3, 4, 3));
        assert_eq!([LossMean::Tokens, LossMean::Sequences].map(|mean| batch.num_losses(mean)), [3, 2]);
    }
}
