//! Calibration: the model reads texts with a cache that keeps everything, and the gradient of its loss says which entries it needed later.
//! From that come gates for the policy `learned`, and a share of the slots for each layer.

use super::build;
use super::teacher::full_cache;
use crate::data::{Dataset, Tokenizer};
use crate::engine::{Calibration, MicroBatchContext, Silent};
use crate::model::{Gates, Model};
use crate::recipe::{AttentionOutputs, GradRecipe, Recipe};
use crate::report::console;
use crate::units::Fault;

/// What a model was found to need.
#[derive(Debug)]
pub struct Calibrated {
    pub gates: Gates,
    /// The part of the variance of importances that the gates explain, in the mean over layers.
    pub explained: f64,
    /// Slots of each layer, bottom to top, for each mean that was asked for.
    pub cache_lengths: Vec<Vec<usize>>,
}

/// Slots are shared out by so many.
const STEP: usize = 32;

/// Learns from all samples of a data set, and shares the slots of all layers out, so many for each in the mean.
pub fn calibrate(
    recipe: &Recipe,
    model: &Model,
    tokenizer: Option<&Tokenizer>,
    dataset: &Dataset,
    means: &[usize],
) -> Result<Calibrated, Fault> {
    let grad = GradRecipe { chunks_per_cell: Some(1), attention_outputs: AttentionOutputs::Keep, ..recipe.grad.closed() };
    let recipe = Recipe { kv_cache: full_cache(recipe), grad, distill: None, ..recipe.clone() };
    let engine = build::engine(&recipe, model.config(), tokenizer, None)?;
    let mut calibration = Calibration::new(model.config());
    let context = MicroBatchContext { weight: 1.0, router_weight: 0.0, dropout: None, chunk_sizes: None };
    for sample in 0..dataset.len() {
        console::note(&format!("sample {} of {}", sample + 1, dataset.len()));
        engine.calibrate(model, &dataset.batch(&[sample])?, context, &mut calibration, &mut Silent)?;
    }
    let fits = calibration.gates();
    let fitted: Vec<f64> = fits.iter().flatten().map(|fit| fit.explained).collect();
    let cache_lengths: Option<Vec<_>> = means.iter().map(|&mean| calibration.slots(mean, STEP)).collect();
    let Some(cache_lengths) = cache_lengths.filter(|_| !fitted.is_empty()) else {
        let message = "no sample is long enough to tell which entries are needed later";
        return Err(Fault::data(message, "calibrate on samples of a thousand tokens and more"));
    };
    let explained = fitted.iter().sum::<f64>() / fitted.len() as f64;
    let gates = Gates::linear(model.config(), fits.into_iter().map(|fit| fit.map(|fit| fit.output)));
    Ok(Calibrated { gates, explained, cache_lengths })
}
