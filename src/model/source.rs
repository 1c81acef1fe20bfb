//! Which directory a model is read from, and what counts in place of its own configuration.

use std::path::Path;

use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use super::config::{ModelConfig, PackedSizes};
use super::families::{FULL, ORIGINAL, SLIDING, TABLES, is_longrope};
use super::layout;
use super::quantised::{GgufWeights, QUANTISATION, Quantisation, quantised_sizes};
use super::weights::Weights;
use crate::files::{GgufFile, object_of_model, read_json};
use crate::recipe::{ModelRecipe, Quantize, RopeScalingRecipe};
use crate::units::{Fault, FaultKind, abridged};

/// A model directory, and how its rotary embeddings are scaled if not as its `config.json` says.
#[derive(Clone, Copy, Debug)]
pub struct ModelSource<'a> {
    pub dir: &'a Path,
    pub rope_scaling: Option<&'a RopeScalingRecipe>,
    /// How plain matrices are packed while they are loaded.
    pub quantize: Option<Quantize>,
    /// Whether libtorch's generator draws the weights on the device: then the directory needs a `config.json` alone.
    pub is_drawn: bool,
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for ModelSource<'a> {
    fn from(dir: &'a P) -> Self {
        Self { dir: dir.as_ref(), rope_scaling: None, quantize: None, is_drawn: false }
    }
}

impl<'a> From<&'a ModelRecipe> for ModelSource<'a> {
    fn from(recipe: &'a ModelRecipe) -> Self {
        Self { rope_scaling: recipe.rope_scaling.as_ref(), quantize: recipe.quantize, ..Self::from(&recipe.path) }
    }
}

impl ModelConfig {
    pub fn load<'a>(source: impl Into<ModelSource<'a>>) -> Result<Self, Fault> {
        source.into().config()
    }
}

impl ModelSource<'_> {
    pub fn drawn(self) -> Self {
        Self { is_drawn: true, ..self }
    }

    pub(super) fn config(self) -> Result<ModelConfig, Fault> {
        let mut own = if let Some(file) = GgufFile::of_model(self.dir)? {
            let config = ModelConfig::of_file(file.path(), &self.own_object()?)?;
            let packed = GgufWeights { file, config: config.clone() }.packed_sizes(&layout::entries(&config));
            ModelConfig { packed, ..config }
        } else {
            let config = ModelConfig::load_file(&self.dir.join("config.json"))?;
            let packed = packed_sizes(self.dir, &self.own_object()?, &config)?;
            ModelConfig { packed, ..config }
        };
        if let Some(to) = self.quantize {
            if !own.packed.forms.is_empty() {
                let message = format!("`model.quantize` is set, and `{}` is packed already", abridged(self.dir.display()));
                return Err(Fault::usage(message, "leave `model.quantize` out, or take the model in 16 bits"));
            }
            own.packed = quantised_sizes(to, &layout::entries(&own));
        }
        if self.rope_scaling.is_none() {
            return Ok(own);
        }
        let unfit = |reason: &str| {
            let message = format!("`model.rope_scaling` does not fit `{}`: {reason}", abridged(self.dir.display()));
            Fault::usage(message, "correct `model.rope_scaling`, leave it out, or take another model")
        };
        if own.rotations().is_empty() {
            return Err(unfit("no layer has a rotary embedding"));
        }
        if own.layers.iter().any(|layer| layer.attention.query_growth.is_some()) {
            return Err(unfit("its queries grow with their position, which belongs to the scaling of its own"));
        }
        let scaled = ModelConfig::from_object(&self.object()?).map(|scaled| ModelConfig { packed: own.packed.clone(), ..scaled });
        scaled.map_err(|fault| {
            // The reader of a `config.json` names its tables, in which the recipe's keys stand.
            let tables = [TABLES[0], TABLES[1], FULL];
            let name = |text: String, table: &str| text.replace(&format!("`{table}."), "`model.rope_scaling.");
            unfit(&tables.into_iter().fold(fault.to_string(), name))
        })
    }

    fn own_object(self) -> Result<Map<String, Value>, Fault> {
        let found = object_of_model(self.dir, "config.json")?;
        let mut object = found.map_or_else(|| read_json(&self.dir.join("config.json")), Ok)?;
        // Old repositories of GPTQ have it in a file of its own.
        if object.get(QUANTISATION).is_none_or(Value::is_null)
            && let Some(mut table) = object_of_model(self.dir, "quantize_config.json")?
        {
            table.entry("quant_method").or_insert_with(|| json!("gptq"));
            object.insert(QUANTISATION.into(), Value::Object(table));
        }
        Ok(object)
    }

    /// The content of `config.json` as it counts.
    pub(super) fn object(self) -> Result<Map<String, Value>, Fault> {
        let mut object = self.own_object()?;
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

/// What of a directory's weights is packed; nothing where there are none.
fn packed_sizes(dir: &Path, object: &Map<String, Value>, config: &ModelConfig) -> Result<PackedSizes, Fault> {
    if Quantisation::of(object)?.is_none() {
        return Ok(PackedSizes::default());
    }
    match Weights::open(dir, object, Kind::Float, Device::Cpu.into()) {
        Ok(weights) => Ok(weights.files().map(|files| files.packed_sizes(&layout::entries(config))).unwrap_or_default()),
        Err(error) if error.kind() == FaultKind::NoWeights => Ok(PackedSizes::default()),
        Err(error) => Err(error),
    }
}

/// Puts a scaling in place of a file's own. What its tables say beside that, stays.
fn scale(object: &mut Map<String, Value>, scaling: &RopeScalingRecipe) {
    let mut new: Map<String, Value> = scaling.0.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    let own_original = new.get(ORIGINAL).cloned();
    // Programs that know one spelling alone do not see the other.
    let spelling = if object.get(TABLES[0]).is_some_and(Value::is_object) { TABLES[0] } else { TABLES[1] };
    let tables: Vec<Map<String, Value>> =
        TABLES.into_iter().filter_map(|key| object.remove(key)).filter_map(|table| table.as_object().cloned()).collect();
    // Layers that slide may have a table of their own, which is never scaled.
    let [full, sliding] = [FULL, SLIDING].map(|kind| tables.iter().filter_map(|table| table.get(kind)).collect::<Vec<_>>());
    // The base of `dynamic` grows from the end of the model's positions on, whatever another kind has stretched.
    let kept = if scaling.rope_type() == "dynamic" { &KEPT[..2] } else { &KEPT[..] };
    for table in full.iter().filter_map(|table| table.as_object()).chain(&tables) {
        for key in kept {
            if let Some(value) = table.get(*key).filter(|value| !value.is_null()) {
                new.entry(*key).or_insert_with(|| value.clone());
            }
        }
    }
    if let (Some(own), Some(beside)) = (own_original, object.get_mut(ORIGINAL)) {
        *beside = own;
    }
    lengthen(object, &mut new, scaling.rope_type());
    let table = match sliding.first() {
        Some(sliding) => json!({ FULL: new, SLIDING: sliding }),
        None => Value::Object(new),
    };
    object.insert(spelling.into(), table);
}

/// `longrope` alone has its length in `max_position_embeddings`, which a factor in its table does not change.
fn lengthen(object: &mut Map<String, Value>, table: &mut Map<String, Value>, rope_type: &str) {
    let (Some(positions), Some(factor)) = (object.get(POSITIONS).cloned(), table.get("factor").and_then(Value::as_f64)) else {
        return;
    };
    let original = table.get(ORIGINAL).or_else(|| object.get(ORIGINAL)).unwrap_or(&positions).clone();
    if let (true, Some(positions), Some(tokens)) = (is_longrope(rope_type), positions.as_u64(), original.as_u64()) {
        table.insert(ORIGINAL.into(), original);
        object.insert(POSITIONS.into(), json!(positions.max((tokens as f64 * factor) as u64)));
    }
}

const POSITIONS: &str = "max_position_embeddings";
/// What a table keeps beside the scaling.
const KEPT: [&str; 3] = ["rope_theta", "partial_rotary_factor", ORIGINAL];

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::model::spec::{DynamicYarnScaling, RopeScaling};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    fn scaled_as(name: &str, words: &str) -> Result<ModelConfig, Fault> {
        let scaling = RopeScalingRecipe(words.parse().unwrap());
        ModelConfig::load(ModelSource { rope_scaling: Some(&scaling), ..ModelSource::from(&fixture(name)) })
    }

    fn scaled(name: &str, original: Option<usize>) -> Result<ModelConfig, Fault> {
        let original = original.map_or_else(String::new, |tokens| format!("original_max_position_embeddings = {tokens}"));
        scaled_as(name, &format!("rope_type = 'dynamic_yarn'\n{original}"))
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

    /// Every kind of a `config.json`, under its keys and with its defaults.
    #[test]
    fn a_recipe_scales_as_a_file_would() {
        let of = |name: &str, words: &str| {
            let config = scaled_as(name, words).unwrap();
            (config.rotations()[0].scaling.clone(), config.trained_positions())
        };
        let (linear, reach) = of("model-qwen2", "rope_type = 'linear'\nfactor = 4");
        assert_eq!((linear, reach), (RopeScaling::Linear { factor: 4.0 }, 4 * 32_768));
        let (dynamic, reach) = of("families/model-llama31", "rope_type = 'dynamic'\nfactor = 2.0");
        let max_positions = ModelConfig::load(&fixture("families/model-llama31")).unwrap().max_position_embeddings;
        assert_eq!((dynamic, reach), (RopeScaling::Dynamic { factor: 2.0, max_positions }, 2 * max_positions));
        let (yarn, reach) = of("model-qwen2", "rope_type = 'yarn'\nfactor = 4.0\nattention_factor = 1.5\nbeta_fast = 16");
        let RopeScaling::Yarn(yarn) = yarn else { panic!("{yarn:?}") };
        assert_eq!((yarn.original, yarn.factor, yarn.attention_factor, yarn.beta_fast), (32_768, 4.0, 1.5, 16.0));
        assert_eq!(reach, 131_072);
        let words = "rope_type = 'llama3'\nfactor = 8\nlow_freq_factor = 1\nhigh_freq_factor = 4\n\
                     original_max_position_embeddings = 64";
        let (llama3, _) = of("model-qwen2", words);
        let llama3_of = crate::model::spec::Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 64 };
        assert_eq!(llama3, RopeScaling::Llama3(llama3_of));
        let pairs = ModelConfig::load(&fixture("model-qwen2")).unwrap().rotations()[0].rotary_dim / 2;
        let lists = format!("short_factor = {0:?}\nlong_factor = {0:?}", vec![1.5; pairs]);
        let (longrope, reach) = of("model-qwen2", &format!("rope_type = 'longrope'\nfactor = 2.0\n{lists}"));
        let RopeScaling::LongRope(longrope) = longrope else { panic!("{longrope:?}") };
        assert_eq!((longrope.original, reach), (32_768, 65_536));
        assert!((longrope.attention_factor - (1.0 + 2f64.ln() / 32_768f64.ln()).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn a_key_of_the_recipe_is_named_as_there() {
        for (words, expected) in [
            ("rope_type = 'yarm'", "unknown `model.rope_scaling.rope_type` `yarm`, expected one of"),
            ("rope_type = 'yarn'", "`model.rope_scaling.factor` is missing"),
            ("rope_type = 'dynamic_yarn'\nfactor = 4", "unknown key `model.rope_scaling.factor`"),
            ("rope_type = 'dynamic_yarn'\nbeta_slow = 40", "more than `beta_slow`"),
            (
                "type = 'dynamic_yarn'\noriginal_max_position_embeddings = 0",
                "`model.rope_scaling.original_max_position_embeddings`",
            ),
            ("rope_type = 'longrope'\nfactor = 2\nshort_factor = [1]\nlong_factor = [1]", "`model.rope_scaling.short_factor`"),
        ] {
            let error = scaled_as("model-qwen2", words).unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
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
