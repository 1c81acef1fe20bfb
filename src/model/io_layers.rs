//! What an adapter trains in embedding and output projection: whole matrices in place of the model's own, which PEFT calls modules to save,
//! as it does copies of norms, and matrices of low rank beside the embedding.

use std::collections::BTreeMap;

use tch::Tensor;

use super::config::{ModelConfig, ModelLinear};
use super::layout::{self, Role};
use super::names::{EMBEDDING_MODULE, FINAL_NORM, OUTPUT_MODULE, inner_module, peft_tensor};
use super::peft::PeftConfig;
use super::spec::SINKS;
use super::targets::{module, targets, targets_embedding, targets_output};
use crate::recipe::TrainedBias;
use crate::units::Fault;

/// A tensor that may be trained there, from the embedding up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum IoTensor {
    /// `(V, E)`, in place of the embedding.
    Embedding,
    /// `(r, V)`, of the addition to the embedding.
    LowRankA,
    /// `(E, r)`, of the same.
    LowRankB,
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
            Self::LowRankA => io_name(EMBEDDING_MODULE, is_inner, "lora_embedding_A"),
            Self::LowRankB => io_name(EMBEDDING_MODULE, is_inner, "lora_embedding_B"),
            Self::Output => peft_tensor(OUTPUT_MODULE, "weight"),
            Self::Score => peft_tensor("score", "weight"),
        }
    }

    pub(super) fn is_below_the_layers(self) -> bool {
        matches!(self, Self::Embedding | Self::LowRankA | Self::LowRankB)
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

/// Embedding and output projection, where they get matrices of low rank.
pub(super) fn low_rank_io_layers(config: &ModelConfig, settings: &PeftConfig) -> Result<Vec<&'static str>, Fault> {
    let embedding = targets_embedding(settings).then_some(EMBEDDING_MODULE);
    Ok(embedding.into_iter().chain(targets_output(config, settings)?.then_some(OUTPUT_MODULE)).collect())
}

/// What the settings of an adapter train in embedding and output projection, with its shapes.
pub(super) fn io_tensors(config: &ModelConfig, settings: &PeftConfig) -> Vec<(IoTensor, [usize; 2])> {
    let (vocab, width, r) = (config.vocab_size, config.hidden_size, settings.rank_of(&module(settings, EMBEDDING_MODULE)));
    let has_addition = targets_embedding(settings);
    let classes = config.num_classes.filter(|_| settings.is_classifier);
    let all = [
        (IoTensor::Embedding, [vocab, width], settings.saves(EMBEDDING_MODULE)),
        (IoTensor::LowRankA, [r, vocab], has_addition),
        (IoTensor::LowRankB, [width, r], has_addition),
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

/// The tensors that are trained.
#[derive(Debug, Default)]
pub(super) struct EmbeddingAdapter {
    tensors: BTreeMap<IoTensor, Tensor>,
    pub(super) copies: BTreeMap<String, Tensor>,
    /// The factor of the addition to the embedding.
    scale: f64,
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
        let scale = settings.scale_of(&module(settings, EMBEDDING_MODULE));
        Ok(Self { tensors, copies, scale, is_inner: settings.is_inner, bases: BTreeMap::new() })
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
        self.some(IoTensor::is_below_the_layers)
    }

    /// What is trained above the layers, the final norm's copy among it.
    pub(super) fn of_head(&self) -> Vec<(String, Tensor)> {
        let norm = self.copy(FINAL_NORM).map(|copy_e| (copy_name(FINAL_NORM), copy_e));
        self.some(|part| !part.is_below_the_layers()).into_iter().chain(norm).collect()
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

    /// What is trained in place of the embedding: what tokens become. `(…)` int64 in, `(…, E)` out, in the dtype that it is kept in.
    pub(super) fn embed(&self, ids: &Tensor) -> Option<Tensor> {
        Some(rows(self.get(IoTensor::Embedding)?, ids))
    }

    /// What is added to that, likewise.
    pub(super) fn addition(&self, ids: &Tensor) -> Option<Tensor> {
        let (a_rv, b_er) = self.low_rank()?;
        Some(rows(&a_rv.transpose(0, 1), ids).matmul(&b_er.transpose(0, 1)) * self.scale)
    }

    /// The embedding with that in it: `(V, E)` in and out.
    pub(super) fn added_to(&self, base_ve: &Tensor) -> Tensor {
        let Some((a_rv, b_er)) = self.low_rank() else { return base_ve.shallow_clone() };
        base_ve + b_er.matmul(a_rv).transpose(0, 1).to_kind(base_ve.kind()) * self.scale
    }

    fn low_rank(&self) -> Option<(&Tensor, &Tensor)> {
        Some((self.get(IoTensor::LowRankA)?, self.get(IoTensor::LowRankB)?))
    }

    /// The gradients of [`Self::of_embedding`], in its order, from those of what tokens became: `(n)` int64 and `(n, E)` by piece.
    pub(super) fn embed_backward(&self, pieces: impl Iterator<Item = (Tensor, Tensor)>) -> Vec<Tensor> {
        let mut gradients: BTreeMap<IoTensor, Tensor> = BTreeMap::new();
        for (part, tensor) in self.tensors.iter().filter(|(part, _)| part.is_below_the_layers()) {
            gradients.insert(*part, tensor.detach().zeros_like());
        }
        for (ids_n, gradient_ne) in pieces {
            if let Some(total_ve) = gradients.get_mut(&IoTensor::Embedding) {
                let _ = total_ve.index_add_(0, &ids_n, &gradient_ne.to_kind(total_ve.kind()));
            }
            if let Some((a_rv, b_er)) = self.low_rank() {
                let (a_rv, b_er) = (a_rv.detach(), b_er.detach());
                let scaled_ne = gradient_ne.to_kind(a_rv.kind()) * self.scale;
                let of_a_rn = b_er.transpose(0, 1).matmul(&scaled_ne.transpose(0, 1));
                let of_b_er = scaled_ne.transpose(0, 1).matmul(&rows(&a_rv.transpose(0, 1), &ids_n));
                for (part, total) in &mut gradients {
                    match part {
                        IoTensor::LowRankA => drop(total.index_add_(1, &ids_n, &of_a_rn)),
                        IoTensor::LowRankB => drop(total.g_add_(&of_b_er)),
                        _ => {}
                    }
                }
            }
        }
        gradients.into_values().collect()
    }
}

pub(super) fn rows(table: &Tensor, ids: &Tensor) -> Tensor {
    Tensor::embedding(table, ids, -1, false, false)
}
