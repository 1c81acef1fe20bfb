//! What of a model is trained, and how many parameters that is, by kind.

use super::config::ModelConfig;
use super::io_layers::copies;
use super::layout::{self, Role};
use super::linear::{A, B, B_BIAS, BASE_BIAS, MAGNITUDE};
use super::names::{EMBEDDING, EMBEDDING_MODULE, FINAL_NORM, OUTPUT, OUTPUT_MODULE, SCORE, layer_of};
use super::projection::Projection;
use super::spec::SINKS;
use super::targets::{peft_settings, targets};
use crate::recipe::LoraRecipe;
use crate::units::Fault;

/// What is trained of a model, in words, and how many parameters that is: all weights, or what a recipe of an adapter says.
pub fn trained_by_kind(config: &ModelConfig, lora: Option<&LoraRecipe>) -> Result<Vec<(&'static str, usize)>, Fault> {
    let mut kinds: Vec<(&'static str, usize)> = Vec::new();
    let mut add = |kind: &'static str, count: usize| match kinds.iter_mut().find(|(other, _)| *other == kind) {
        Some((_, total)) => *total += count,
        None => kinds.push((kind, count)),
    };
    let Some(lora) = lora else {
        for entry in layout::entries(config) {
            let kind = match (entry.name.as_str(), entry.role) {
                (EMBEDDING, _) => "embedding",
                (OUTPUT, _) => "output projection",
                (SCORE, _) => "scores of classes",
                (_, Role::Norm | Role::NormAboutOne) => "norms",
                (_, Role::Bias) => "biases",
                (_, Role::Constant) => continue,
                (_, Role::Matrix) if entry.name.ends_with(SINKS) => "attention sinks",
                (_, Role::Matrix | Role::WideMatrix) => "linears",
            };
            add(kind, entry.shape.iter().product());
        }
        return Ok(kinds);
    };
    let settings = peft_settings(config, lora)?;
    for target in targets(config, &settings)? {
        for (part, shape) in target.parts(&settings) {
            let kind = match part {
                A | B if target.is_embedding() => "LoRA of the embedding",
                A | B => "LoRA",
                B_BIAS => "biases of LoRA",
                MAGNITUDE => "DoRA's lengths",
                BASE_BIAS => "biases",
                _ => "others",
            };
            add(kind, shape.iter().product());
        }
    }
    for (name, shape) in copies(config, &settings)? {
        let kind = match (&*name, name.rsplit('.').next()) {
            (EMBEDDING, _) => "copy of embed_tokens",
            (OUTPUT, _) => "copy of lm_head",
            (SCORE, _) => "scores of classes",
            (_, Some("bias")) => "biases",
            (_, Some("weight")) => "copies of norms",
            _ => "attention sinks",
        };
        add(kind, shape.iter().product());
    }
    Ok(kinds)
}

/// The size of each tensor that is trained where all weights are, bottom to top.
pub fn sizes_of_weights(config: &ModelConfig) -> Vec<usize> {
    let trained = layout::entries(config).into_iter().filter(|entry| entry.role != Role::Constant);
    trained.map(|entry| entry.shape.iter().product()).collect()
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainedPart {
    /// Whether it is all weights; otherwise an adapter.
    pub is_weights: bool,
    /// The most rows of an adapter's A matrices, but for the embedding's.
    pub r: usize,
    /// The projections that have matrices of an adapter in some layer.
    pub targets: Vec<Projection>,
    /// The lowest layer that the gradient of something trained passes; the number of layers where only what is behind them is trained.
    pub first_layer: usize,
    pub numbers: usize,
    /// The part of `numbers` before the first layer: of the embedding, or of what is added to it.
    pub embedding_numbers: usize,
    /// The part behind the last layer, with the final norm: of the output projection (the embedding once more, where they are tied), or of what
    /// scores classes.
    pub output_numbers: usize,
    pub has_dropout: bool,
    /// Whether the lengths of rows are trained by themselves.
    pub has_magnitudes: bool,
}

impl TrainedPart {
    pub fn of(config: &ModelConfig, lora: Option<&LoraRecipe>) -> Result<Self, Fault> {
        let Some(lora) = lora else {
            let [embedding_numbers, output_numbers] =
                [config.vocab_size, config.num_scores() + 1].map(|n| n * config.hidden_size);
            let numbers = config.num_parameters();
            return Ok(Self { is_weights: true, numbers, embedding_numbers, output_numbers, ..Self::default() });
        };
        let settings = peft_settings(config, lora)?;
        let (targets, copies) = (targets(config, &settings)?, copies(config, &settings)?);
        let numbers_of = |names: &[&str]| {
            let meant = copies.iter().filter(|(name, _)| names.contains(&&**name));
            meant.map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
        };
        let numbers_beside = |end: &str| {
            let parts = targets.iter().filter(|target| target.linear.name == end).flat_map(|target| target.parts(&settings));
            parts.map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
        };
        let embedding_numbers = numbers_of(&[EMBEDDING]) + numbers_beside(EMBEDDING_MODULE);
        let linears = targets.iter().map(|target| &target.linear.name);
        let layers = linears.chain(copies.iter().map(|(name, _)| name)).filter_map(|name| layer_of(name));
        let first_layer = if embedding_numbers > 0 { 0 } else { layers.min().unwrap_or(config.num_layers()) };
        Ok(Self {
            is_weights: false,
            r: targets.iter().filter(|target| !target.is_embedding()).map(|target| target.r).max().unwrap_or(lora.r),
            targets: Projection::among(&targets),
            numbers: trained_by_kind(config, Some(lora))?.into_iter().map(|(_, numbers)| numbers).sum(),
            first_layer,
            embedding_numbers,
            output_numbers: numbers_of(&[OUTPUT, SCORE, FINAL_NORM]) + numbers_beside(OUTPUT_MODULE),
            has_dropout: lora.dropout > 0.0,
            has_magnitudes: lora.use_dora,
        })
    }
}
