//! The two ends of a model, tokens to hidden states and hidden states to logits: one matrix where they are tied.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::names::{EMBEDDING, OUTPUT};
use super::weights::Weights;
use crate::ops::linear::linear;
use crate::ops::soft_cap::soft_cap;

#[derive(Debug)]
pub(super) struct Embedding {
    input_ve: Tensor,
    /// `None` where the embedding serves as output projection too.
    output_ve: Option<Tensor>,
    /// On what a token is turned into.
    scale: f64,
    /// Of the logits.
    divisor: f64,
    /// What no logit exceeds.
    soft_cap: Option<f64>,
}

/// `x · factor`; where nothing sets one, x itself.
fn scaled(x: Tensor, factor: f64) -> Tensor {
    #[expect(clippy::float_cmp, reason = "1 is what it is where nothing sets it")]
    let is_plain = factor == 1.0;
    if is_plain { x } else { x * factor }
}

impl Embedding {
    pub(super) fn load(weights: &Weights, config: &ModelConfig) -> Result<Self, ModelError> {
        // A tied model's file may hold an output projection; it is not looked at, as the embedding takes its place.
        let output_ve = if config.tie_word_embeddings { None } else { Some(weights.load(OUTPUT)?) };
        let (input_ve, divisor) = (weights.load(EMBEDDING)?, config.logits_divisor);
        // As the published models were run: a factor in the dtype of what it multiplies.
        let scale = Tensor::from(config.embedding_scale).to_kind(input_ve.kind()).double_value(&[]);
        Ok(Self { input_ve, output_ve, scale, divisor, soft_cap: config.logit_soft_cap })
    }

    /// # Shapes
    /// `(B, n)` int64 in, `(B, n, E)` out.
    pub(super) fn embed(&self, ids_bn: &Tensor) -> Tensor {
        scaled(Tensor::embedding(&self.input_ve, ids_bn, -1, false, false), self.scale)
    }

    /// The backward of [`Self::embed`] over pieces of a sequence: ids, and the gradients of what they were turned into.
    ///
    /// # Shapes
    /// `(B, n)` int64 and `(B, n, E)` by piece, `(V, E)` out.
    pub(super) fn embed_backward(&self, pieces: impl Iterator<Item = (Tensor, Tensor)>) -> Tensor {
        let mut gradient_ve = self.input_ve.detach().zeros_like();
        for (ids_bn, gradient_bne) in pieces {
            let gradient_ne = scaled(gradient_bne.flatten(0, 1), self.scale);
            let _ = gradient_ve.index_add_(0, &ids_bn.flatten(0, 1), &gradient_ne);
        }
        gradient_ve
    }

    /// # Shapes
    /// `(…, E)` in, `(…, V)` out.
    pub(super) fn logits(&self, normed: &Tensor) -> Tensor {
        // Dividing what goes in is the same, and takes E numbers of a token where V would come out.
        let normed = scaled(normed.shallow_clone(), 1.0 / self.divisor);
        let logits = linear(&normed, self.output_ve.as_ref().unwrap_or(&self.input_ve), None, None);
        self.soft_cap.map_or_else(|| logits.shallow_clone(), |cap| soft_cap(&logits, cap))
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.input_ve).chain(&self.output_ve)
    }
}
