//! Chunks beside those of another program: its rule for bending them to the points where caches become full, 455 times.

use kvtune::data::{Batch, Sequence, Targets};
use kvtune::engine::Settings;
use kvtune::model::ModelConfig;
use kvtune::recipe::{CacheRecipe, Chunking, PolicyRecipe};
use serde_json::{Value, json};

use super::fixture::{caches, cells, fixture};

fn config(num_layers: usize) -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "hidden_size": 24, "num_hidden_layers": num_layers, "intermediate_size": 40,
        "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": false,
    });
    ModelConfig::from_object(config.as_object().unwrap()).unwrap()
}

fn settings(cache_lengths: &[usize], chunk_size: usize, chunking: Chunking) -> Settings {
    let policy = PolicyRecipe::with_params("lastrec", toml::from_str("init_grace_tokens = 0").unwrap());
    let kv = CacheRecipe { chunking, ..caches(policy, cache_lengths.to_vec(), chunk_size) };
    Settings::new(&config(cache_lengths.len()), &kv, &cells(1, 1.0)).unwrap()
}

/// Sizes of the cache's events; no piece of the first is longer than a chunk.
fn events(settings: &Settings, tokens: usize, chunk_size: usize) -> Vec<usize> {
    let sequence = Sequence { sample: 0, inputs: vec![1; tokens], targets: Targets::NextToken(vec![1; tokens]), initial: None };
    let plan = settings.plan(&Batch { sequences: vec![sequence] }, None).unwrap();
    let mut sizes = Vec::new();
    for span in &plan.spans {
        assert!(span.chunk > 0 || span.len <= chunk_size);
        sizes.resize(span.chunk + 1, 0);
        sizes[span.chunk] += span.len;
    }
    sizes
}

#[test]
fn every_row_is_equal() {
    let text = std::fs::read_to_string(fixture("golden/chunking.json")).unwrap();
    let sequences: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(sequences.len(), 455);
    let mut bent = 0;
    for sequence in &sequences {
        let numbers =
            |key: &str| sequence[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect::<Vec<_>>();
        let (cache_lengths, expected) = (numbers("cache_lengths"), numbers("chunk_sizes"));
        let [chunk_size, tokens] = ["chunk", "seq"].map(|key| sequence[key].as_u64().unwrap() as usize);
        let found = events(&settings(&cache_lengths, chunk_size, Chunking::Reference), tokens, chunk_size);
        assert_eq!(found, expected, "{sequence}");
        bent += usize::from(events(&settings(&cache_lengths, chunk_size, Chunking::Plain), tokens, chunk_size) != expected);
    }
    assert!(bent >= 50, "only {bent} sequences tell the rules apart");
}
