//! A norm of the model, as its family multiplies by its weight; and constant factors.

use tch::Tensor;

use super::config::ModelConfig;
use super::copyable::CopyableVector;
use super::weights::Weights;
use crate::ops::rms_norm::{rms_norm, rms_norm_about_one};
use crate::units::Fault;

/// `x · factor`; where nothing sets one, x itself.
pub(super) fn scaled(x: Tensor, factor: f64) -> Tensor {
    #[expect(clippy::float_cmp, reason = "1 is what it is where nothing sets it")]
    let is_plain = factor == 1.0;
    if is_plain { x } else { x * factor }
}

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
