//! What of a model is trained, and how many parameters that is, by kind.

use super::config::ModelConfig;
use super::delta::{A, B, B_BIAS, BASE_BIAS, MAGNITUDE};
use super::io_layers::{IoTensor, copied, io_tensors};
use super::layout::{self, Role};
use super::names::{EMBEDDING, FINAL_NORM, OUTPUT, OUTPUT_MODULE, SCORE, layer_of};
use super::peft::PeftConfig;
use super::projection::Projection;
use super::spec::SINKS;
use super::targets::{LoraTarget, peft_settings, targets};
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
                A | B => "LoRA",
                B_BIAS => "biases of LoRA",
                MAGNITUDE => "DoRA's lengths",
                BASE_BIAS => "biases",
                _ => "others",
            };
            add(kind, shape.iter().product());
        }
    }
    for (part, [rows, columns]) in io_tensors(config, &settings) {
        let kind = match part {
            IoTensor::Embedding => "copy of embed_tokens",
            IoTensor::LowRankA | IoTensor::LowRankB => "LoRA of the embedding",
            IoTensor::Output => "copy of lm_head",
            IoTensor::Score => "scores of classes",
        };
        add(kind, rows * columns);
    }
    for (name, width) in copied(config, &settings)? {
        let kind = match name.rsplit('.').next() {
            Some("bias") => "biases",
            Some("weight") => "copies of norms",
            _ => "attention sinks",
        };
        add(kind, width);
    }
    Ok(kinds)
}

/// The size of each tensor that is trained where all weights are, bottom to top.
pub fn sizes_of_weights(config: &ModelConfig) -> Vec<usize> {
    let trained = layout::entries(config).into_iter().filter(|entry| entry.role != Role::Constant);
    trained.map(|entry| entry.shape.iter().product()).collect()
}

/// How many parameters an adapter trains before the first layer.
fn embedding_numbers(config: &ModelConfig, settings: &PeftConfig) -> usize {
    let below = io_tensors(config, settings).into_iter().filter(|(part, _)| part.is_below_the_layers());
    below.map(|(_, [rows, columns])| rows * columns).sum()
}

/// How many it trains behind the last layer.
fn output_numbers(config: &ModelConfig, settings: &PeftConfig, targets: &[LoraTarget]) -> Result<usize, Fault> {
    let has_final_norm = copied(config, settings)?.iter().any(|(name, _)| name == FINAL_NORM);
    let of_norm = if has_final_norm { config.hidden_size } else { 0 };
    let beside_output = targets.iter().filter(|target| target.linear.name == OUTPUT_MODULE);
    let addition = beside_output.flat_map(|target| target.parts(settings)).map(|(_, shape)| shape.iter().product::<usize>());
    let above = io_tensors(config, settings).into_iter().filter(|(part, _)| !part.is_below_the_layers());
    Ok(of_norm + addition.sum::<usize>() + above.map(|(_, [rows, columns])| rows * columns).sum::<usize>())
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainedPart {
    /// Whether it is all weights; otherwise an adapter.
    pub is_weights: bool,
    /// The most rows of an adapter's A matrices.
    pub r: usize,
    /// The projections that have matrices of an adapter in some layer.
    pub targets: Vec<Projection>,
    /// The lowest layer that the gradient of something trained passes; the number of layers where only what is behind them is trained.
    first_layer: usize,
    pub numbers: usize,
    /// The part of `numbers` before the first layer: of the embedding, or of what is added to it.
    pub embedding_numbers: usize,
    /// The part behind the last, the same as that before the first where they are tied: of the output projection, or of what scores classes.
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
        let (targets, copied) = (targets(config, &settings)?, copied(config, &settings)?);
        let embedding_numbers = embedding_numbers(config, &settings);
        let linears = targets.iter().map(|target| &target.linear.name);
        let layers = linears.chain(copied.iter().map(|(name, _)| name)).filter_map(|name| layer_of(name));
        let first_layer = if embedding_numbers > 0 { 0 } else { layers.min().unwrap_or(config.num_layers()) };
        Ok(Self {
            is_weights: false,
            r: targets.iter().map(|target| target.r).max().unwrap_or(lora.r),
            targets: Projection::among(&targets),
            numbers: trained_by_kind(config, Some(lora))?.into_iter().map(|(_, numbers)| numbers).sum(),
            first_layer,
            embedding_numbers,
            output_numbers: output_numbers(config, &settings, &targets)?,
            has_dropout: lora.dropout > 0.0,
            has_magnitudes: lora.use_dora,
        })
    }

    /// The lowest layer that a gradient passes, as [`Model::first_trained_layer`](super::Model::first_trained_layer).
    pub fn first_layer(&self) -> usize {
        self.first_layer
    }
}
