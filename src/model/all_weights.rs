//! All weights of a model as what is trained: leaves by their names in checkpoints, saved as a directory that loads as a model.

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::config::ModelConfig;
use super::families::unwrapped;
use super::layout;
use super::names::{EMBEDDING, FINAL_NORM, OUTPUT, SCORE, layer_tensor};
use super::source::ModelSource;
use super::waiting_layers::ModelPlacement;
use super::weights::{MODEL_TENSORS, WeightSource, Weights};
use crate::files::{TEMPLATE_FOLDER, further_templates, make_dir, read_companion, to_json, write_atomic};
use crate::store::{bytes_of, pt_metadata, save_tensors};
use crate::units::{Bytes, Fault};

/// What a model directory may hold beside configuration and weights: whatever of it the base has goes into each checkpoint.
pub(super) const COMPANIONS: [&str; 9] = [
    "added_tokens.json",
    CHAT_TEMPLATE,
    GENERATION,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
const GENERATION: &str = "generation_config.json";

/// Tokenizer and chat template of a model directory by their names, as they go beside an adapter.
pub fn companions(dir: &Path) -> impl Iterator<Item = (&'static str, Result<Vec<u8>, Fault>)> {
    let of_adapter = COMPANIONS.into_iter().filter(|name| *name != GENERATION);
    of_adapter.filter_map(move |name| Some((name, read_companion(dir, name).transpose()?)))
}

/// Every weight of a model, as a leaf that requires a gradient.
#[derive(Debug)]
pub(super) struct AllWeights {
    /// Bottom to top; a tied matrix stands here once, as the embedding.
    leaves: Vec<(String, Tensor)>,
    /// What is saved beside them, and never trained.
    constants: Vec<(String, Tensor)>,
    /// Name of the matrix behind the logits.
    output: &'static str,
    config: Map<String, Value>,
    /// Read when the weights are, so that a run can save itself whatever becomes of its base.
    companions: Vec<(String, Vec<u8>)>,
}

fn aliases<'a>(tensors: impl Iterator<Item = &'a (String, Tensor)>) -> Vec<(String, Tensor)> {
    tensors.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
}

impl AllWeights {
    pub(super) fn load(source: ModelSource<'_>, config: &ModelConfig, weights: &Weights) -> Result<Self, Fault> {
        let dir = source.dir;
        let (constants, trained): (Vec<_>, Vec<_>) =
            layout::entries(config).into_iter().partition(|entry| entry.role == layout::Role::Constant);
        let constant = |entry: layout::TensorEntry| {
            let tensor = weights.load_to_write(&entry)?;
            Ok((entry.name, tensor))
        };
        let leaf = |entry| constant(entry).map(|(name, tensor)| (name, tensor.set_requires_grad(true)));
        let read = |name: String| Some(read_companion(dir, &name).transpose()?.map(|bytes| (name, bytes)));
        let named = COMPANIONS.into_iter().map(str::to_owned).chain(further_templates(dir)?);
        // Before the weights, which take longer.
        let companions = named.filter_map(read).collect::<Result<_, Fault>>()?;
        Ok(Self {
            leaves: trained.into_iter().map(leaf).collect::<Result<_, Fault>>()?,
            constants: constants.into_iter().map(constant).collect::<Result<_, Fault>>()?,
            output: match config.tie_word_embeddings {
                _ if config.has_score => SCORE,
                true => EMBEDDING,
                false => OUTPUT,
            },
            // What is saved is the language model alone, where it was inside another one.
            config: unwrapped(&source.object()?).into_owned(),
            companions,
        })
    }

    /// The leaves themselves, for the layers to compute with.
    pub(super) fn weights(&self, kind: Kind, placement: ModelPlacement) -> Weights {
        Weights::of(WeightSource::Memory(self.tensors().into_iter().collect()), kind, placement)
    }

    pub(super) fn parameters(&self) -> Vec<(String, Tensor)> {
        aliases(self.leaves.iter())
    }

    /// Whether a tensor of this name is saved, and never trained.
    pub(super) fn is_constant(&self, name: &str) -> bool {
        self.constants.iter().any(|(constant, _)| constant == name)
    }

    fn tensors(&self) -> Vec<(String, Tensor)> {
        aliases(self.leaves.iter().chain(&self.constants))
    }

    /// The weights of the final norm and of the output projection.
    pub(super) fn head(&self) -> Vec<(String, Tensor)> {
        [FINAL_NORM, self.output].into_iter().filter_map(|name| self.find(name)).collect()
    }

    pub(super) fn embedding(&self) -> Option<(String, Tensor)> {
        self.find(EMBEDDING)
    }

    pub(super) fn of_layers(&self, layers: Range<usize>) -> Vec<(String, Tensor)> {
        let starts: Vec<String> = layers.map(|layer| layer_tensor(layer, "")).collect();
        let is_meant = |(name, _): &&(String, Tensor)| starts.iter().any(|start| name.starts_with(start.as_str()));
        aliases(self.leaves.iter().filter(is_meant))
    }

    fn find(&self, name: &str) -> Option<(String, Tensor)> {
        self.leaves.iter().find(|(n, _)| n == name).map(|(name, leaf)| (name.clone(), leaf.shallow_clone()))
    }

    pub(super) fn freeze(&self) {
        for (_, leaf) in &self.leaves {
            let _ = leaf.set_requires_grad(false);
        }
    }

    /// Writes a model directory, in the dtype that is trained in; `dir` exists.
    pub(super) fn save(&self, dir: &Path) -> Result<(), Fault> {
        save_tensors(&dir.join(MODEL_TENSORS), &self.tensors(), &pt_metadata())?;
        if self.companions.iter().any(|(name, _)| name.starts_with(TEMPLATE_FOLDER)) {
            make_dir(&dir.join(TEMPLATE_FOLDER))?;
        }
        for (name, bytes) in &self.companions {
            write_atomic(&dir.join(name), bytes)?;
        }
        let dtype = match self.leaves.first().map(|(_, leaf)| leaf.kind()) {
            Some(Kind::Double) => "float64",
            Some(Kind::BFloat16) => "bfloat16",
            _ => "float32",
        };
        let mut config = self.config.clone();
        // `torch_dtype` is the older spelling; of two, programs differ on which counts.
        let spelling = if config.contains_key("torch_dtype") && !config.contains_key("dtype") { "torch_dtype" } else { "dtype" };
        config.remove("torch_dtype");
        config.insert(spelling.into(), json!(dtype));
        write_atomic(&dir.join("config.json"), &to_json(&config))
    }

    /// The bytes of what [`Self::save`] writes, but for the headers.
    pub(super) fn saved_bytes(&self) -> Bytes {
        let beside: usize = self.companions.iter().map(|(_, bytes)| bytes.len()).sum();
        Bytes(bytes_of(self.leaves.iter().chain(&self.constants).map(|(_, tensor)| tensor)).0 + beside as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tch::Device;

    use super::*;
    use crate::files::TensorFile;
    use crate::files::read_json;
    use crate::model::{Adapter, Model};
    use crate::recipe::{Dtype, LoraRecipe, ModuleSet};
    use crate::store::load_tensors;
    use crate::units::LayerIdx;

    /// A copy of the fixture with some keys of its configuration changed.
    fn changed(changes: &Value) -> tempfile::TempDir {
        let (home, dir) =
            (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2"), tempfile::tempdir().unwrap());
        for file in fs::read_dir(home).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        let mut object: Map<String, Value> = read_json(&dir.path().join("config.json")).unwrap();
        object.extend(changes.as_object().unwrap().clone());
        fs::write(dir.path().join("config.json"), Value::Object(object).to_string()).unwrap();
        dir
    }

    #[test]
    fn what_is_saved_is_a_model_with_all_that_its_base_had() {
        let base = changed(&json!({"torch_dtype": "bfloat16", "dtype": null}));
        let template = "additional_chat_templates/tool_use.jinja";
        fs::create_dir(base.path().join(TEMPLATE_FOLDER)).unwrap();
        fs::write(base.path().join(template), "tools").unwrap();
        fs::create_dir(base.path().join(TEMPLATE_FOLDER).join(".checkpoints")).unwrap();
        for (dtype, word) in [(Dtype::F32, "float32"), (Dtype::F64, "float64"), (Dtype::Bf16, "bfloat16")] {
            let model = Model::load_to_train(base.path(), dtype, Device::Cpu).unwrap();
            let (_, mut embedding) = model.embedding_parameters().remove(0);
            tch::no_grad(|| drop(embedding.g_add_scalar_(1.0)));
            let out = tempfile::tempdir().unwrap();
            model.save_trained(out.path(), "unused").unwrap();
            let read = Model::load_to_train(out.path(), dtype, Device::Cpu).unwrap();
            for ((name, ours), (other, theirs)) in model.parameters().into_iter().zip(read.parameters()) {
                assert!(name == other && ours.equal(&theirs), "{name}");
            }
            for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", template] {
                assert!(fs::read(out.path().join(name)).unwrap() == fs::read(base.path().join(name)).unwrap(), "{name}");
            }
            let config: Map<String, Value> = read_json(&out.path().join("config.json")).unwrap();
            assert_eq!((&config["dtype"], config.get("torch_dtype")), (&json!(word), None));
            assert!(fs::metadata(out.path().join(MODEL_TENSORS)).unwrap().len() < model.trained_bytes().0);
        }
    }

    #[test]
    fn a_foreign_link_is_not_copied_into_checkpoints() {
        let secret = tempfile::NamedTempFile::new().unwrap();
        for name in ["merges.txt", "additional_chat_templates/secret.jinja", TEMPLATE_FOLDER] {
            let base = changed(&json!({}));
            if let Some(folder) = Path::new(name).parent() {
                fs::create_dir_all(base.path().join(folder)).unwrap();
            }
            let foreign = tempfile::tempdir().unwrap();
            fs::write(foreign.path().join("tools.jinja"), "secret").unwrap();
            let target = if name == TEMPLATE_FOLDER { foreign.path() } else { secret.path() };
            std::os::unix::fs::symlink(target, base.path().join(name)).unwrap();
            let error = Model::load_to_train(base.path(), Dtype::F32, Device::Cpu).unwrap_err().to_string();
            assert!(error.contains("which is no part of the model"), "{name}: {error}");
        }
    }

    #[test]
    fn what_corrects_a_router_is_saved_and_never_trained_and_loses_no_bits_in_bf16() {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/model-glm4-moe");
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let model = Model::load_to_train(&base, dtype, Device::Cpu).unwrap();
            let is_correction = |(name, _): &(String, Tensor)| name.ends_with("correction_bias");
            assert!(!model.parameters().iter().any(is_correction));
            // The router, too, is a leaf of more bits, and the one that computes.
            let (_, router) = model.parameters().into_iter().find(|(name, _)| name.ends_with("mlp.gate.weight")).unwrap();
            let computes = |tensor: &Tensor| tensor.data_ptr() == router.data_ptr();
            assert!(router.kind() == Kind::Float && model.decoder_layer(LayerIdx(1)).tensors().any(computes));
            let out = tempfile::tempdir().unwrap();
            model.save_trained(out.path(), "unused").unwrap();
            let correction = |dir: &Path| {
                let all = load_tensors(&TensorFile::open(&dir.join(MODEL_TENSORS)).unwrap()).unwrap();
                all.into_iter().find(is_correction).unwrap().1
            };
            assert_eq!(correction(out.path()), correction(&base));
            Model::check(out.path()).unwrap();
        }
    }

    #[test]
    fn a_tied_matrix_is_one_parameter() {
        let base = changed(&json!({"tie_word_embeddings": true}));
        let model = Model::load_to_train(base.path(), Dtype::F32, Device::Cpu).unwrap();
        let names: Vec<String> = model.parameters().into_iter().map(|(name, _)| name).collect();
        assert!(names.iter().any(|name| name == EMBEDDING) && !names.iter().any(|name| name == OUTPUT));
        let numbers: usize = model.parameters().iter().map(|(_, leaf)| leaf.numel()).sum();
        assert_eq!(numbers, model.config().num_parameters());
        let [(norm, _), (output, ours)] = &model.head_parameters()[..] else { panic!("two parameters") };
        assert_eq!((norm.as_str(), output.as_str()), (FINAL_NORM, EMBEDDING));
        assert_eq!(ours.data_ptr(), model.embedding_parameters()[0].1.data_ptr());
    }

    #[test]
    fn an_adapter_in_their_place_freezes_the_weights() {
        let mut model = Model::load_to_train(changed(&json!({})).path(), Dtype::F32, Device::Cpu).unwrap();
        let weights = model.parameters();
        assert!(weights.iter().all(|(_, leaf)| leaf.requires_grad() && leaf.is_leaf()));
        let lora = LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::AllLinear);
        model.set_adapter(Adapter::new(model.config(), &lora, 1, Kind::Float, Device::Cpu).unwrap());
        assert!(!weights.iter().any(|(_, leaf)| leaf.requires_grad()));
        assert!(model.head_parameters().is_empty() && model.parameters().iter().all(|(name, _)| name.contains("lora_")));
        let ids = Tensor::from_slice(&[3i64]).view([1, 1]);
        assert!(!model.logits(&model.embed(&ids)).requires_grad());
    }

    #[test]
    fn what_is_not_trained_is_not_saved() {
        let base = changed(&json!({}));
        let frozen = Model::load(base.path(), Dtype::F32, Device::Cpu).unwrap();
        assert!(frozen.save_trained(base.path(), "m").is_err_and(|error| error.to_string().starts_with("nothing of the model")));
    }
}
