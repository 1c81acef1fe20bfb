//! Which tensors a model has: their names in checkpoints, their shapes, and what they are for.

use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use super::names::{EMBEDDING, FINAL_NORM, OUTPUT, SCORE, layer_tensor};
use super::spec::{LayerSpec, LinearSpec, SINKS};

/// What a tensor is for, which is how a new one is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Matrix,
    /// In the accumulation kind, whatever the model's dtype.
    WideMatrix,
    Norm,
    /// A norm that multiplies by 1 + its weight.
    NormAboutOne,
    Bias,
    /// Never trained, and in the accumulation kind.
    Constant,
}

#[derive(Clone, Debug)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) role: Role,
}

impl TensorEntry {
    fn new(name: impl Into<String>, shape: &[usize], role: Role) -> Self {
        Self { name: name.into(), shape: shape.into(), role }
    }

    /// A new tensor: norms multiply by 1, biases are 0, and matrices are as `draw` makes them in a shape.
    pub(super) fn filled(&self, kind: Kind, device: Device, draw: impl FnOnce(&[i64]) -> Tensor) -> Tensor {
        let shape: Vec<i64> = self.shape.iter().map(|&size| size as i64).collect();
        match self.role {
            Role::Matrix | Role::WideMatrix => draw(&shape),
            Role::Norm => Tensor::ones(&shape, (kind, device)),
            Role::Bias | Role::Constant | Role::NormAboutOne => Tensor::zeros(&shape, (kind, device)),
        }
    }
}

impl ModelConfig {
    /// How many weights the model has, without constants.
    pub fn num_parameters(&self) -> usize {
        count(&entries(self))
    }

    /// How many of them are a layer's.
    pub fn num_layer_parameters(&self, layer: usize) -> usize {
        count(&layer_entries(&self.layers[layer], self))
    }
}

fn count(entries: &[TensorEntry]) -> usize {
    let trainable = entries.iter().filter(|entry| entry.role != Role::Constant);
    trainable.map(|entry| entry.shape.iter().product::<usize>()).sum()
}

/// All tensors of a model, bottom to top. With tied embeddings the output projection is none of them, and a classifier has none.
pub(super) fn entries(config: &ModelConfig) -> Vec<TensorEntry> {
    let embedding = [config.vocab_size, config.hidden_size];
    let mut all = vec![TensorEntry::new(EMBEDDING, &embedding, Role::Matrix)];
    for (layer, spec) in config.layers.iter().enumerate() {
        let entries = layer_entries(spec, config).into_iter();
        all.extend(entries.map(|entry| TensorEntry { name: layer_tensor(layer, &entry.name), ..entry }));
    }
    all.push(norm(config, FINAL_NORM, config.hidden_size));
    match config.num_classes.filter(|_| config.has_score) {
        Some(num_classes) => all.push(TensorEntry::new(SCORE, &[num_classes, config.hidden_size], Role::Matrix)),
        None if config.tie_word_embeddings => {}
        None => all.push(TensorEntry::new(OUTPUT, &embedding, Role::Matrix)),
    }
    all
}

/// The tensors of one layer, by their names inside it.
fn layer_entries(spec: &LayerSpec, config: &ModelConfig) -> Vec<TensorEntry> {
    let hidden_size = config.hidden_size;
    let norms = spec.norms(hidden_size).into_iter();
    let mut all: Vec<TensorEntry> = norms.map(|of| norm(config, &format!("{}.weight", of.path), of.width)).collect();
    for LinearSpec { path, out, inner, has_bias } in spec.linears(hidden_size) {
        let is_wide =
            spec.feed_forward.experts().is_some_and(|experts| experts.has_wide_router() && experts.router(0).path == path);
        let role = if is_wide { Role::WideMatrix } else { Role::Matrix };
        all.push(TensorEntry::new(format!("{path}.weight"), &[out, inner], role));
        if has_bias {
            all.push(TensorEntry::new(format!("{path}.bias"), &[out], Role::Bias));
        }
    }
    if spec.attention.has_sinks {
        all.push(TensorEntry::new(SINKS, &[spec.attention.num_heads], Role::Matrix));
    }
    if let Some(experts) = spec.feed_forward.experts() {
        let count = experts.num_experts;
        all.extend(experts.correction().map(|path| TensorEntry::new(path, &[count], Role::Constant)));
        for LinearSpec { path, out, inner, .. } in experts.stacked(hidden_size).iter().filter(|_| experts.is_stacked()) {
            all.push(TensorEntry::new(&**path, &[count, *inner, *out], Role::Matrix));
            all.push(TensorEntry::new(format!("{path}_bias"), &[count, *out], Role::Bias));
        }
    }
    all
}

fn norm(config: &ModelConfig, name: &str, size: usize) -> TensorEntry {
    let role = if config.norms_add_one { Role::NormAboutOne } else { Role::Norm };
    TensorEntry::new(name, &[size], role)
}
