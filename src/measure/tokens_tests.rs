//! Drawn batches.

use std::path::Path;

use super::tokens::random_batch;
use crate::data::{Batch, IGNORE, Targets};
use crate::model::ModelConfig;
use crate::recipe::Recipe;
use crate::units::Fault;

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
