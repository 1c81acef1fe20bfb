//! What is trained of a model, in numbers.

use super::projection::Projection;
use super::{IoParameters, ModelConfig, io_parameters, trained_by_kind};
use crate::recipe::LoraRecipe;
use crate::units::Fault;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrainedPart {
    Adapter {
        /// The most rows of its A matrices.
        r: usize,
        /// The projections that have matrices in some layer.
        targets: Vec<Projection>,
        numbers: usize,
        /// The part of `numbers` outside the layers.
        ends: IoParameters,
        has_dropout: bool,
        /// Whether the lengths of rows are trained by themselves.
        has_magnitudes: bool,
    },
    Weights,
}

impl TrainedPart {
    pub fn of(config: &ModelConfig, lora: Option<&LoraRecipe>) -> Result<Self, Fault> {
        let Some(lora) = lora else { return Ok(Self::Weights) };
        let ((targets, r), ends) = (Projection::targets(config, lora)?, io_parameters(config, lora)?);
        let numbers = trained_by_kind(config, Some(lora))?.into_iter().map(|(_, numbers)| numbers).sum();
        Ok(Self::Adapter { r, targets, numbers, ends, has_dropout: lora.dropout > 0.0, has_magnitudes: lora.use_dora })
    }
}
