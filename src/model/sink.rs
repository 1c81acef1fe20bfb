//! Attention sinks: a learned logit of each query head in its softmax, to which no value belongs (gpt-oss, arXiv 2508.10925).

use tch::{Tensor, no_grad};

use super::weights::Weights;
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct SinkLogits {
    /// The name in the model, as `model.layers.3.self_attn.sinks`.
    pub(super) name: String,
    logit_h: Tensor,
    /// What an adapter trains in their place.
    pub(super) trained_h: Option<Tensor>,
}

impl SinkLogits {
    pub(super) fn load(weights: &Weights, name: String) -> Result<Self, Fault> {
        Ok(Self { logit_h: weights.load(&name)?, name, trained_h: None })
    }

    /// The logits that attention computes with.
    pub(super) fn current(&self) -> Tensor {
        self.trained_h.as_ref().map_or_else(|| self.logit_h.shallow_clone(), |trained_h| trained_h.to_kind(self.logit_h.kind()))
    }

    /// Gives what is trained in their place their values.
    pub(super) fn init_trained(&self) {
        if let Some(trained_h) = &self.trained_h {
            no_grad(|| trained_h.shallow_clone().copy_(&self.logit_h));
        }
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.logit_h
    }
}
