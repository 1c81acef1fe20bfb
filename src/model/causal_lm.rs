//! The whole model: embedding, decoder layers, final norm, output projection, and the adapter that is trained.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::attend::{Attend, AttendError};
use super::config::ModelConfig;
use super::decoder::DecoderLayer;
use super::embedding::Embedding;
use super::families::FINAL_NORM;
use super::init::draw;
use super::lora::{Adapter, LayerLora, Place};
use super::weights::Weights;
use super::{ModelError, layout};
use crate::ops::rms_norm::rms_norm;
use crate::ops::rope::Rotation;
use crate::recipe::Dtype;
use crate::units::{Bytes, LayerIdx};

/// A decoder-only language model with frozen weights; knows no cache and no tokenizer.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    final_norm_e: Tensor,
    adapter: Option<Adapter>,
    kind: Kind,
    device: Device,
}

impl Model {
    /// Looks at a model directory without reading its weights: the configuration, and names, shapes and dtypes of all tensors.
    pub fn check(dir: &Path) -> Result<ModelConfig, ModelError> {
        Ok(Self::open(dir, Kind::Float, Device::Cpu)?.0)
    }

    fn open(dir: &Path, kind: Kind, device: Device) -> Result<(ModelConfig, Weights), ModelError> {
        let config = ModelConfig::load(dir)?;
        let weights = Weights::open(dir, kind, device)?;
        weights.check(&layout::entries(&config), config.tie_word_embeddings)?;
        Ok((config, weights))
    }

    /// Reads a model from a directory in Hugging Face's layout, converting its weights to `dtype`.
    pub fn load(dir: &Path, dtype: Dtype, device: Device) -> Result<Self, ModelError> {
        let kind = kind_of(dtype);
        let (config, weights) = Self::open(dir, kind, device)?;
        Self::assemble(config, &weights, kind, device)
    }

    /// A model with newly drawn weights that never were on a disk.
    pub fn random(config: ModelConfig, dtype: Dtype, device: Device, seed: u64) -> Result<Self, ModelError> {
        let kind = kind_of(dtype);
        let weights = Weights::in_memory(draw(&config, Kind::Float, seed), kind, device);
        Self::assemble(config, &weights, kind, device)
    }

    fn assemble(config: ModelConfig, weights: &Weights, kind: Kind, device: Device) -> Result<Self, ModelError> {
        let layer = |idx| DecoderLayer::load(weights, &config, LayerIdx(idx));
        let layers = (0..config.num_layers).map(layer).collect::<Result<_, _>>()?;
        let embedding = Embedding::load(weights, &config)?;
        let final_norm_e = weights.load(FINAL_NORM)?;
        Ok(Self { config, embedding, layers, final_norm_e, adapter: None, kind, device })
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

    /// The bytes of all frozen weights.
    pub fn weight_bytes(&self) -> Bytes {
        let layers = self.layers.iter().flat_map(DecoderLayer::tensors);
        let numbers: usize = layers.chain(self.embedding.tensors()).chain([&self.final_norm_e]).map(Tensor::numel).sum();
        Bytes((numbers * self.kind.elt_size_in_bytes()) as u64)
    }

    /// The model with an adapter in place of the one it had.
    pub fn with_adapter(mut self, adapter: Adapter) -> Self {
        self.set_adapter(adapter);
        self
    }

    /// Puts an adapter in place of the one it had; its matrices move to the model's device, and to f64 in an f64 model.
    pub fn set_adapter(&mut self, adapter: Adapter) {
        self.adapter = Some(adapter.moved_to(self.kind, self.device));
    }

    /// The adapter that is trained.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The adapter, to be changed.
    pub fn adapter_mut(&mut self) -> Option<&mut Adapter> {
        self.adapter.as_mut()
    }

    /// Hidden states of tokens.
    ///
    /// # Shapes
    /// `(B, n)` int64 in, `(B, n, E)` out.
    pub fn embed(&self, ids_bn: &Tensor) -> Tensor {
        self.embedding.embed(ids_bn)
    }

    /// One decoder layer with its part of the adapter.
    ///
    /// # Shapes
    /// `hidden_bne (B, n, E)` in and out; `position_bn` is `(B, n)`, or `(1, n)` or `(n)` where all rows share
    /// their positions; int64, the tokens' true positions.
    pub fn layer(
        &self,
        idx: LayerIdx,
        hidden_bne: &Tensor,
        position_bn: &Tensor,
        place: &Place<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, AttendError> {
        let rotation = Rotation::at(position_bn, self.config.head_dim, self.config.rope_theta, self.kind);
        let lora = self.adapter.as_ref().map(|adapter| LayerLora { adapter, layer: idx, position_bn, place });
        self.layers[idx.0].forward(hidden_bne, &rotation, lora.as_ref(), attend)
    }

    /// The norm between the last layer and the output projection.
    ///
    /// # Shapes
    /// `(…, E)` in and out.
    pub fn final_norm(&self, hidden: &Tensor) -> Tensor {
        rms_norm(hidden, &self.final_norm_e, self.config.rms_norm_eps)
    }

    /// The scores of all tokens of the vocabulary.
    ///
    /// # Shapes
    /// `(…, E)` in, `(…, V)` out.
    pub fn logits(&self, normed: &Tensor) -> Tensor {
        self.embedding.logits(normed)
    }
}

fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F64 => Kind::Double,
    }
}
