//! Finds a model's tensors, in one safetensors file or in many with an index, checks them all, and reads them in one dtype.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::families::{is_wrapped, own_name};
use super::layout::{Role, TensorEntry};
use super::names::{OUTPUT, layer_of};
use super::quantised::{GgufWeights, Quantisation, QuantisedModules, is_quantised, quantised};
use super::tensor_problems::{TensorProblem, is_float, unfit};
use super::waiting_layers::ModelPlacement;
use crate::files::{FileKind, TensorFile, TensorView, io_fault, is_blob_of, is_there, read_json_as};
use crate::native::cuda::Upload;
use crate::ops::attention::accumulation_kind;
use crate::ops::linear::Weight;
use crate::recipe::Quantize;
use crate::store::{LoadTarget, load_tensor_to};
use crate::units::{Fault, FaultKind, abridged, quoted};

/// Name of a model's tensors where they are one file.
pub const MODEL_TENSORS: &str = "model.safetensors";
/// Name of what says which file a tensor is in, where they are many.
pub(super) const INDEX: &str = "model.safetensors.index.json";
const EXTENSION: &str = ".safetensors";

/// Where a model's tensors come from, and how they are wanted.
#[derive(Debug)]
pub(super) struct Weights {
    source: WeightSource,
    pub(super) kind: Kind,
    pub(super) placement: ModelPlacement,
    /// The way from files to a device.
    upload: Option<Upload>,
    /// How plain matrices of the layers' linears are packed as they are loaded.
    pub(super) quantize: Option<Quantize>,
}

#[derive(Debug)]
pub(super) enum WeightSource {
    Files(Files),
    Gguf(GgufWeights),
    Memory(BTreeMap<String, Tensor>),
    /// Drawn by libtorch's generator as they are asked for, one by one, with this spread: no second copy of a model is needed.
    Drawn(Vec<TensorEntry>, f64),
}

/// The safetensors files of a directory.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) dir: PathBuf,
    pub(super) opened: Vec<TensorFile>,
    /// Which file a tensor is read from, and what it is called there.
    pub(super) places: BTreeMap<String, (usize, String)>,
    /// Tensors in files to which the index doesn't assign them.
    strays: BTreeSet<String>,
    pub(super) quantisation: Option<Quantisation>,
    pub(super) quantised_modules: QuantisedModules,
    /// The shapes that packed matrices have, once they are checked.
    pub(super) shapes: BTreeMap<String, Vec<usize>>,
}

impl Weights {
    /// Opens the files of a directory and reads their headers; the `config.json` says how names begin, and how matrices are packed.
    pub(super) fn open(dir: &Path, config: &Map<String, Value>, kind: Kind, placement: ModelPlacement) -> Result<Self, Fault> {
        let upload = (placement.device != Device::Cpu).then(|| Upload::to(placement.device));
        let mut files = Files::open(dir, is_wrapped(config))?;
        files.quantisation = Quantisation::of(config)?;
        files.quantised_modules = QuantisedModules::of(config)?;
        Ok(Self { upload, ..Self::of(WeightSource::Files(files), kind, placement) })
    }

    pub(super) fn of(source: WeightSource, kind: Kind, placement: ModelPlacement) -> Self {
        Self { source, kind, placement, upload: None, quantize: None }
    }

    pub(super) fn files(&self) -> Option<&Files> {
        if let WeightSource::Files(files) = &self.source { Some(files) } else { None }
    }

    pub(super) fn gguf(&self) -> Option<&GgufWeights> {
        if let WeightSource::Gguf(gguf) = &self.source { Some(gguf) } else { None }
    }

    /// Leaves the tensors of so many layers from `first` on alone.
    pub(super) fn leave_layers(&mut self, first: usize, count: usize) {
        if let WeightSource::Files(files) = &mut self.source {
            let is_left = |name: &String| layer_of(name).is_some_and(|layer| layer >= first && layer - first < count);
            files.places.retain(|name, _| !is_left(name));
            files.strays.retain(|name| !is_left(name));
        }
    }

    /// Compares names, shapes and dtypes with what a model needs, and reports all differences. A tied one's file may hold an output projection.
    pub(super) fn check(&mut self, entries: &[TensorEntry], is_tied: bool) -> Result<(), Fault> {
        let files = match &mut self.source {
            WeightSource::Files(files) => files,
            WeightSource::Gguf(gguf) => return gguf.check(entries),
            WeightSource::Memory(_) | WeightSource::Drawn(..) => return Ok(()),
        };
        let mut expected: Vec<(&str, &[usize])> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.shape.as_slice())).collect();
        if is_tied && files.places.contains_key(OUTPUT) {
            // Of the embedding's shape, which comes first.
            expected.extend(entries.first().map(|embedding| (OUTPUT, embedding.shape.as_slice())));
        }
        let mut found = files.found()?;
        let (packed, mut problems) = files.take_packed(entries, &mut found);
        expected.retain(|(name, _)| !packed.contains(*name));
        problems.extend(compare(&found, &expected));
        problems.extend(files.strays.iter().map(|name| TensorProblem::extra(name)));
        if problems.is_empty() {
            let packed = entries.iter().filter(|entry| packed.contains(&entry.name));
            files.shapes = packed.map(|entry| (entry.name.clone(), entry.shape.clone())).collect();
            return Ok(());
        }
        Err(unfit(&problems, &files.dir, "its `config.json`"))
    }

    /// Reads a tensor, converted to the wanted dtype, on the wanted device. It may lie in a file's memory: it is not to be written to.
    pub(super) fn load(&self, name: &str) -> Result<Tensor, Fault> {
        self.load_to(name, LoadTarget::File, self.kind)
    }

    /// Reads a frozen matrix, packed as it lies in the file; only the CPU computes with those of GGUF files.
    pub(super) fn load_weight(&self, name: &str) -> Result<Weight, Fault> {
        let stored = match &self.source {
            WeightSource::Gguf(gguf) if self.is_on_cpu() => gguf.packed(name, self.kind)?,
            WeightSource::Files(files) => files.packed(name, self.kind)?,
            _ => None,
        };
        let packed = match (stored, self.quantize.filter(|_| is_quantised(name))) {
            (Some(packed), _) => packed,
            (None, None) => return self.load(name).map(Weight::Plain),
            (None, Some(to)) => {
                let stored = self.files().map(|files| files.raw(name)).transpose()?.flatten();
                // Nothing of the plain one stays.
                let weight_oi = stored.map_or_else(|| self.load_to(name, LoadTarget::Host, Kind::Float), Ok)?;
                let packed = quantised(name, &weight_oi.to_device(Device::Cpu), to, self.kind)?;
                self.files().into_iter().for_each(|files| files.release(name));
                packed
            }
        };
        Ok(Weight::Packed(packed.to_device(self.placement.home_of(name))))
    }

    /// Reads the matrices of all experts of a linear that lie side by side in a checkpoint, where the file has them packed.
    pub(super) fn load_packed_experts(&self, name: &str) -> Result<Option<Vec<Weight>>, Fault> {
        let found = match &self.source {
            WeightSource::Gguf(gguf) if self.is_on_cpu() => gguf.packed_experts(name, self.kind)?,
            WeightSource::Files(files) => files.packed_experts(name, self.kind)?,
            _ => None,
        };
        let device = self.placement.home_of(name);
        Ok(found.map(|experts| experts.iter().map(|packed| Weight::Packed(packed.to_device(device))).collect()))
    }

    fn is_on_cpu(&self) -> bool {
        self.placement.device == Device::Cpu
    }

    /// Reads a tensor in the accumulation kind of the wanted dtype.
    pub(super) fn load_wide(&self, name: &str) -> Result<Tensor, Fault> {
        self.load_to(name, LoadTarget::File, accumulation_kind(self.kind))
    }

    /// Reads a tensor into memory of its own, to be trained.
    pub(super) fn load_to_write(&self, entry: &TensorEntry) -> Result<Tensor, Fault> {
        let is_wide = matches!(entry.role, Role::WideMatrix | Role::Constant);
        self.load_to(&entry.name, LoadTarget::Host, if is_wide { accumulation_kind(self.kind) } else { self.kind })
    }

    fn load_to(&self, name: &str, target: LoadTarget<'_>, kind: Kind) -> Result<Tensor, Fault> {
        let device = self.placement.home_of(name);
        match &self.source {
            WeightSource::Files(files) if files.is_packed(name) => Ok(files.unpacked(name, kind)?.to_device(device)),
            WeightSource::Files(files) => {
                let upload = self.upload.as_ref().filter(|_| device != Device::Cpu);
                files.load(name, kind, upload.map_or(target, LoadTarget::Device))
            }
            WeightSource::Gguf(gguf) => Ok(gguf.load(name, kind)?.to_device(device)),
            WeightSource::Memory(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| missing(Path::new(""), name))?;
                let moved = tensor.to_device(device).to_kind(kind);
                Ok(if matches!(target, LoadTarget::File) { moved } else { moved.copy() })
            }
            WeightSource::Drawn(entries, std) => {
                let entry = entries.iter().find(|entry| entry.name == name).ok_or_else(|| missing(Path::new(""), name))?;
                Ok(entry.filled(kind, device, |shape| Tensor::empty(shape, (kind, device)).normal_(0.0, *std)))
            }
        }
    }
}

/// The files that hold a model's tensors, in the order of their names.
pub(super) fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, Fault> {
    Ok(shards(dir, index(dir)?.as_ref())?.into_values().collect())
}

/// In which of several files each tensor is, by name; `None` where there is only one file.
fn index(dir: &Path) -> Result<Option<BTreeMap<String, String>>, Fault> {
    let index = dir.join(INDEX);
    if is_there(&dir.join(MODEL_TENSORS)) {
        return Ok(None);
    }
    if !is_there(&index) {
        let message = format!("no `{MODEL_TENSORS}` and no `{INDEX}` in `{}`", abridged(dir.display()));
        let hint = "only safetensors are read: convert `.bin` or `.pt` weights to them first";
        return Err(Fault::data(message, hint).of_kind(FaultKind::NoWeights));
    }
    let Index { weight_map } = read_json_as(&index, FileKind::Index)?;
    Ok(Some(weight_map))
}

/// The paths of the files, by their names in the [`index`].
fn shards(dir: &Path, index: Option<&BTreeMap<String, String>>) -> Result<BTreeMap<String, PathBuf>, Fault> {
    let Some(index) = index else { return Ok(BTreeMap::from([(MODEL_TENSORS.to_owned(), dir.join(MODEL_TENSORS))])) };
    // With each a tensor of it, for the error that may name it.
    let named: BTreeMap<&String, &String> = index.iter().map(|(tensor, shard)| (shard, tensor)).collect();
    let path = |(shard, tensor): (&String, &String)| Ok((shard.clone(), shard_path(dir, tensor, shard)?));
    named.into_iter().map(path).collect()
}

impl Files {
    /// Opens them, and keeps the tensors of the language model, which may be one inside another (`is_inner`), by its own names.
    pub(super) fn open(dir: &Path, is_inner: bool) -> Result<Self, Fault> {
        let assigned = index(dir)?;
        let mut all = Self { dir: dir.into(), ..Self::default() };
        for (shard, path) in shards(dir, assigned.as_ref())? {
            let file = TensorFile::open(&path)?;
            for name in file.names() {
                let Some(own) = own_name(&name, is_inner) else { continue };
                let is_assigned = assigned.as_ref().is_none_or(|assigned| assigned.get(&name) == Some(&shard));
                // Two names may mean the same.
                if is_assigned && !all.places.contains_key(&own) {
                    all.places.insert(own, (all.opened.len(), name));
                } else {
                    all.strays.insert(own);
                }
            }
            all.opened.push(file);
        }
        Ok(all)
    }

    fn found(&self) -> Result<BTreeMap<&str, TensorView<'_>>, Fault> {
        let found = self.places.iter().map(|(name, (file, stored))| Ok((name.as_str(), self.opened[*file].get(stored)?)));
        found.collect()
    }

    /// Lets go of the memory into which a tensor was read.
    pub(super) fn release(&self, name: &str) {
        if let Some((file, stored)) = self.places.get(name) {
            self.opened[*file].release(stored);
        }
    }

    fn load(&self, name: &str, kind: Kind, target: LoadTarget<'_>) -> Result<Tensor, Fault> {
        let (file, stored) = self.places.get(name).ok_or_else(|| missing(&self.dir, name))?;
        load_tensor_to(&self.opened[*file], stored, kind, target)
    }
}

/// All differences between the tensors that are there and those that a model needs.
fn compare(found: &BTreeMap<&str, TensorView<'_>>, expected: &[(&str, &[usize])]) -> Vec<TensorProblem> {
    let wanted: BTreeMap<&str, &[usize]> = expected.iter().copied().collect();
    let missing = expected.iter().filter(|(name, _)| !found.contains_key(name));
    let mut problems: Vec<TensorProblem> = missing.map(|(name, _)| TensorProblem::missing(name)).collect();
    for (&name, &TensorView { dtype, shape, .. }) in found {
        problems.extend(match wanted.get(name) {
            None => Some(TensorProblem::extra(name)),
            Some(expected) if *expected != shape => Some(TensorProblem::shape(name, expected, shape)),
            Some(_) => (!is_float(dtype)).then(|| TensorProblem::dtype(name, dtype)),
        });
    }
    problems
}

fn missing(dir: &Path, name: &str) -> Fault {
    unfit(&[TensorProblem::missing(name)], dir, "the model")
}

/// The part of an index that is looked at.
#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// The path of a shard. An index is data from elsewhere: it must not make us read a file outside the model.
fn shard_path(dir: &Path, tensor: &str, file: &str) -> Result<PathBuf, Fault> {
    let refuse = |expected: &str| {
        let (index, tensor) = (abridged(dir.join(INDEX).display()), quoted(tensor));
        let message = format!("`{index}` puts `{tensor}` into `{}`: expected {expected}", quoted(file));
        Fault::data(message, "the index may be damaged or hostile: take the model from its source again")
    };
    let mut components = Path::new(file).components();
    let is_plain = matches!((components.next(), components.next()), (Some(Component::Normal(name)), None) if name == file);
    if !is_plain || !file.ends_with(EXTENSION) || file.contains('\\') {
        return Err(refuse("a plain file name that ends in `.safetensors`"));
    }
    let path = dir.join(file);
    let real = path.canonicalize().map_err(io_fault("open", &path))?;
    let root = dir.canonicalize().map_err(io_fault("open", dir))?;
    if real.starts_with(&root) || is_blob_of(&root, &real) {
        return Ok(real);
    }
    Err(refuse("a file inside the model's directory"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::files::read_json;
    use crate::model::{Model, ModelConfig, ModelSource};
    use crate::recipe::Dtype;
    use crate::store::{load_tensors, save_tensors};
    use serde_json::Value;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2")
    }

    /// All tensors of the fixture.
    fn tensors() -> Vec<(String, Tensor)> {
        load_tensors(&TensorFile::open(&fixture().join(MODEL_TENSORS)).unwrap()).unwrap()
    }

    fn bare() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture().join("config.json"), dir.path().join("config.json")).unwrap();
        dir
    }

    fn save(path: &Path, tensors: &[(String, Tensor)]) {
        save_tensors(path, tensors, &BTreeMap::new()).unwrap();
    }

    fn error(dir: &Path) -> Fault {
        let error = Model::load(dir, Dtype::F32, Device::Cpu).unwrap_err();
        assert!(error.hint().is_some(), "no hint for: {error}");
        error
    }

    /// Splits the fixture into two shards; `rename` says how the index names the second.
    fn sharded(second: &str) -> tempfile::TempDir {
        let dir = bare();
        let tensors = tensors();
        let (a, b) = tensors.split_at(10);
        save(&dir.path().join("a.safetensors"), a);
        save(&dir.path().join("b.safetensors"), b);
        let named = |tensors: &[(String, Tensor)], file: &str| -> Vec<(String, Value)> {
            tensors.iter().map(|(name, _)| (name.clone(), file.into())).collect()
        };
        let map: serde_json::Map<_, _> = named(a, "a.safetensors").into_iter().chain(named(b, second)).collect();
        let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        dir
    }

    #[test]
    fn shards_are_one_model() {
        let dir = sharded("b.safetensors");
        let ids = Tensor::from_slice(&[5i64, 6]).view([1, 2]);
        let embedded = |dir: &Path| Model::load(dir, Dtype::F32, Device::Cpu).unwrap().embed(&ids);
        assert_eq!(embedded(dir.path()), embedded(&fixture()));
    }

    #[test]
    fn an_index_reaches_no_file_outside_the_model() {
        let elsewhere = tempfile::tempdir().unwrap();
        save(&elsewhere.path().join("b.safetensors"), &tensors()[10..]);
        let absolute = elsewhere.path().join("b.safetensors").display().to_string();
        for name in [absolute.as_str(), "../b.safetensors", "sub/b.safetensors", "b.bin", "..", "./b.safetensors", ""] {
            let error = error(sharded(name).path());
            assert!(error.to_string().contains(&format!("into `{}`", quoted(name))), "{name}: {error}");
        }
        let dir = sharded("link.safetensors");
        std::os::unix::fs::symlink(&absolute, dir.path().join("link.safetensors")).unwrap();
        let error = error(dir.path());
        assert!(error.to_string().ends_with("expected a file inside the model's directory"), "{error}");
    }

    #[test]
    fn links_into_the_blobs_of_the_hubs_cache_are_followed() {
        let cache = tempfile::tempdir().unwrap();
        let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/0123abcd"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        let dir = sharded("b.safetensors");
        for (blob, entry) in fs::read_dir(dir.path()).unwrap().enumerate() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), blobs.join(blob.to_string())).unwrap();
            std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(entry.file_name())).unwrap();
        }
        Model::load(&snapshot, Dtype::F32, Device::Cpu).unwrap();
    }

    #[test]
    fn all_misfits_are_reported_at_once() {
        let dir = bare();
        let mut tensors = tensors();
        tensors.retain(|(name, _)| name != "model.norm.weight" && !name.ends_with("layers.1.self_attn.q_proj.bias"));
        tensors.push(("model.layers.3.mlp.up_proj.weight".into(), Tensor::zeros([2, 2], (Kind::Float, Device::Cpu))));
        for (name, tensor) in &mut tensors {
            match name.as_str() {
                "model.layers.0.mlp.down_proj.weight" => *tensor = tensor.transpose(0, 1).contiguous(),
                "model.layers.2.input_layernorm.weight" => *tensor = tensor.to_kind(Kind::Int64),
                _ => {}
            }
        }
        save(&dir.path().join(MODEL_TENSORS), &tensors);
        let error = error(dir.path()).to_string();
        assert_eq!(
            error.split_once(": ").unwrap().1,
            "2 missing (`model.layers.1.self_attn.q_proj.bias`, `model.norm.weight`); \
             1 extra (`model.layers.3.mlp.up_proj.weight`); \
             1 wrong shape (`model.layers.0.mlp.down_proj.weight` expected [64, 176], found [176, 64]); \
             1 unreadable dtype (`model.layers.2.input_layernorm.weight` is I64)"
        );
    }

    #[test]
    fn a_tied_model_may_bring_an_output_projection_of_the_right_shape() {
        let (dir, mut tensors) = (bare(), tensors());
        tensors.push((OUTPUT.into(), Tensor::zeros([512, 64], (Kind::Float, Device::Cpu))));
        save(&dir.path().join(MODEL_TENSORS), &tensors);
        Model::load(dir.path(), Dtype::F32, Device::Cpu).unwrap();
        tensors.last_mut().unwrap().1 = Tensor::zeros([512, 63], (Kind::Float, Device::Cpu));
        save(&dir.path().join(MODEL_TENSORS), &tensors);
        assert!(error(dir.path()).to_string().contains("`lm_head.weight` expected [512, 64], found [512, 63]"));
    }

    #[test]
    fn a_model_that_is_not_tied_needs_its_output_projection() {
        let dir = bare();
        let config = fs::read_to_string(fixture().join("config.json")).unwrap();
        let config = config.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
        fs::write(dir.path().join("config.json"), config).unwrap();
        assert!(!ModelConfig::load(dir.path()).unwrap().tie_word_embeddings);
        save(&dir.path().join(MODEL_TENSORS), &tensors());
        assert!(error(dir.path()).to_string().contains("1 missing (`lm_head.weight`)"));
    }

    #[test]
    fn half_precision_files_load_in_any_dtype() {
        let dir = bare();
        let halves: Vec<_> = tensors().into_iter().map(|(name, tensor)| (name, tensor.to_kind(Kind::Half))).collect();
        save(&dir.path().join(MODEL_TENSORS), &halves);
        for (dtype, kind) in [(Dtype::F32, Kind::Float), (Dtype::Bf16, Kind::BFloat16), (Dtype::F64, Kind::Double)] {
            let model = Model::load(dir.path(), dtype, Device::Cpu).unwrap();
            let embedded = model.embed(&Tensor::from_slice(&[7i64]).view([1, 1]));
            let (_, expected) = halves.iter().find(|(name, _)| name == "model.embed_tokens.weight").unwrap();
            assert_eq!(embedded.view([-1]), expected.get(7).to_kind(kind));
        }
    }

    #[test]
    fn missing_and_truncated_files_are_named() {
        let dir = bare();
        assert_eq!(error(dir.path()).kind(), FaultKind::NoWeights);
        let whole = fs::read(fixture().join(MODEL_TENSORS)).unwrap();
        for length in [0, 4, 8, 1000, whole.len() / 2, whole.len() - 1] {
            fs::write(dir.path().join(MODEL_TENSORS), &whole[..length]).unwrap();
            let error = error(dir.path());
            assert!(error.to_string().contains(MODEL_TENSORS), "{length} bytes: {error}");
        }
        let sharded = sharded("gone.safetensors");
        assert!(error(sharded.path()).to_string().contains("gone.safetensors"));
        fs::write(sharded.path().join(INDEX), "{\"weight_map\": [1]}").unwrap();
        assert!(error(sharded.path()).to_string().contains("invalid type: sequence, expected a map"));
        assert!(error(&dir.path().join("nowhere")).to_string().starts_with("cannot "));
    }

    #[test]
    fn drawn_weights_need_a_config_alone() {
        let dir = bare();
        let model = Model::load_to_train(ModelSource::from(dir.path()).drawn(), Dtype::F32, Device::Cpu).unwrap();
        let config = ModelConfig::load(dir.path()).unwrap();
        for (name, leaf) in model.parameters() {
            let (mean, spread) = (leaf.mean(None).double_value(&[]), leaf.std(false).double_value(&[]));
            let (expected, wanted) = match () {
                () if name.ends_with("norm.weight") => (1.0, 0.0),
                () if name.ends_with("bias") => (0.0, 0.0),
                () => (0.0, config.initializer_range),
            };
            // 2048 numbers and more: five of their own standard errors.
            assert!(
                (mean - expected).abs() <= 0.12 * wanted && (spread - wanted).abs() <= 0.08 * wanted,
                "{name}: {mean}, {spread}"
            );
        }
        let numbers: usize = model.parameters().iter().map(|(_, leaf)| leaf.numel()).sum();
        assert_eq!(numbers, config.num_parameters());
        let frozen = Model::load(ModelSource::from(dir.path()).drawn(), Dtype::Bf16, Device::Cpu).unwrap();
        assert_eq!((frozen.parameters().len(), frozen.weight_bytes().0), (0, 2 * numbers as u64));
    }

    #[test]
    fn a_language_model_inside_another_one_is_found_and_saved_by_itself() {
        let ids = Tensor::from_slice(&[5i64, 6]).view([1, 2]);
        let expected = Model::load(&fixture(), Dtype::F32, Device::Cpu).unwrap();
        for prefix in ["language_model.model.", "model.language_model."] {
            let dir = tempfile::tempdir().unwrap();
            let inner: Value = read_json(&fixture().join("config.json")).unwrap();
            let outer = serde_json::json!({"model_type": "mistral3", "text_config": inner, "vision_config": {}});
            fs::write(dir.path().join("config.json"), outer.to_string()).unwrap();
            let inside = |(name, tensor): (String, Tensor)| (name.replacen("model.", prefix, 1), tensor);
            let mut all: Vec<_> = tensors().into_iter().map(inside).collect();
            all.push(("vision_tower.weight".into(), Tensor::zeros([2], (Kind::Float, Device::Cpu))));
            save(&dir.path().join(MODEL_TENSORS), &all);
            let model = Model::load_to_train(dir.path(), Dtype::F32, Device::Cpu).unwrap();
            assert_eq!(model.embed(&ids), expected.embed(&ids));
            let out = tempfile::tempdir().unwrap();
            model.save_trained(out.path(), "unused").unwrap();
            let saved: Value = read_json(&out.path().join("config.json")).unwrap();
            assert_eq!((&saved["model_type"], saved.get("text_config")), (&inner["model_type"], None));
            assert_eq!(saved["architectures"], serde_json::json!(["Qwen2ForCausalLM"]));
            let read = Model::load(out.path(), Dtype::F32, Device::Cpu).unwrap();
            assert_eq!(read.config().layers, expected.config().layers);
            all.retain(|(name, _)| !name.ends_with("layers.0.mlp.up_proj.weight"));
            save(&dir.path().join(MODEL_TENSORS), &all);
            assert!(error(dir.path()).to_string().contains("1 missing (`model.layers.0.mlp.up_proj.weight`)"));
        }
    }

    #[test]
    fn tensors_of_old_checkpoints_and_of_the_base_class_are_found() {
        let ids = Tensor::from_slice(&[5i64, 6]).view([1, 2]);
        let expected = Model::load(&fixture(), Dtype::F32, Device::Cpu).unwrap().embed(&ids);
        let (dir, mut all) = (bare(), tensors());
        let zeros = || Tensor::zeros([2], (Kind::Float, Device::Cpu));
        all.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), zeros()));
        let without_prefix: Vec<_> = all.iter().map(|(name, tensor)| (name.replacen("model.", "", 1), tensor.copy())).collect();
        for tensors in [&all, &without_prefix] {
            save(&dir.path().join(MODEL_TENSORS), tensors);
            assert_eq!(Model::load(dir.path(), Dtype::F32, Device::Cpu).unwrap().embed(&ids), expected);
        }
        all.push(("norm.weight".into(), zeros()));
        save(&dir.path().join(MODEL_TENSORS), &all);
        assert!(error(dir.path()).to_string().contains("1 extra (`model.norm.weight`)"), "by both names");
    }

    /// A family's fixture with its tensors as `change` leaves them.
    fn family(name: &str, change: impl Fn(&mut Vec<(String, Tensor)>)) -> tempfile::TempDir {
        let (family, dir) = (fixture().with_file_name("families").join(name), tempfile::tempdir().unwrap());
        fs::copy(family.join("config.json"), dir.path().join("config.json")).unwrap();
        let mut tensors = load_tensors(&TensorFile::open(&family.join(MODEL_TENSORS)).unwrap()).unwrap();
        change(&mut tensors);
        save(&dir.path().join(MODEL_TENSORS), &tensors);
        dir
    }

    #[test]
    fn a_layer_that_predicts_further_tokens_is_left_alone_and_no_other() {
        let further = |layer: usize| {
            let name = format!("model.layers.{layer}.eh_proj.weight");
            move |all: &mut Vec<(String, Tensor)>| all.push((name.clone(), Tensor::zeros([2], (Kind::Float, Device::Cpu))))
        };
        Model::load(family("model-glm4-moe", further(2)).path(), Dtype::F32, Device::Cpu).unwrap();
        for (name, layer) in [("model-glm4-moe", 1), ("model-glm4-moe", 3), ("model-gpt-oss", 2)] {
            let error = error(family(name, further(layer)).path()).to_string();
            assert!(error.contains(&format!("1 extra (`model.layers.{layer}.eh_proj.weight`)")), "{error}");
        }
    }

    #[test]
    fn experts_side_by_side_of_another_width_or_in_blocks_are_refused() {
        const DOWN: &str = "model.layers.1.mlp.experts.down_proj";
        let narrow = |all: &mut Vec<(String, Tensor)>| {
            all.iter_mut().filter(|(name, _)| name == DOWN).for_each(|(_, down)| *down = down.narrow(1, 0, 39).contiguous());
        };
        let found = error(family("model-gpt-oss", narrow).path()).to_string();
        assert!(found.contains(&format!("`{DOWN}` expected [4, 40, 64], found [4, 39, 64]")), "{found}");
        let blocks = |all: &mut Vec<(String, Tensor)>| {
            all.iter_mut().filter(|(name, _)| name == DOWN).for_each(|(name, _)| name.push_str("_blocks"));
        };
        // Blocks of 4-bit numbers are read where `quantization_config` says so alone.
        let found = error(family("model-gpt-oss", blocks).path()).to_string();
        let extra = format!("1 missing (`{DOWN}`); 1 extra (`{DOWN}_blocks`)");
        assert!(found.contains(&extra), "{found}");
    }

    #[test]
    fn a_header_with_a_key_twice_is_refused() {
        let dir = bare();
        let header =
            br#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(&[0; 4]);
        fs::write(dir.path().join(MODEL_TENSORS), bytes).unwrap();
        assert!(error(dir.path()).to_string().contains("`w` stands twice"));
    }
}
