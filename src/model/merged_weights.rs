//! The weights of a model that something is added to, file by file: as they lie there, or unpacked.

use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::Model;
use super::config::ModelConfig;
use super::families::own_name;
use super::layout::{self, TensorEntry};
use super::source::ModelSource;
use super::weights::{Files, MODEL_TENSORS, TensorNames, Weights};
use crate::files::{Dtype, GgufFile, TensorFile, TensorHead};
use crate::store::load_tensor;
use crate::units::Fault;

/// The weights that something is added to.
#[derive(Debug)]
pub(super) enum MergedWeights {
    Files(Files, TensorNames),
    /// Packed, and written unpacked in f32: these tensors.
    Packed(Box<Weights>, Vec<TensorHead>),
}

pub(super) struct Shard<'a> {
    pub(super) name: String,
    /// Where its tensors lie as they are; `None` where they are unpacked.
    pub(super) file: Option<&'a TensorFile>,
    pub(super) heads: Vec<TensorHead>,
}

impl MergedWeights {
    /// Opens the weights of a model with this `config.json`.
    pub(super) fn open(source: ModelSource<'_>, config: &ModelConfig, object: &Map<String, Value>) -> Result<Self, Fault> {
        if GgufFile::of_model(source.dir)?.is_none() && config.packed.forms.is_empty() {
            return Ok(Self::Files(Files::open(source.dir)?, TensorNames::of(object)));
        }
        let head = |entry: TensorEntry| TensorHead { name: entry.name, dtype: Dtype::F32, shape: entry.shape };
        let heads = layout::entries(config).into_iter().map(head).collect();
        Ok(Self::Packed(Box::new(Model::open(source, Kind::Float, Device::Cpu.into())?.1), heads))
    }

    /// What a tensor of the files is called in the model, where it is of it.
    pub(super) fn own(&self, stored: &str) -> Option<String> {
        if let Self::Files(_, TensorNames::Wrapped) = self { own_name(stored) } else { Some(stored.to_owned()) }
    }

    /// A tensor by its name in the model.
    pub(super) fn stored(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        let files = match self {
            Self::Files(files, _) => files,
            Self::Packed(weights, heads) => {
                let is_there = heads.iter().any(|head| head.name == name);
                return is_there.then(|| weights.load(name)).transpose();
            }
        };
        let called = |stored: &String| self.own(stored).as_deref() == Some(name);
        let found = files.opened.iter().find_map(|file| Some((file, file.names().into_iter().find(called)?)));
        found.map(|(file, name)| load_tensor(file, &name)).transpose()
    }

    /// A tensor of a shard as it is without an adapter.
    pub(super) fn load(&self, shard: &Shard<'_>, name: &str) -> Result<Tensor, Fault> {
        match (self, shard.file) {
            (Self::Packed(weights, _), _) => weights.load(name),
            (Self::Files(..), Some(file)) => load_tensor(file, name),
            (Self::Files(..), None) => Ok(Tensor::new()),
        }
    }

    /// The files, under names that count them, with their tensors.
    pub(super) fn shards(&self) -> Result<Vec<Shard<'_>>, Fault> {
        let files = match self {
            Self::Files(files, _) => &files.opened,
            Self::Packed(_, heads) => {
                return Ok(vec![Shard { name: MODEL_TENSORS.to_owned(), file: None, heads: heads.clone() }]);
            }
        };
        let name = |index: usize| match files.len() {
            1 => MODEL_TENSORS.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let head = |file: &TensorFile, name: String| {
            let view = file.get(&name)?;
            Ok(TensorHead { dtype: view.dtype, shape: view.shape.to_vec(), name })
        };
        let shard = |(index, file)| {
            let heads = TensorFile::names(file).into_iter().map(|name| head(file, name)).collect::<Result<_, Fault>>()?;
            Ok(Shard { name: name(index), file: Some(file), heads })
        };
        files.iter().enumerate().map(shard).collect()
    }
}
