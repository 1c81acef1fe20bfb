//! What goes into a step beside the batch, and what comes out.

use std::collections::BTreeMap;

use tch::Tensor;

use crate::cache::ReplayLog;
use crate::head::SequenceLoss;
use crate::recipe::LossMean;
use crate::units::StepKey;

#[derive(Clone, Copy, Debug)]
pub struct MicroBatchContext {
    /// The gradient is that of `Σ losses · weight`: one over the targets of the global batch, or over its sequences.
    pub weight: f64,
    /// Whether `Σ losses` is over targets, or over the means of sequences.
    pub loss_mean: LossMean,
    /// The factor of the routers' load-balance loss of this micro-batch, which is added; 0 adds nothing.
    pub router_weight: f64,
    /// Seed and step of the dropout masks; `None` outside training.
    pub dropout: Option<StepKey>,
    /// What the sizes of chunks are drawn from where the recipe randomises them; `None` outside training.
    pub chunk_sizes: Option<StepKey>,
}

#[derive(Debug)]
pub struct MicroBatchGradients {
    pub losses: Vec<SequenceLoss>,
    /// The routers' load-balance loss, where it has a weight and the model has experts.
    pub router_loss: Option<f64>,
    /// Gradients by the names of the model's parameters, in their dtype, or in f32 for bf16; zero where one had no influence. On the
    /// host where the weights wait there.
    pub gradients: BTreeMap<String, Tensor>,
    pub log: ReplayLog,
}
