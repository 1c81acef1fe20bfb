//! The whole model: embedding, decoder layers, final norm, output projection, and what of it is trained.

use std::collections::BTreeMap;
use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::adapter::{self, Adapter};
use super::all_weights::{self, AllWeights};
use super::attend::{Attend, AttendError};
use super::beginning::Beginning;
use super::config::ModelConfig;
use super::decoder::DecoderLayer;
use super::delta::Delta;
use super::dropout::{DropoutContext, TokenContext};
use super::embedding::Embedding;
use super::ends::base_embedding;
use super::init::draw;
use super::linear::Linear;
use super::names::FINAL_NORM;
use super::norm::RmsNorm;
use super::positions::Positions;
use super::source::ModelSource;
use super::weights::{TensorNames, Weights};
use super::{ModelError, layout};
use crate::files::PeftConfig;
use crate::ops::frequencies::Frequencies;
use crate::recipe::Dtype;
use crate::units::{Bytes, LayerIdx};

/// A decoder-only language model; knows no cache and no tokenizer.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    final_norm: RmsNorm,
    trained: Trainable,
    kind: Kind,
    device: Device,
}

/// What of a model is trained.
#[derive(Debug)]
enum Trainable {
    Nothing,
    /// With these settings; its matrices are the linears' own.
    Adapter(PeftConfig),
    AllWeights(AllWeights),
}

impl Model {
    /// Looks at a model directory without reading its weights: the configuration, and names, shapes and dtypes of all tensors.
    pub fn check<'a>(source: impl Into<ModelSource<'a>>) -> Result<ModelConfig, ModelError> {
        Ok(Self::open(source.into(), Kind::Float, Device::Cpu)?.0)
    }

    fn open(source: ModelSource<'_>, kind: Kind, device: Device) -> Result<(ModelConfig, Weights), ModelError> {
        let config = source.config()?;
        let names = TensorNames::of(&source.object()?);
        let mut weights = Weights::open(source.dir, names, kind, device)?;
        weights.leave_layers(config.num_layers(), config.further_layers);
        weights.check(&layout::entries(&config), config.tie_word_embeddings)?;
        Ok((config, weights))
    }

    /// Reads a model from a directory in Hugging Face's layout, converting its weights to `dtype`.
    pub fn load<'a>(source: impl Into<ModelSource<'a>>, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        let kind = kind_of(dtype);
        let (config, weights) = Self::open(source.into(), kind, device)?;
        Self::build(config, &weights, kind, device)
    }

    /// As [`Self::load`], with every weight a parameter that is trained; a tied matrix is one.
    pub fn load_to_train<'a>(source: impl Into<ModelSource<'a>>, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        Self::check_dtype_to_train(dtype)?;
        let (kind, source) = (kind_of(dtype), source.into());
        let (config, weights) = Self::open(source, kind, device)?;
        let all = AllWeights::load(source, &config, &weights)?;
        let model = Self::build(config, &all.weights(kind, device), kind, device)?;
        Ok(Self { trained: Trainable::AllWeights(all), ..model })
    }

    /// Refuses a dtype in which [`Self::load_to_train`] does not load: weights are their own masters.
    pub fn check_dtype_to_train(dtype: Dtype) -> Result<(), ModelError> {
        all_weights::check_dtype(dtype)
    }

    /// A model with newly drawn weights that never were on a disk.
    pub fn random(config: ModelConfig, dtype: Dtype, device: Device, seed: u64) -> Result<Self, ModelError> {
        let kind = kind_of(dtype);
        let weights = Weights::in_memory(draw(&config, Kind::Float, seed), kind, device);
        Self::build(config, &weights, kind, device)
    }

    /// A model from the `config.json` of a directory alone: its weights are drawn on the device, by libtorch's generator.
    pub fn drawn<'a>(source: impl Into<ModelSource<'a>>, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        Self::drawn_as(ModelConfig::load(source)?, dtype, device)
    }

    /// As [`Self::drawn`], of a shape that no directory has.
    pub fn drawn_as(config: ModelConfig, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        let (weights, kind) = Self::draw_weights(&config, dtype, device);
        Self::build(config, &weights, kind, device)
    }

    /// As [`Self::drawn`], with every weight a parameter that is trained.
    pub fn drawn_to_train<'a>(source: impl Into<ModelSource<'a>>, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        let source = source.into();
        Self::drawn_to_train_as((source, source.config()?), dtype, device)
    }

    /// As [`Self::drawn_to_train`], of another shape than the directory's.
    pub fn drawn_to_train_as<'a>(
        (source, config): (impl Into<ModelSource<'a>>, ModelConfig),
        dtype: Dtype,
        device: Device,
    ) -> Result<Self, ModelError> {
        Self::check_dtype_to_train(dtype)?;
        let (weights, kind) = Self::draw_weights(&config, dtype, device);
        let all = AllWeights::load(source.into(), &config, &weights)?;
        let model = Self::build(config, &all.weights(kind, device), kind, device)?;
        Ok(Self { trained: Trainable::AllWeights(all), ..model })
    }

    fn draw_weights(config: &ModelConfig, dtype: Dtype, device: Device) -> (Weights, Kind) {
        let kind = kind_of(dtype);
        (Weights::drawn(layout::entries(config), config.initializer_range, kind, device), kind)
    }

    fn build(config: ModelConfig, weights: &Weights, kind: Kind, device: Device) -> Result<Self, ModelError> {
        let layer = |idx| DecoderLayer::load(weights, &config, LayerIdx(idx));
        let layers = (0..config.num_layers()).map(layer).collect::<Result<_, _>>()?;
        let embedding = Embedding::load(weights, &config)?;
        let final_norm = RmsNorm::load(weights, &config, FINAL_NORM)?;
        Ok(Self { config, embedding, layers, final_norm, trained: Trainable::Nothing, kind, device })
    }

    /// The same model, whose last hidden states are scored by `num_classes` classes ([`ModelConfig::with_classes`]).
    pub fn with_classes(self, num_classes: Option<usize>) -> Self {
        Self { config: self.config.with_classes(num_classes), ..self }
    }

    /// Whether something scores the classes of a classifier: the model's own matrix, or an adapter's.
    pub fn has_score(&self) -> bool {
        self.embedding.has_score()
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The dtype of hidden states and weights.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where the weights lie.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The bytes of all weights, without an adapter.
    pub fn weight_bytes(&self) -> Bytes {
        let layers = self.layers.iter().flat_map(DecoderLayer::tensors);
        let all = layers.chain(self.embedding.tensors()).chain([self.final_norm.tensor()]);
        Bytes(all.map(|tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64).sum())
    }

    /// The model with an adapter in place of the one it had.
    pub fn with_adapter(mut self, adapter: Adapter) -> Self {
        self.set_adapter(adapter);
        self
    }

    /// Puts an adapter in place of what was trained; its matrices move to the model's device, and to f64 in an f64 model. What of a new one
    /// begins as the model has it gets these values.
    pub fn set_adapter(&mut self, adapter: Adapter) {
        if let Trainable::AllWeights(all) = &self.trained {
            all.freeze();
        }
        let is_new = adapter.is_new();
        let (settings, deltas, ends) = adapter.moved_to(self.kind, self.device).into_parts();
        let mut deltas: BTreeMap<_, _> = deltas.into_iter().collect();
        self.linears_mut().for_each(|linear| linear.set_beginning(None));
        for (name, place) in self.layers.iter_mut().flat_map(DecoderLayer::delta_places) {
            *place = deltas.remove(name);
        }
        if is_new && settings.is_pissa {
            self.linears_mut().for_each(Linear::take_largest_part);
        }
        if is_new {
            self.layers.iter().flat_map(DecoderLayer::linears).for_each(Linear::begin_delta);
        }
        self.embedding.train(ends, is_new);
        self.trained = Trainable::Adapter(settings);
    }

    /// The adapter, where one is trained; its matrices are the leaves themselves.
    pub fn adapter(&self) -> Option<Adapter> {
        let Trainable::Adapter(settings) = &self.trained else { return None };
        Some(Adapter::of_deltas(settings.clone(), self.deltas(), self.embedding.alias_trained()))
    }

    fn deltas(&self) -> impl Iterator<Item = (&str, &Delta)> {
        self.layers.iter().flat_map(DecoderLayer::deltas)
    }

    fn all_weights(&self) -> Option<&AllWeights> {
        if let Trainable::AllWeights(all) = &self.trained { Some(all) } else { None }
    }

    /// What is trained, by the names in files: PEFT's of an adapter, or those of all weights. The tensors are the leaves
    /// themselves.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        match &self.trained {
            Trainable::Nothing => Vec::new(),
            Trainable::Adapter(settings) => {
                let of_layers = self.deltas().flat_map(|(name, delta)| adapter::parameters(settings, name, delta));
                of_layers.chain(self.embedding.trained().parameters()).collect()
            }
            Trainable::AllWeights(all) => all.parameters(),
        }
    }

    /// The parameters behind the last layer, in final norm and output projection; with an adapter, what it trains in its place.
    pub fn head_parameters(&self) -> Vec<(String, Tensor)> {
        self.all_weights().map_or_else(|| self.embedding.trained().of_head(), AllWeights::head)
    }

    /// The parameters before the first layer: the embedding `(V, E)`, where it is trained, and of an adapter what it adds. Of a tied
    /// model all of whose weights are trained the embedding is among the [`Self::head_parameters`], too.
    pub fn embedding_parameters(&self) -> Vec<(String, Tensor)> {
        self.all_weights().map_or_else(|| self.embedding.trained().of_embedding(), |all| all.embedding().into_iter().collect())
    }

    /// Of tensors that [`Self::save_trained`] has written, those that are trained, as [`Self::parameters`] has them. Where an adapter has
    /// begun as a part of the weights, it has begun as these say from now on.
    pub fn take_saved(&mut self, saved: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
        let Trainable::Adapter(settings) = &self.trained else { return saved };
        // The embedding that goes with an addition to it is a constant.
        let mut saved: BTreeMap<_, _> =
            saved.into_iter().filter(|(name, _)| *name != base_embedding(settings.is_inner)).collect();
        for linear in self.layers.iter_mut().flat_map(DecoderLayer::linears_mut).filter(|_| settings.is_pissa) {
            let Some(delta) = &linear.delta else { continue };
            let of_delta = adapter::parameters(settings, &linear.name, delta);
            let [(a_name, a_ri), (b_name, b_or), ..] = &of_delta[..] else { continue };
            let Some((saved_a, saved_b)) = saved.get(a_name).zip(saved.get(b_name)) else { continue };
            let (r, inner, out) = (a_ri.size()[0], a_ri.size()[1], b_or.size()[0]);
            // What has another shape is of another adapter, as whoever takes it will see.
            if saved_a.size() != [2 * r, inner] || saved_b.size() != [out, 2 * r] {
                continue;
            }
            let beginning = Beginning::of_saved(saved_a, saved_b);
            let trained = [saved_a.narrow(0, 0, r).contiguous(), saved_b.narrow(1, 0, r).contiguous()];
            saved.extend([a_name.clone(), b_name.clone()].into_iter().zip(trained));
            linear.set_beginning(Some(beginning));
        }
        saved.into_iter().collect()
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.layers.iter_mut().flat_map(DecoderLayer::linears_mut)
    }

    /// Writes what is trained into a directory that exists: an adapter in PEFT's format, which names `base_model`, or all
    /// weights as a model of their own.
    pub fn save_trained(&self, dir: &Path, base_model: &str) -> Result<(), ModelError> {
        match (self.adapter(), self.all_weights()) {
            (Some(adapter), _) => adapter.save_peft(dir, base_model),
            (None, Some(all)) => all.save(dir),
            (None, None) => Err(ModelError::NothingTrained),
        }
    }

    fn begins_in_weights(&self) -> bool {
        matches!(&self.trained, Trainable::Adapter(settings) if settings.is_pissa)
    }

    /// About as much as [`Self::save_trained`] writes.
    pub fn trained_bytes(&self) -> Bytes {
        let bytes = |tensors: Vec<(String, Tensor)>| tensors.iter().map(|(_, t)| t.numel() * t.kind().elt_size_in_bytes()).sum();
        // With an addition to the embedding goes the embedding.
        let adapter = || {
            bytes(self.parameters()) * if self.begins_in_weights() { 2 } else { 1 }
                + self.embedding.alias_trained().base_ve.map_or(0, |t| bytes(vec![(String::new(), t)]))
        };
        Bytes(self.all_weights().map_or_else(adapter, AllWeights::saved_bytes) as u64)
    }

    /// Hidden states of tokens.
    ///
    /// # Shapes
    /// `(B, n)` int64 in, `(B, n, E)` out.
    pub fn embed(&self, ids_bn: &Tensor) -> Tensor {
        self.embedding.embed(ids_bn)
    }

    /// The backward of [`Self::embed`] over pieces of a sequence: ids, and the gradients of their hidden states.
    ///
    /// # Shapes
    /// `(B, n)` int64 and `(B, n, E)` by piece; the gradients of the [`Self::embedding_parameters`] out.
    pub fn embed_backward(&self, pieces: impl Iterator<Item = (Tensor, Tensor)>) -> Vec<Tensor> {
        self.embedding.embed_backward(pieces)
    }

    /// The frequencies of the layers' rotations, as [`ModelConfig::rotations`] names them, for sequences of these lengths in tokens: all
    /// of a sequence's, of whatever part of it is run. They are made once for a batch.
    pub fn frequencies(&self, lengths: &[usize]) -> Vec<Frequencies> {
        self.config.rotations().iter().map(|rope| rope.frequencies(lengths, self.kind, self.device)).collect()
    }

    /// Tokens at their true positions, in sequences of these [`Self::frequencies`].
    ///
    /// # Shapes
    /// `(B, n)`, or `(1, n)` or `(n)` where all sequences share their positions; int64.
    pub fn positions(&self, position_bn: Tensor, frequencies: &[Frequencies]) -> Positions {
        Positions::at(position_bn, frequencies, self.kind)
    }

    /// One decoder layer with its part of the adapter.
    ///
    /// # Shapes
    /// `hidden_bne (B, n, E)` in and out.
    pub fn layer(
        &self,
        idx: LayerIdx,
        hidden_bne: &Tensor,
        positions: &Positions,
        place: &DropoutContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, AttendError> {
        let tokens = TokenContext { position_bn: &positions.position_bn, dropout: place };
        self.layers[idx.0].forward(hidden_bne, &positions.rotations, &tokens, attend)
    }

    pub(super) fn decoder_layer(&self, idx: LayerIdx) -> &DecoderLayer {
        &self.layers[idx.0]
    }

    /// The norm between the last layer and the output projection.
    ///
    /// # Shapes
    /// `(…, E)` in and out.
    pub fn final_norm(&self, hidden: &Tensor) -> Tensor {
        self.final_norm.apply(hidden)
    }

    /// The scores of all tokens of the vocabulary, or of a classifier's classes.
    ///
    /// # Shapes
    /// `(…, E)` in, `(…, V)` or `(…, K)` out.
    pub fn logits(&self, normed: &Tensor) -> Tensor {
        self.embedding.logits(normed)
    }
}

/// The dtype by libtorch's name.
pub fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F64 => Kind::Double,
    }
}
