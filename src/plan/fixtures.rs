//! A step of a tiny model, for the tests of this room.

use std::path::Path;

use tch::{Device, Kind};

use super::{StepSpec, TrainedPart};
use crate::engine::Settings;
use crate::model::ModelConfig;
use crate::recipe::Recipe;

const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 10, "max_position_embeddings": 64}"#;
const RECIPE: &str = "model.path = '.'\ndata = {format = 'tokens', train = 'none'}\n\
                      kv_cache = {policy = 'lastrec', cache_length = 8, chunk_size = 4}\ngrad.layers_per_cell = 1";

/// Calls `look` with a step over 8 slots in chunks of 4, a layer a cell, whose recipe has these `words` more.
pub(super) fn with_step<T>(words: &str, (kind, device): (Kind, Device), look: impl FnOnce(&StepSpec<'_>) -> T) -> T {
    let recipe = Recipe::parse(format!("{RECIPE}\n{words}"), Path::new("recipe.toml"), &[]).unwrap().recipe;
    let config = ModelConfig::from_object(&serde_json::from_str(CONFIG).unwrap()).unwrap();
    let settings = Settings::new(&config, &recipe.kv_cache, &recipe.grad).unwrap();
    let trained = TrainedPart::of(&config, recipe.lora.as_ref()).unwrap();
    look(&StepSpec { kind, ..StepSpec::of(&recipe, &config, &settings, &trained, device) })
}
