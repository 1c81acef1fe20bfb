//! A vector of the model of which an adapter may train a copy: the weight of a norm, the bias of a linear, or attention sinks, which are a learned
//! logit of each query head in its softmax, to which no value belongs (gpt-oss, arXiv 2508.10925).

use tch::{Tensor, no_grad};

use crate::units::Fault;

#[derive(Debug)]
pub(super) struct CopyableVector {
    /// The name in the model, as `model.layers.3.self_attn.sinks`.
    pub(super) name: String,
    own: Tensor,
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

    /// The model's own, whatever is trained.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.own
    }
}
