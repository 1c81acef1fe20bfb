//! What an adapter trains in place of the model's own: embedding and output projection as whole matrices, which PEFT calls modules to save, and
//! copies of norms and other vectors.

use std::collections::BTreeMap;

use tch::Tensor;

use super::config::{ModelConfig, ModelLinear};
use super::layout::{self, Role};
use super::names::{EMBEDDING, EMBEDDING_MODULE, FINAL_NORM, OUTPUT, OUTPUT_MODULE, SCORE, inner_module, peft_tensor};
use super::peft::PeftConfig;
use super::spec::SINKS;
use super::targets::targets;
use crate::recipe::TrainedBias;
use crate::units::Fault;

/// The end of the name in PEFT's files of a matrix as the model has it.
pub(super) const BASE_WEIGHT: &str = ".base_layer.weight";

/// The name in PEFT's files of the embedding or the output projection as the model has it, which PEFT saves with an addition to it.
pub(super) fn base_name(layer: &str, is_inner: bool) -> String {
    io_name(layer, is_inner, &BASE_WEIGHT[1..])
}

fn io_name(layer: &str, is_inner: bool, part: &str) -> String {
    if is_inner { peft_tensor(&inner_module(layer), part) } else { peft_tensor(layer, part) }
}

/// The tensors of the model of which the settings of an adapter train copies, by their names there, with shapes.
pub(super) fn copies(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<(String, Vec<usize>)>, Fault> {
    Ok(copied_matrices(config, settings).into_iter().chain(copied_vectors(config, settings)?).collect())
}

/// The matrices among the [`copies`]: embedding `(V, E)`; output projection `(V, E)`, as in PEFT one of its own also where the model's is the
/// embedding; and what scores classes `(K, E)`.
pub(super) fn copied_matrices(config: &ModelConfig, settings: &PeftConfig) -> Vec<(String, Vec<usize>)> {
    let classes = config.num_classes.filter(|_| settings.is_classifier);
    let all = [
        (EMBEDDING, config.vocab_size, settings.saves(EMBEDDING_MODULE)),
        (OUTPUT, config.vocab_size, settings.saves(OUTPUT_MODULE)),
        (SCORE, classes.unwrap_or(0), classes.is_some()),
    ];
    let trained = all.into_iter().filter(|(.., is_trained)| *is_trained);
    trained.map(|(name, rows, _)| (name.to_owned(), vec![rows, config.hidden_size])).collect()
}

/// The vectors among the [`copies`]: norms, attention sinks, and biases of linears that are no targets.
pub(super) fn copied_vectors(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<(String, Vec<usize>)>, Fault> {
    let mut all: Vec<_> = copyable(config).filter(|(name, _)| settings.saves(name.trim_end_matches(".weight"))).collect();
    if settings.bias == TrainedBias::All {
        let targets = targets(config, settings)?;
        let is_target = |linear: &ModelLinear| targets.iter().any(|target| target.linear.name == linear.name);
        let bare = config.linears().into_iter().filter(|linear| linear.spec.has_bias && !is_target(linear));
        all.extend(bare.map(|linear| (format!("{}.bias", linear.name), vec![linear.spec.out])));
    }
    Ok(all)
}

/// Norms and attention sinks, whose copies may be trained.
pub(super) fn copyable(config: &ModelConfig) -> impl Iterator<Item = (String, Vec<usize>)> {
    let is_norm = |role| matches!(role, Role::Norm | Role::NormAboutOne);
    let all = layout::entries(config).into_iter().filter(move |entry| is_norm(entry.role) || entry.name.ends_with(SINKS));
    all.map(|entry| (entry.name, entry.shape))
}

/// Whether a tensor of the model is none of a module, so that PEFT's files have no name for its copy.
pub(super) fn is_nameless(tensor: &str) -> bool {
    ![".weight", ".bias"].iter().any(|part| tensor.ends_with(part))
}

/// The name in files of the copy of a tensor: PEFT's, where it has one, and else the model's own. The model may be one inside another (`is_inner`).
pub(super) fn copy_name(tensor: &str, is_inner: bool) -> String {
    match tensor.rsplit_once('.') {
        Some((module, part)) if !is_nameless(tensor) => io_name(module, is_inner, part),
        _ => tensor.to_owned(),
    }
}

/// Copies of the model's tensors that are trained in place of these.
#[derive(Debug, Default)]
pub(super) struct TrainedCopies {
    /// The matrices from the embedding up, and behind them the vectors in the order of their names, which are the model's.
    pub(super) tensors: Vec<(String, Tensor)>,
    is_inner: bool,
    /// Embedding and output projection as the adapter's file has them. What is another than the model's takes its place, as in PEFT.
    pub(super) bases: BTreeMap<&'static str, Tensor>,
}

impl TrainedCopies {
    /// Collects what is trained, which becomes leaves.
    pub(super) fn new(
        config: &ModelConfig,
        settings: &PeftConfig,
        mut tensor: impl FnMut(&str, &[i64]) -> Result<Tensor, Fault>,
    ) -> Result<Self, Fault> {
        let leaf = |(name, shape): (String, Vec<usize>)| {
            let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
            let leaf = tensor(&name, &shape)?.set_requires_grad(true);
            Ok((name, leaf))
        };
        let mut vectors = copied_vectors(config, settings)?;
        vectors.sort();
        let tensors = copied_matrices(config, settings).into_iter().chain(vectors).map(leaf).collect::<Result<_, Fault>>()?;
        Ok(Self { tensors, is_inner: settings.is_inner, bases: BTreeMap::new() })
    }

    /// The copy of a tensor of the model, by its name there: the leaf itself.
    pub(super) fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|(tensor, _)| tensor == name).map(|(_, leaf)| leaf)
    }

    /// All, by their names in PEFT's files; the tensors are the leaves themselves.
    pub(super) fn parameters(&self) -> Vec<(String, Tensor)> {
        self.some(|_| true)
    }

    pub(super) fn of_embedding(&self) -> Vec<(String, Tensor)> {
        self.some(|name| name == EMBEDDING)
    }

    /// What is trained above the layers, the final norm's copy among it.
    pub(super) fn of_head(&self) -> Vec<(String, Tensor)> {
        self.some(|name| [OUTPUT, SCORE, FINAL_NORM].contains(&name))
    }

    fn some(&self, is_meant: impl Fn(&str) -> bool) -> Vec<(String, Tensor)> {
        let meant = self.tensors.iter().filter(|(name, _)| is_meant(name));
        meant.map(|(name, leaf)| (copy_name(name, self.is_inner), leaf.shallow_clone())).collect()
    }

    /// Copies with other tensors, which become leaves.
    pub(super) fn map(&self, tensor: impl Fn(&Tensor) -> Tensor) -> Self {
        let leaf = |(name, of): &(String, Tensor)| (name.clone(), tensor(of).set_requires_grad(true));
        let bases = self.bases.iter().map(|(end, base_ve)| (*end, base_ve.shallow_clone())).collect();
        Self { tensors: self.tensors.iter().map(leaf).collect(), bases, is_inner: self.is_inner }
    }
}
