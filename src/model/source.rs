//! Which directory a model is read from, and what counts in place of its own configuration.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::config::ModelConfig;
use super::error::ModelError;
use crate::files::read_json;
use crate::recipe::{ModelRecipe, RopeScalingRecipe};

/// A model directory, and how its rotary embeddings are scaled if not as its `config.json` says.
#[derive(Clone, Copy, Debug)]
pub struct ModelSource<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// Of a recipe.
    pub rope_scaling: Option<&'a RopeScalingRecipe>,
}

impl<'a> From<&'a Path> for ModelSource<'a> {
    fn from(dir: &'a Path) -> Self {
        Self { dir, rope_scaling: None }
    }
}

impl<'a> From<&'a PathBuf> for ModelSource<'a> {
    fn from(dir: &'a PathBuf) -> Self {
        Self { dir, rope_scaling: None }
    }
}

impl<'a> From<&'a ModelRecipe> for ModelSource<'a> {
    fn from(recipe: &'a ModelRecipe) -> Self {
        Self { dir: &recipe.path, rope_scaling: recipe.rope_scaling.as_ref() }
    }
}

impl ModelConfig {
    /// Reads the `config.json` of a directory.
    pub fn load<'a>(source: impl Into<ModelSource<'a>>) -> Result<Self, ModelError> {
        source.into().config()
    }
}

impl ModelSource<'_> {
    /// What the model is.
    pub(super) fn config(self) -> Result<ModelConfig, ModelError> {
        let path = self.dir.join("config.json");
        let own = ModelConfig::load_file(&path)?;
        if self.rope_scaling.is_none() {
            return Ok(own);
        }
        let refuse = |reason: &str| Err(ModelError::RopeScaling { dir: self.dir.to_owned(), reason: reason.to_owned() });
        if own.rotations().is_empty() {
            return refuse("no layer has a rotary embedding");
        }
        if own.layers.iter().any(|layer| layer.attention.query_growth.is_some()) {
            return refuse("its queries grow with their position, which belongs to the scaling of its own");
        }
        let scaled = ModelConfig::from_object(&self.object()?);
        scaled.map_err(|fault| ModelError::RopeScaling { dir: self.dir.to_owned(), reason: fault.to_string() })
    }

    /// `config.json` as it counts.
    pub(super) fn object(self) -> Result<Map<String, Value>, ModelError> {
        let mut object: Map<String, Value> = read_json(&self.dir.join("config.json"))?;
        if let Some(scaling) = self.rope_scaling {
            let inner = object.get_mut("text_config").and_then(Value::as_object_mut);
            match inner {
                Some(inner) => scale(inner, scaling),
                None => scale(&mut object, scaling),
            }
        }
        Ok(object)
    }
}

/// Puts a scaling in place of a file's own. What its tables say beside that, stays.
fn scale(object: &mut Map<String, Value>, scaling: &RopeScalingRecipe) {
    let RopeScalingRecipe { rope_type, original_max_position_embeddings, beta_fast, beta_slow } = *scaling;
    let mut new = Map::new();
    new.insert("rope_type".into(), json!(rope_type.name()));
    new.insert("beta_fast".into(), json!(beta_fast));
    new.insert("beta_slow".into(), json!(beta_slow));
    let known = ["rope_parameters", "rope_scaling"].into_iter();
    let tables: Vec<Map<String, Value>> =
        known.filter_map(|key| object.remove(key)).filter_map(|table| table.as_object().cloned()).collect();
    // Layers that slide may have a table of their own, which is never scaled.
    let (full, sliding): (Vec<&Value>, Vec<&Value>) = (
        tables.iter().filter_map(|table| table.get(FULL)).collect(),
        tables.iter().filter_map(|table| table.get(SLIDING)).collect(),
    );
    let of_full = full.iter().filter_map(|table| table.as_object()).chain(&tables);
    for table in of_full {
        for key in ["rope_theta", "partial_rotary_factor", "original_max_position_embeddings"] {
            if let Some(value) = table.get(key).filter(|value| !value.is_null()) {
                new.entry(key).or_insert_with(|| value.clone());
            }
        }
    }
    if let Some(original) = original_max_position_embeddings {
        new.insert("original_max_position_embeddings".into(), json!(original));
    }
    let table = match sliding.first() {
        Some(sliding) => json!({ FULL: new, SLIDING: sliding }),
        None => Value::Object(new),
    };
    object.insert("rope_parameters".into(), table);
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{DynamicYarnScaling, RopeScaling};
    use crate::recipe::RopeType;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    fn scaled(name: &str, original: Option<usize>) -> Result<ModelConfig, ModelError> {
        let (rope_type, beta_fast, beta_slow) = (RopeType::DynamicYarn, 32.0, 1.0);
        let scaling = RopeScalingRecipe { rope_type, original_max_position_embeddings: original, beta_fast, beta_slow };
        ModelConfig::load(ModelSource { dir: &fixture(name), rope_scaling: Some(&scaling) })
    }

    /// The layers that a file scales are scaled in its place, and nothing else changes.
    #[test]
    fn a_scaling_takes_the_place_of_the_files_own() {
        for (name, original, found) in [
            ("model-qwen2", None, 32_768),
            ("model-qwen2", Some(64), 64),
            ("families/model-llama31", None, 48),
            ("families/model-qwen2-yarn", None, 32),
            ("families/model-gemma3", Some(64), 64),
            ("families/model-olmo3", Some(64), 64),
        ] {
            let (own, scaled) = (ModelConfig::load(&fixture(name)).unwrap(), scaled(name, original).unwrap());
            let yarn = RopeScaling::DynamicYarn(DynamicYarnScaling { original: found, beta_fast: 32.0, beta_slow: 1.0 });
            assert!(scaled.layers.iter().any(|layer| layer.attention.rope.as_ref().unwrap().scaling == yarn), "{name}");
            for (own, mut scaled) in own.layers.into_iter().zip(scaled.layers) {
                let slides_apart =
                    ["gemma3", "olmo3"].iter().any(|kind| name.contains(kind)) && own.attention.rule.window.is_some();
                let rope = scaled.attention.rope.as_mut().unwrap();
                if !slides_apart {
                    assert_eq!(rope.scaling, yarn, "{name}");
                    rope.scaling = own.attention.rope.as_ref().unwrap().scaling.clone();
                }
                assert_eq!(own, scaled, "{name}");
            }
        }
    }

    #[test]
    fn a_scaling_that_does_not_fit_is_refused() {
        for (name, expected) in [("families/model-phi3", "first channels"), ("families/model-ministral3", "queries grow")] {
            let error = scaled(name, None).unwrap_err().to_string();
            assert!(error.starts_with("`model.rope_scaling` does not fit") && error.contains(expected), "{error}");
        }
    }
}
