//! A norm of the model, as its family multiplies by its weight.

use tch::Tensor;

use super::config::ModelConfig;
use super::copyable::CopyableVector;
use super::weights::Weights;
use crate::ops::rms_norm::{rms_norm, rms_norm_about_one};
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct RmsNorm {
    pub(super) weight_e: CopyableVector,
    adds_one: bool,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, name: &str) -> Result<Self, Fault> {
        let weight_e = CopyableVector::load(name.to_owned(), |name| weights.load(name))?;
        Ok(Self { weight_e, adds_one: config.norms_add_one, eps: config.rms_norm_eps })
    }

    /// # Shapes
    /// `(…, E)` in and out.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let norm = if self.adds_one { rms_norm_about_one } else { rms_norm };
        norm(x, &self.weight_e.current(), self.eps)
    }

    pub(super) fn tensor(&self) -> &Tensor {
        self.weight_e.tensor()
    }
}
