//! What a model is, as data.

use std::collections::BTreeMap;

use tch::Kind;

use super::names::{EMBEDDING_MODULE, OUTPUT_MODULE, layer_of, layer_tensor};
use super::spec::{LayerSpec, LinearSpec, RopeSpec};
use crate::recipe::CacheLength;
use crate::units::{Bytes, LayerIdx, distinct};

#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each says one thing of a model, and none of them excludes another")]
pub struct ModelConfig {
    /// The family's name in `config.json`.
    pub model_type: &'static str,
    /// E, the width of the residual stream.
    pub hidden_size: usize,
    /// The layers, bottom to top.
    pub layers: Vec<LayerSpec>,
    /// The language model is inside another one, whose checkpoint it is read from.
    pub is_inner: bool,
    /// Layers behind the last one in checkpoints, which predict further tokens, and are left alone.
    pub further_layers: usize,
    pub vocab_size: usize,
    pub embedding_scale: f64,
    pub logits_divisor: f64,
    /// Positions that the file speaks of; [`Self::trained_positions`] says what a scaled rotary embedding makes of it.
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    /// Norms multiply by 1 + their weight, where others multiply by the weight.
    pub norms_add_one: bool,
    /// What no logit exceeds: logits x become cap · tanh(x / cap).
    pub logit_soft_cap: Option<f64>,
    /// The output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// K, the number of classes, where a matrix of its own scores them in place of the output projection.
    pub num_classes: Option<usize>,
    /// Whether that matrix is among the model's weights; else whoever trains it begins with a new one.
    pub has_score: bool,
    /// The token that pads texts, before which Transformers' classifiers of sequences read.
    pub pad_token_id: Option<u32>,
    /// Standard deviation of newly drawn weights.
    pub initializer_range: f64,
    /// The dtype the weights are said to be stored in.
    pub weight_kind: Option<Kind>,
    /// Probabilities of dropout that the model was made with, by their keys, where they are not 0. Nothing is computed with them.
    pub dropouts: Vec<(&'static str, f64)>,
    pub packed: PackedSizes,
}

/// Frozen matrices in fewer bits than are computed with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedSizes {
    /// What each layer has packed; empty where nothing is.
    pub layers: Vec<PackedSize>,
    /// Whether only a CPU has them packed.
    pub is_unpacked_on_gpu: bool,
    /// What embedding and output projection have packed.
    pub io_layers: PackedSize,
    /// Their forms, by name, with how many matrices are in each.
    pub forms: BTreeMap<&'static str, usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedSize {
    /// How many numbers are packed.
    pub numbers: u64,
    /// What these numbers take, with their scales.
    pub bytes: Bytes,
    /// Numbers of the largest matrix.
    pub largest: u64,
}

impl PackedSizes {
    /// With one more tensor of a checkpoint, which takes `bytes` in a form. Of the matrices of all experts, one is unpacked at a time.
    pub(super) fn add(&mut self, name: &str, shape: &[usize], bytes: usize, form: &'static str) {
        let numbers = shape.iter().product::<usize>() as u64;
        let matrices = if shape.len() == 3 { shape[0] as u64 } else { 1 };
        let size = match layer_of(name) {
            Some(layer) => {
                self.layers.resize(self.layers.len().max(layer + 1), PackedSize::default());
                &mut self.layers[layer]
            }
            None => &mut self.io_layers,
        };
        let largest = size.largest.max(numbers / matrices);
        *size = PackedSize { numbers: size.numbers + numbers, bytes: Bytes(size.bytes.0 + bytes as u64), largest };
        *self.forms.entry(form).or_default() += 1;
    }

    pub fn layer(&self, layer: usize) -> PackedSize {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    pub fn all(&self) -> PackedSize {
        self.layers.iter().fold(self.io_layers, |sum, layer| PackedSize {
            numbers: sum.numbers + layer.numbers,
            bytes: Bytes(sum.bytes.0 + layer.bytes.0),
            largest: sum.largest.max(layer.largest),
        })
    }
}

impl ModelConfig {
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    pub fn has_experts(&self) -> bool {
        self.layers.iter().any(|layer| layer.feed_forward.experts().is_some())
    }

    pub fn ends_in_experts(&self) -> bool {
        self.layers.last().is_some_and(|layer| layer.feed_forward.experts().is_some())
    }

    /// The slots of each layer where a policy has those of `length`; of a layer with a sliding window, those of its window.
    pub fn cache_lengths(&self, length: &CacheLength) -> Vec<usize> {
        let of_policy = length.by_layer(self.num_layers());
        self.layers.iter().zip(of_policy).map(|(layer, slots)| layer.attention.rule.window.unwrap_or(slots)).collect()
    }

    /// All linears of the layers, bottom to top: the one list from which names, shapes and keys of what is trained beside them come.
    pub fn linears(&self) -> Vec<ModelLinear> {
        let of_layer = |(layer, spec): (usize, &LayerSpec)| {
            let linears = spec.linears(self.hidden_size).into_iter().enumerate();
            linears.map(move |(number, spec)| ModelLinear::new(layer, number, spec))
        };
        self.layers.iter().enumerate().flat_map(of_layer).collect()
    }

    /// The output projection, and the embedding as a linear of tokens that are ones among zeros, as if they were of a further layer; a
    /// classifier has no output projection.
    pub(super) fn ends(&self) -> impl Iterator<Item = ModelLinear> {
        let end = |number, name: &'static str, [out, inner]: [usize; 2]| {
            let spec = LinearSpec { path: name.into(), out, inner, has_bias: false };
            ModelLinear { layer: LayerIdx(self.num_layers()), number, name: name.to_owned(), spec }
        };
        let output = self.num_classes.is_none().then(|| end(0, OUTPUT_MODULE, [self.vocab_size, self.hidden_size]));
        output.into_iter().chain([end(1, EMBEDDING_MODULE, [self.hidden_size, self.vocab_size])])
    }

    /// A model whose last hidden states are scored by `num_classes` classes: its own, where it has some.
    pub fn with_classes(self, num_classes: Option<usize>) -> Self {
        Self { num_classes: if self.has_score { self.num_classes } else { num_classes }, ..self }
    }

    /// How many scores a hidden state gets: one a token of the vocabulary, or one a class.
    pub fn num_scores(&self) -> usize {
        self.num_classes.unwrap_or(self.vocab_size)
    }

    /// The rotary embeddings that the layers need, each once.
    pub fn rotations(&self) -> Vec<&RopeSpec> {
        distinct(self.layers.iter().filter_map(|layer| layer.attention.rope.as_ref()))
    }

    /// The longest sequence in tokens that the model is made for: that of the layer that reaches least far.
    pub fn trained_positions(&self) -> usize {
        let reach = self.rotations().into_iter().map(|rope| rope.reach(self.max_position_embeddings)).min();
        reach.unwrap_or(self.max_position_embeddings)
    }

    /// The longest sequence in tokens that the model computes: longer than [`Self::trained_positions`] where no rotary embedding ends.
    pub fn computable_positions(&self) -> usize {
        let end = self.rotations().into_iter().map(|rope| rope.end(self.max_position_embeddings)).min();
        end.unwrap_or(self.max_position_embeddings)
    }

    pub fn rotates_by_length(&self) -> bool {
        self.rotations().iter().any(|rope| rope.depends_on_length())
    }

    /// [`RopeSpec::length_under_way`] of all rotary embeddings.
    pub fn length_under_way(&self, so_far: usize, at_most: usize) -> usize {
        let under_way = |rope: &RopeSpec| rope.length_under_way(so_far, at_most);
        self.rotations().into_iter().map(under_way).min().unwrap_or(at_most)
    }

    pub fn num_kv_heads(&self) -> Vec<usize> {
        self.layers.iter().map(|layer| layer.attention.num_kv_heads).collect()
    }

    /// The width of the widest layer between its projections.
    pub fn intermediate_size(&self) -> usize {
        self.layers.iter().map(|layer| layer.feed_forward.intermediate_size()).max().unwrap_or(0)
    }
}

/// A linear of a model, before it is loaded.
#[derive(Clone, Debug)]
pub struct ModelLinear {
    pub layer: LayerIdx,
    pub number: usize,
    /// The name in the model, as `model.layers.3.mlp.up_proj`.
    pub name: String,
    /// Shape, and path in the layer.
    pub spec: LinearSpec,
}

impl ModelLinear {
    pub(super) fn new(layer: usize, number: usize, spec: LinearSpec) -> Self {
        Self { layer: LayerIdx(layer), number, name: layer_tensor(layer, &spec.path), spec }
    }
}
