//! Vectors of a model, of which an adapter may train copies; the norms, which multiply by some of them; and constant factors.

use tch::{Tensor, no_grad};

use super::config::ModelConfig;
use super::weights::Weights;
use crate::ops::rms_norm::{rms_norm, rms_norm_about_one};
use crate::units::Fault;

/// The weight of a norm, the bias of a linear, or attention sinks, which are a learned logit of each query head in its softmax, to which no value
/// belongs (gpt-oss, arXiv 2508.10925).
#[derive(Debug)]
pub(super) struct CopyableVector {
    /// The name in the model, as `model.layers.3.self_attn.sinks`.
    pub(super) name: String,
    /// The model's own, whatever is trained.
    pub(super) own: Tensor,
    /// What an adapter trains in its place.
    pub(super) trained: Option<Tensor>,
}

impl CopyableVector {
    pub(super) fn load(name: String, load: impl Fn(&str) -> Result<Tensor, Fault>) -> Result<Self, Fault> {
        Ok(Self { own: load(&name)?, name, trained: None })
    }

    /// The numbers that the model computes with.
    pub(super) fn current(&self) -> Tensor {
        self.trained.as_ref().map_or_else(|| self.own.shallow_clone(), |trained| trained.to_kind(self.own.kind()))
    }

    /// Gives what is trained in its place its values.
    pub(super) fn init_trained(&self) {
        if let Some(trained) = &self.trained {
            no_grad(|| trained.shallow_clone().copy_(&self.own));
        }
    }
}

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

    /// `(…, E)` in and out.
    pub(super) fn apply(&self, x: &Tensor) -> Tensor {
        let norm = if self.adds_one { rms_norm_about_one } else { rms_norm };
        norm(x, &self.weight_e.current(), self.eps)
    }

    pub(super) fn tensor(&self) -> &Tensor {
        &self.weight_e.own
    }
}
