//! The weights of a model that something is added to, file by file: as they lie there, or unpacked.

use tch::{Device, Kind, Tensor};

use super::Model;
use super::config::ModelConfig;
use super::families::own_name;
use super::layout::{self, TensorEntry};
use super::source::ModelSource;
use super::weights::{MODEL_TENSORS, Weights};
use crate::files::{Dtype, TensorFile, TensorHead};
use crate::store::load_tensor;
use crate::units::Fault;

/// The weights that something is added to.
#[derive(Debug)]
pub(super) struct MergedWeights {
    pub(super) weights: Weights,
    /// The tensors of packed ones, which are written unpacked in f32.
    pub(super) unpacked: Option<Vec<TensorHead>>,
    /// Whether the files have the names of a language model inside another one.
    is_inner: bool,
}

pub(super) struct Shard<'a> {
    pub(super) name: String,
    /// Where its tensors lie as they are; `None` where they are unpacked.
    pub(super) file: Option<&'a TensorFile>,
    pub(super) heads: Vec<TensorHead>,
}

impl MergedWeights {
    /// Opens the weights of a model, and says what that is.
    pub(super) fn open(source: ModelSource<'_>) -> Result<(ModelConfig, Self), Fault> {
        let (config, weights) = Model::open(source, Kind::Float, Device::Cpu.into())?;
        let is_packed = weights.gguf().is_some() || !config.packed.forms.is_empty();
        let head = |entry: TensorEntry| TensorHead { name: entry.name, dtype: Dtype::F32, shape: entry.shape };
        let unpacked = is_packed.then(|| layout::entries(&config).into_iter().map(head).collect());
        let is_inner = config.is_inner && !is_packed;
        Ok((config, Self { weights, unpacked, is_inner }))
    }

    /// What a tensor of the files is called in the model, where it is of it.
    pub(super) fn own(&self, stored: &str) -> Option<String> {
        own_name(stored, self.is_inner)
    }

    /// A tensor by its name in the model.
    pub(super) fn stored(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        match (&self.unpacked, self.weights.files()) {
            (None, Some(files)) => files.raw(name),
            (heads, _) => {
                let is_there = heads.iter().flatten().any(|head| head.name == name);
                is_there.then(|| self.weights.load(name)).transpose()
            }
        }
    }

    /// A tensor of a shard as it is without an adapter.
    pub(super) fn load(&self, shard: &Shard<'_>, name: &str) -> Result<Tensor, Fault> {
        shard.file.map_or_else(|| self.weights.load(name), |file| load_tensor(file, name))
    }

    /// The files, under names that count them, with their tensors.
    pub(super) fn shards(&self, is_left: impl Fn(&TensorHead) -> bool) -> Result<Vec<Shard<'_>>, Fault> {
        if let Some(heads) = &self.unpacked {
            let heads = heads.iter().filter(|head| is_left(head)).cloned().collect();
            return Ok(vec![Shard { name: MODEL_TENSORS.to_owned(), file: None, heads }]);
        }
        let files = self.weights.files().map_or(&[][..], |files| &files.opened);
        let head = |file: &TensorFile, name: String| {
            let view = file.get(&name)?;
            Ok(TensorHead { dtype: view.dtype, shape: view.shape.to_vec(), name })
        };
        let shard = |file| {
            let mut heads =
                TensorFile::names(file).into_iter().map(|name| head(file, name)).collect::<Result<Vec<_>, Fault>>()?;
            heads.retain(&is_left);
            Ok(Shard { name: MODEL_TENSORS.to_owned(), file: Some(file), heads })
        };
        let mut shards = files.iter().map(shard).collect::<Result<Vec<_>, Fault>>()?;
        shards.retain(|shard| !shard.heads.is_empty());
        let count = shards.len();
        for (index, shard) in shards.iter_mut().enumerate().filter(|_| count > 1) {
            shard.name = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        }
        Ok(shards)
    }
}
