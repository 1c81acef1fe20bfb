//! What an adapter trains in place of the model's own: embedding and output projection as whole matrices, which PEFT calls modules to save, and
//! copies of norms and other vectors.

use std::collections::BTreeMap;

use tch::Tensor;

use super::config::{ModelConfig, ModelLinear};
use super::layout::{self, Role};
use super::names::{EMBEDDING_MODULE, FINAL_NORM, OUTPUT_MODULE, inner_module, peft_tensor};
use super::peft::PeftConfig;
use super::spec::SINKS;
use super::targets::targets;
use crate::recipe::TrainedBias;
use crate::units::Fault;

/// A tensor that may be trained there, from the embedding up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum IoTensor {
    /// `(V, E)`, in place of the embedding.
    Embedding,
    /// `(V, E)`, in place of the output projection. As in PEFT a copy of its own, also where the model's is the embedding.
    Output,
    /// `(K, E)`, what scores classes.
    Score,
}

impl IoTensor {
    /// The name in PEFT's files, where the model is one inside another (`is_inner`) or is not.
    pub(super) fn name(self, is_inner: bool) -> String {
        match self {
            Self::Embedding => io_name(EMBEDDING_MODULE, is_inner, "weight"),
            Self::Output => peft_tensor(OUTPUT_MODULE, "weight"),
            Self::Score => peft_tensor("score", "weight"),
        }
    }
}

/// The end of the name in PEFT's files of a matrix as the model has it.
pub(super) const BASE_WEIGHT: &str = ".base_layer.weight";

/// The name in PEFT's files of the embedding or the output projection as the model has it, which PEFT saves with an addition to it.
pub(super) fn base_name(layer: &str, is_inner: bool) -> String {
    io_name(layer, is_inner, &BASE_WEIGHT[1..])
}

fn io_name(layer: &str, is_inner: bool, part: &str) -> String {
    if is_inner { peft_tensor(&inner_module(layer), part) } else { peft_tensor(layer, part) }
}

/// What the settings of an adapter train in embedding and output projection, with its shapes.
pub(super) fn io_tensors(config: &ModelConfig, settings: &PeftConfig) -> Vec<(IoTensor, [usize; 2])> {
    let (vocab, width) = (config.vocab_size, config.hidden_size);
    let classes = config.num_classes.filter(|_| settings.is_classifier);
    let all = [
        (IoTensor::Embedding, [vocab, width], settings.saves(EMBEDDING_MODULE)),
        (IoTensor::Output, [vocab, width], settings.saves(OUTPUT_MODULE)),
        (IoTensor::Score, [classes.unwrap_or(0), width], classes.is_some()),
    ];
    all.into_iter().filter(|(.., is_trained)| *is_trained).map(|(part, shape, _)| (part, shape)).collect()
}

/// Copies of what else is trained, by names in the model, with widths: norms, attention sinks, and biases of linears that are no targets.
pub(super) fn copied(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<(String, usize)>, Fault> {
    let mut all: Vec<_> = copyable(config).filter(|(name, _)| settings.saves(name.trim_end_matches(".weight"))).collect();
    if settings.bias == TrainedBias::All {
        let targets = targets(config, settings)?;
        let is_target = |linear: &ModelLinear| targets.iter().any(|target| target.linear.name == linear.name);
        let bare = config.linears().into_iter().filter(|linear| linear.spec.has_bias && !is_target(linear));
        all.extend(bare.map(|linear| (format!("{}.bias", linear.name), linear.spec.out)));
    }
    Ok(all)
}

/// Norms and attention sinks, whose copies may be trained.
pub(super) fn copyable(config: &ModelConfig) -> impl Iterator<Item = (String, usize)> {
    let is_norm = |role| matches!(role, Role::Norm | Role::NormAboutOne);
    let all = layout::entries(config).into_iter().filter(move |entry| is_norm(entry.role) || entry.name.ends_with(SINKS));
    all.map(|entry| (entry.name, entry.shape.iter().product()))
}

/// Whether a tensor of the model is none of a module, so that PEFT's files have no name for its copy.
pub(super) fn is_nameless(tensor: &str) -> bool {
    ![".weight", ".bias"].iter().any(|part| tensor.ends_with(part))
}

/// The name in files of the copy of a tensor: PEFT's, where it has one, and else the model's own.
pub(super) fn copy_name(tensor: &str) -> String {
    match tensor.rsplit_once('.') {
        Some((module, part)) if !is_nameless(tensor) => peft_tensor(module, part),
        _ => tensor.to_owned(),
    }
}

/// The tensors that are trained in place of the model's own.
#[derive(Debug, Default)]
pub(super) struct EmbeddingAdapter {
    tensors: BTreeMap<IoTensor, Tensor>,
    pub(super) copies: BTreeMap<String, Tensor>,
    is_inner: bool,
    /// Embedding and output projection as the adapter's file has them. What is another than the model's takes its place, as in PEFT.
    pub(super) bases: BTreeMap<&'static str, Tensor>,
}

impl EmbeddingAdapter {
    /// Collects what is trained, which becomes leaves.
    pub(super) fn new(
        config: &ModelConfig,
        settings: &PeftConfig,
        mut tensor: impl FnMut(IoTensor, &[i64]) -> Result<Tensor, Fault>,
        mut copy: impl FnMut(&str, i64) -> Result<Tensor, Fault>,
    ) -> Result<Self, Fault> {
        let leaf = |(part, shape): (IoTensor, [usize; 2])| {
            let tensor = tensor(part, &shape.map(|size| size as i64))?;
            Ok((part, tensor.set_requires_grad(true)))
        };
        let tensors = io_tensors(config, settings).into_iter().map(leaf).collect::<Result<_, Fault>>()?;
        let copy = |(name, width): (String, usize)| {
            let leaf = copy(&name, width as i64)?.set_requires_grad(true);
            Ok((name, leaf))
        };
        let copies = copied(config, settings)?.into_iter().map(copy).collect::<Result<_, Fault>>()?;
        Ok(Self { tensors, copies, is_inner: settings.is_inner, bases: BTreeMap::new() })
    }

    pub(super) fn get(&self, part: IoTensor) -> Option<&Tensor> {
        self.tensors.get(&part)
    }

    /// All, by their names in PEFT's files; the tensors are the leaves themselves.
    pub(super) fn parameters(&self) -> Vec<(String, Tensor)> {
        let copy = |(name, leaf): (&String, &Tensor)| (copy_name(name), leaf.shallow_clone());
        self.some(|_| true).into_iter().chain(self.copies.iter().map(copy)).collect()
    }

    pub(super) fn of_embedding(&self) -> Vec<(String, Tensor)> {
        self.some(|part| part == IoTensor::Embedding)
    }

    /// What is trained above the layers, the final norm's copy among it.
    pub(super) fn of_head(&self) -> Vec<(String, Tensor)> {
        let norm = self.copy(FINAL_NORM).map(|copy_e| (copy_name(FINAL_NORM), copy_e));
        self.some(|part| part != IoTensor::Embedding).into_iter().chain(norm).collect()
    }

    /// The copy of a tensor of the model, by its name there: the leaf itself.
    pub(super) fn copy(&self, name: &str) -> Option<Tensor> {
        self.copies.get(name).map(Tensor::shallow_clone)
    }

    fn some(&self, is_meant: impl Fn(IoTensor) -> bool) -> Vec<(String, Tensor)> {
        let meant = self.tensors.iter().filter(|(part, _)| is_meant(**part));
        meant.map(|(part, tensor)| (part.name(self.is_inner), tensor.shallow_clone())).collect()
    }

    /// An adapter with other tensors, which become leaves.
    pub(super) fn map(&self, tensor: impl Fn(&Tensor) -> Tensor) -> Self {
        let leaf = |(part, of): (&IoTensor, &Tensor)| (*part, tensor(of).set_requires_grad(true));
        let bases = self.bases.iter().map(|(end, base_ve)| (*end, base_ve.shallow_clone())).collect();
        let copy = |(name, of): (&String, &Tensor)| (name.clone(), tensor(of).set_requires_grad(true));
        let copies = self.copies.iter().map(copy).collect();
        Self { tensors: self.tensors.iter().map(leaf).collect(), copies, bases, ..*self }
    }
}
