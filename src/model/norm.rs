//! A norm of the model, as its family multiplies by its weight.

use tch::{Tensor, no_grad};

use super::config::ModelConfig;
use super::weights::Weights;
use crate::ops::rms_norm::{rms_norm, rms_norm_about_one};
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct RmsNorm {
    /// The name in the model, as `model.layers.3.input_layernorm.weight`.
    pub(super) name: String,
    weight_e: Tensor,
    /// What an adapter trains in its place.
    pub(super) trained_e: Option<Tensor>,
    adds_one: bool,
    eps: f64,
}

impl RmsNorm {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, name: &str) -> Result<Self, Fault> {
        let weight_e = weights.load(name)?;
        Ok(Self { name: name.to_owned(), weight_e, trained_e: None, adds_one: config.norms_add_one, eps: config.rms_norm_eps })
    }

    /// # Shapes
    /// `(…, E)` in and out.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let norm = if self.adds_one { rms_norm_about_one } else { rms_norm };
        let trained_e = self.trained_e.as_ref().map(|trained_e| trained_e.to_kind(self.weight_e.kind()));
        norm(x, trained_e.as_ref().unwrap_or(&self.weight_e), self.eps)
    }

    /// Gives what is trained in place of the weight its values.
    pub(super) fn init_trained(&self) {
        if let Some(trained_e) = &self.trained_e {
            no_grad(|| trained_e.shallow_clone().copy_(&self.weight_e));
        }
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.weight_e
    }
}
