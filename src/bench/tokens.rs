//! Random tokens in place of data.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::data::{Batch, Row, Targets};
use crate::recipe::HeadRecipe;

/// `rows` rows of `len` tokens: a target at every one for the next token, else a class at the last.
pub(super) fn batch(head: &HeadRecipe, vocab_size: usize, (rows, len): (usize, usize), seed: u64) -> Batch {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut row = |sample: usize| {
        let mut inputs: Vec<u32> = (0..=len).map(|_| rng.random_range(0..vocab_size as u32)).collect();
        let targets = match head {
            HeadRecipe::NextToken => Targets::NextToken(inputs[1..].iter().map(|&id| i64::from(id)).collect()),
            HeadRecipe::SeqClassificationOnLogits(labels) => Targets::Class(rng.random_range(0..labels.len())),
        };
        inputs.truncate(len);
        Row { sample: sample as u64, inputs, targets, initial: None }
    };
    Batch { rows: (0..rows).map(&mut row).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Labels;

    #[test]
    fn every_token_has_a_target_or_every_row_a_class() {
        let next = batch(&HeadRecipe::NextToken, 7, (2, 50), 1);
        assert_eq!((next.rows.len(), next.num_tokens(), next.num_targets()), (2, 100, 100));
        assert!(next.rows.iter().flat_map(|row| &row.inputs).all(|&id| id < 7));
        let Targets::NextToken(targets) = &next.rows[1].targets else { panic!("no labels") };
        assert!(next.rows[1].inputs[1..].iter().zip(targets).all(|(&id, &target)| i64::from(id) == target));
        let head = HeadRecipe::SeqClassificationOnLogits(Labels::Tokens(vec![0, 1, 2]));
        assert_eq!(batch(&head, 7, (3, 5), 1).num_targets(), 3);
        assert_ne!(batch(&HeadRecipe::NextToken, 7, (2, 50), 2), next);
    }
}
