//! Random tokens in place of data.

use std::cmp::Reverse;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use crate::data::{Batch, IGNORE, Sequence, Targets};
use crate::model::ModelConfig;
use crate::recipe::{HeadRecipe, Recipe, RopeScalingRecipe};
use crate::units::Fault;

/// Draws as many sequences as a micro-batch of the recipe has, the longest first, with the given lengths, or all of the only length given.
/// Every token has the next one as its target (only the last has one where tokens are run one by one from the first target on); a sequence
/// that is classified has a class.
pub fn random_batch(recipe: &Recipe, config: &ModelConfig, lengths: &[usize], seed: u64) -> Result<Batch, Fault> {
    let (positions, sequences) = (config.most_positions(), recipe.train.batch_size.sequences());
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
        let targets = match &recipe.head {
            HeadRecipe::NextToken => {
                let labels = inputs[1..].iter().enumerate();
                Targets::NextToken(labels.map(|(at, &id)| if at < first_target { IGNORE } else { i64::from(id) }).collect())
            }
            HeadRecipe::SeqClassificationOnLogits(labels) => Targets::Class(rng.random_range(0..labels.count())),
            HeadRecipe::SeqClassification(classes) => Targets::Class(rng.random_range(0..classes.count())),
        };
        inputs.truncate(tokens);
        Sequence { sample: sample as u64, inputs, targets, initial: None }
    };
    Ok(Batch { sequences: lengths.into_iter().enumerate().map(&mut sequence).collect() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
        "intermediate_size": 6, "vocab_size": 7, "max_position_embeddings": 50}"#;
    const RECIPE: &str = "model.path = '.'\ndata = {format = 'tokens', train = 'none'}\nlora.r = 1\ntrain.micro_batch_size = 2\n\
                          kv_cache = {policy = 'lastrec', cache_length = 8, chunk_size = 4}\n";

    fn drawn(more: &str, tokens: usize, seed: u64) -> Result<Batch, Fault> {
        let config = ModelConfig::from_object(&serde_json::from_str(CONFIG).unwrap()).unwrap();
        let recipe = Recipe::parse(format!("{RECIPE}{more}"), Path::new("recipe.toml"), &[]).unwrap().recipe;
        random_batch(&recipe, &config, &[tokens], seed)
    }

    #[test]
    fn every_token_has_a_target_or_every_row_one_at_its_end() {
        let next = drawn("", 50, 1).unwrap();
        assert_eq!((next.sequences.len(), next.num_tokens(), next.num_targets()), (2, 100, 100));
        assert!(next.sequences.iter().flat_map(|sequence| &sequence.inputs).all(|&id| id < 7));
        let Targets::NextToken(targets) = &next.sequences[1].targets else { panic!("no labels") };
        assert!(next.sequences[1].inputs[1..].iter().zip(targets).all(|(&id, &target)| i64::from(id) == target));
        assert_ne!(drawn("", 50, 2).unwrap(), next);
        let class = "head = {kind = 'seq_classification_on_logits', label_tokens = [0, 1, 2]}";
        assert_eq!(drawn(class, 5, 1).unwrap().num_targets(), 2);
        let single = drawn("grad.single_tokens_for_targets = true", 5, 1).unwrap();
        let Targets::NextToken(targets) = &single.sequences[0].targets else { panic!("no labels") };
        assert_eq!((single.num_targets(), &targets[..4]), (2, &[IGNORE; 4][..]));
        assert_eq!(drawn("", 51, 1).unwrap_err().to_string(), "`--tokens 51`: the model has 50 positions");
    }
}
