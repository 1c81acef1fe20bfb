//! The two ends of a model, tokens to hidden states and hidden states to logits: one matrix where they are tied.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::families::{EMBEDDING, OUTPUT};
use super::weights::Weights;

#[derive(Debug)]
pub(super) struct Embedding {
    input_ve: Tensor,
    /// `None` where the embedding serves as output projection too.
    output_ve: Option<Tensor>,
}

impl Embedding {
    pub(super) fn load(weights: &Weights, config: &ModelConfig) -> Result<Self, ModelError> {
        // A tied model's file may hold an output projection; it is not looked at, as the embedding takes its place.
        let output_ve = if config.tie_word_embeddings { None } else { Some(weights.load(OUTPUT)?) };
        Ok(Self { input_ve: weights.load(EMBEDDING)?, output_ve })
    }

    /// # Shapes
    /// `(B, n)` int64 in, `(B, n, E)` out.
    pub(super) fn embed(&self, ids_bn: &Tensor) -> Tensor {
        Tensor::embedding(&self.input_ve, ids_bn, -1, false, false)
    }

    /// # Shapes
    /// `(…, E)` in, `(…, V)` out.
    pub(super) fn logits(&self, normed: &Tensor) -> Tensor {
        normed.linear(self.output_ve.as_ref().unwrap_or(&self.input_ve), None::<&Tensor>)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.input_ve).chain(&self.output_ve)
    }
}
