//! A norm of the model, as its family multiplies by its weight.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::weights::Weights;
use crate::ops::rms_norm::{rms_norm, rms_norm_about_one};

#[derive(Debug)]
pub(super) struct RmsNorm {
    weight_e: Tensor,
    adds_one: bool,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, name: &str) -> Result<Self, ModelError> {
        Ok(Self { weight_e: weights.load(name)?, adds_one: config.norms_add_one, eps: config.rms_norm_eps })
    }

    /// # Shapes
    /// `(…, E)` in and out.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let norm = if self.adds_one { rms_norm_about_one } else { rms_norm };
        norm(x, &self.weight_e, self.eps)
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.weight_e
    }
}
