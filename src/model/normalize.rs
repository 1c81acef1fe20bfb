//! An adapter in another form: beside the weights as they were, or with one rank and one factor for all linears.

use tch::{Tensor, no_grad};

use super::adapter::Adapter;
use super::delta::LoraDelta;
use super::io_layers::is_nameless;
use super::names::OUTPUT_MODULE;
use super::peft::{ModulePatterns, PeftConfig};
use super::targets::{is_of_experts, is_router, targets_embedding};
use crate::recipe::{InitLora, TrainedBias};

/// What an adapter has beside A and B of linears that stand alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFeature {
    /// The lengths of rows are trained.
    Magnitudes,
    BiasOfB,
    /// The biases of the targets are trained.
    BaseBiases,
    Experts,
    Routers,
    /// The embedding has matrices of low rank.
    Embedding,
    Output,
    /// Whole copies of modules are trained.
    SavedModules,
    /// Classes are scored by a matrix of its own.
    Classes,
}

impl Adapter {
    /// All that it has of these, each once.
    pub fn features(&self) -> Vec<AdapterFeature> {
        let settings = &self.settings;
        let of_linears = |is: fn(&str) -> bool| self.deltas.iter().any(|(linear, _)| is(linear));
        [
            (AdapterFeature::Magnitudes, settings.use_dora),
            (AdapterFeature::BiasOfB, settings.lora_bias),
            (AdapterFeature::BaseBiases, settings.bias != TrainedBias::None),
            (AdapterFeature::Experts, of_linears(is_of_experts)),
            (AdapterFeature::Routers, of_linears(is_router)),
            (AdapterFeature::Embedding, targets_embedding(settings)),
            (AdapterFeature::Output, of_linears(|linear| linear == OUTPUT_MODULE)),
            (AdapterFeature::SavedModules, !settings.modules_to_save.is_empty()),
            (AdapterFeature::Classes, settings.is_classifier),
        ]
        .into_iter()
        .filter_map(|(feature, has)| has.then_some(feature))
        .collect()
    }

    /// Whether something is trained that PEFT's files have no names for.
    pub fn has_extra_tensors(&self) -> bool {
        self.embedding.copies.keys().any(|tensor| is_nameless(tensor))
    }

    pub fn largest_rank(&self) -> usize {
        self.deltas.iter().map(|(_, lora)| lora.a_ri.size()[0] as usize).max().unwrap_or_else(|| self.r())
    }

    /// LoRA beside the weights as they were before `PiSSA` took a part of them: `B A − B₀ A₀`, of twice the rank at the same scale.
    pub(super) fn without_pissa(&self) -> Self {
        let joined = |delta: &LoraDelta| {
            let mut joined = delta.map(Tensor::shallow_clone);
            if let Some(began) = joined.pissa.take() {
                let device = joined.a_ri.device();
                joined.a_ri = Tensor::cat(&[&joined.a_ri, &began.a_ri.to_device(device)], 0);
                joined.b_or = Tensor::cat(&[&joined.b_or, &-began.b_or.to_device(device)], 1);
            }
            joined
        };
        let deltas = no_grad(|| self.deltas.iter().map(|(linear, delta)| (linear.clone(), joined(delta))).collect());
        let settings = &self.settings;
        let factor = if settings.use_rslora { 2f64.sqrt() } else { 2.0 };
        let settings = PeftConfig {
            r: 2 * settings.r,
            lora_alpha: factor * settings.lora_alpha,
            rank_pattern: settings.rank_pattern.map(|r| 2 * r),
            alpha_pattern: settings.alpha_pattern.map(|alpha| factor * alpha),
            init: InitLora::Uniform,
            ..settings.clone()
        };
        Self { settings, deltas, embedding: self.embedding.map(Tensor::shallow_clone), is_new: false }
    }

    /// An adapter of equal function with the rank `r` everywhere, at least [`Self::largest_rank`], and the factor 1: every linear's own factor is
    /// multiplied into B, and what its rank lacks is zero. It is for adapters without [`Self::features`].
    pub fn normalized(self, r: usize) -> Self {
        let normalized = |lora: LoraDelta| {
            let lacking = r as i64 - lora.a_ri.size()[0];
            let a_ri = lora.a_ri.constant_pad_nd([0, 0, 0, lacking]);
            let b_or = (&lora.b_or * lora.scale).constant_pad_nd([0, lacking]);
            LoraDelta { a_ri, b_or, scale: 1.0, ..lora }
        };
        let settings = PeftConfig {
            r,
            lora_alpha: r as f64,
            rank_pattern: ModulePatterns::default(),
            alpha_pattern: ModulePatterns::default(),
            use_rslora: false,
            ..self.settings
        };
        let deltas = no_grad(|| self.deltas.into_iter().map(|(linear, delta)| (linear, normalized(delta))).collect());
        Self { settings, deltas, ..self }
    }
}
