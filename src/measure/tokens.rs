//! Random tokens in place of data.

use std::cmp::Reverse;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::data::{Batch, IGNORE, Sequence, Targets};
use crate::model::ModelConfig;
use crate::recipe::{Recipe, RopeScalingRecipe};
use crate::units::Fault;

/// Draws as many sequences as a micro-batch of the recipe has, the longest first, with the given lengths, or all of the only length given.
/// Every token has the next one as its target (only the last has one where tokens are run one by one from the first target on); a sequence
/// that is classified has a class.
pub fn random_batch(recipe: &Recipe, config: &ModelConfig, lengths: &[usize], seed: u64) -> Result<Batch, Fault> {
    let (positions, sequences) = (config.computable_positions(), recipe.train.batch_size.sequences());
    if let Some(&tokens) = lengths.iter().find(|&&tokens| tokens > positions) {
        let hint = format!("ask for fewer tokens, or {}", RopeScalingRecipe::hint(tokens, positions));
        return Err(Fault::usage(format!("`--tokens {tokens}`: the model has {positions} positions"), hint));
    }
    if ![1, sequences].contains(&lengths.len()) {
        let message = format!("`--tokens` has {} lengths: the recipe has {sequences} sequences in a micro-batch", lengths.len());
        return Err(Fault::usage(message, "give one length for all sequences or one for each, or set `train.micro_batch_size`"));
    }
    let mut lengths: Vec<usize> = lengths.iter().copied().cycle().take(sequences).collect();
    lengths.sort_by_key(|&tokens| Reverse(tokens));
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut sequence = |(sample, tokens): (usize, usize)| {
        let first_target = if recipe.grad.single_tokens_for_targets { tokens - 1 } else { 0 };
        let mut inputs: Vec<u32> = (0..=tokens).map(|_| rng.random_range(0..config.vocab_size as u32)).collect();
        let targets = match recipe.head.classes() {
            None => {
                let labels = inputs[1..].iter().enumerate();
                Targets::NextToken(labels.map(|(at, &id)| if at < first_target { IGNORE } else { i64::from(id) }).collect())
            }
            Some(classes) => Targets::Class(rng.random_range(0..classes.count())),
        };
        inputs.truncate(tokens);
        Sequence { sample: sample as u64, inputs, targets, initial: None }
    };
    Ok(Batch { sequences: lengths.into_iter().enumerate().map(&mut sequence).collect() })
}
