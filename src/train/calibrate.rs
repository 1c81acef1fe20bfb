//! Calibration: the model reads samples with a cache that keeps everything, and the gradient of its loss says which entries it needed later.
//! From that come gates for the policy `learned`, and a share of the slots for each layer.

use super::build;
use super::teacher::full_cache;
use crate::cache;
use crate::data::{Dataset, Tokenizer};
use crate::engine::{Calibration, MicroBatchContext, NoObserver, guarded};
use crate::model::{Gates, Model};
use crate::recipe::{AttentionOutputs, GradRecipe, LossMean, PolicyRecipe, Recipe};
use crate::report::console;
use crate::units::{Exit, Fault};

#[derive(Debug)]
pub struct Calibrated {
    pub gates: Gates,
    /// The part of the variance of the logarithm of importances that the gates explain, on average over layers.
    pub explained: f64,
    /// Slots of each layer, bottom to top, for each mean that was asked for.
    pub cache_lengths: Vec<Vec<usize>>,
    pub num_samples: usize,
    pub num_tokens: usize,
    /// Whether fewer than an eighth of the tokens are predicted, as answers are. What they need nothing has looked for before, so that `learned` goes
    /// best by its gates alone.
    pub predicts_answers: bool,
}

/// Slots are shared out by so many.
pub const SLOTS_STEP: usize = 32;

/// Queries tell of entries by chunks, so that these must not be long, whatever the recipe's are.
const CHUNK: usize = 256;

/// With this `learned` goes best by what was found where all tokens are predicted.
pub const GRACE_PERIOD: f64 = 0.375;

/// The fewest slots of a layer: a chunk must fit in beside what the recipe's policy, or `learned`, never evicts, which may be too much for
/// any length. Chunks of no given size fit themselves.
pub fn fewest_slots(recipe: &Recipe) -> Result<usize, Fault> {
    let Some(chunk) = recipe.kv_cache.chunk_size else { return Ok(SLOTS_STEP) };
    let learned =
        PolicyRecipe::with_params("learned", toml::Table::from_iter([("grace_period".to_owned(), GRACE_PERIOD.into())]));
    let holds = |policy: &PolicyRecipe, slots: usize| {
        cache::build(policy, slots).is_ok_and(|policy| policy.traits().max_chunk_size(slots) >= chunk)
    };
    let lengths = (SLOTS_STEP..=1 << 22).step_by(SLOTS_STEP);
    let mut enough = lengths.skip_while(|&slots| !holds(&recipe.kv_cache.policy, slots) || !holds(&learned, slots));
    enough.next().ok_or_else(|| {
        let message =
            format!("no cache holds a chunk of {chunk} tokens beside what `{}` never evicts", recipe.kv_cache.policy.name);
        Fault::usage(message, "set a smaller `kv_cache.chunk_size`, or let the policy evict more")
    })
}

/// The recipe by which a model is calibrated: with a cache that keeps everything, whatever the recipe's is.
pub fn for_calibration(recipe: &Recipe) -> Recipe {
    let mut kv_cache = full_cache(recipe);
    kv_cache.chunk_size = Some(CHUNK);
    // Kept outputs do not belong to hidden states that were rounded.
    let attention_outputs = if recipe.grad.rounds() { AttentionOutputs::Recompute } else { AttentionOutputs::Keep };
    let grad =
        GradRecipe { chunks_per_cell: Some(1), attention_outputs, single_tokens_for_targets: false, ..recipe.grad.closed() };
    Recipe { kv_cache, grad, distill: None, ..recipe.clone() }
}

/// Learns from the samples of a data set that are long enough, and shares the slots of all layers out, so many for each on average. Fails where
/// no sample is long enough for the largest mean, or all together tell of too few entries or of none that is more important than others, or
/// where a loss is not finite.
pub fn calibrate(
    recipe: &Recipe,
    model: &Model,
    tokenizer: Option<&Tokenizer>,
    dataset: &Dataset,
    means: &[usize],
) -> Result<Calibrated, Fault> {
    let least = Calibration::MIN_TOKENS;
    let fewest = means.iter().map(|mean| 2 * mean).max().unwrap_or(0).max(least);
    let samples: Vec<usize> = (0..dataset.len()).filter(|&sample| dataset.lengths()[sample] >= fewest).collect();
    if samples.is_empty() {
        let hint = format!("use longer samples: calibration needs at least {least} tokens, and at least twice `--cache-length`");
        return Err(Fault::data(format!("no sample has at least {fewest} tokens"), hint));
    }
    let num_tokens = samples.iter().map(|&sample| dataset.lengths()[sample]).sum();
    let mut num_targets = 0;
    console::note(&format!("calibrating on {} of {} samples, those of at least {fewest} tokens", samples.len(), dataset.len()));
    let engine = build::engine(&for_calibration(recipe), model.config(), tokenizer, None)?;
    let mut calibration = Calibration::new(model.config());
    for (done, &sample) in samples.iter().enumerate() {
        let batch = dataset.batch(&[sample])?;
        let losses = engine.losses(model, &batch, &mut NoObserver)?;
        let loss_sum: f64 = losses.iter().map(|loss| loss.loss_sum).sum();
        num_targets += losses.iter().map(|loss| loss.targets).sum::<usize>();
        if !loss_sum.is_finite() {
            let message = format!("the loss of sample {} is not finite", batch.sequences[0].sample);
            return Err(Fault::new(Exit::NotFinite, message).with_hint("look at the sample and at the model's weights"));
        }
        // The gradient of the loss's logarithm: without it, samples that the model knows already would tell nothing beside others.
        let weight = 1.0 / loss_sum.max(f64::from(f32::EPSILON));
        let context =
            MicroBatchContext { weight, loss_mean: LossMean::Tokens, router_weight: 0.0, dropout: None, chunk_sizes: None };
        engine.calibrate(model, &batch, context, &mut calibration, &mut NoObserver)?;
        console::note(&format!("sample {} of {}, {} tokens", done + 1, samples.len(), dataset.lengths()[sample]));
    }
    let least = fewest_slots(recipe)?;
    let (fits, cache_lengths) = guarded(|| {
        let lengths: Option<Vec<_>> = means.iter().map(|&mean| calibration.slots(mean, least, SLOTS_STEP)).collect();
        Ok((calibration.gates(), lengths))
    })?;
    let fitted: Vec<f64> = fits.iter().flatten().map(|fit| fit.explained).collect();
    let explained = fitted.iter().sum::<f64>() / fitted.len() as f64;
    let Some(cache_lengths) = cache_lengths.filter(|_| !fitted.is_empty()) else {
        let message = "the samples tell of fewer entries than the model has channels";
        return Err(Fault::data(message, "take more samples, or longer ones"));
    };
    if !explained.is_finite() {
        let message = "all entries of a KV head are equally important for the loss: no gate can tell them apart";
        return Err(Fault::data(message, "take samples whose targets depend on earlier tokens"));
    }
    let outputs = fits.into_iter().map(|fit| fit.map(|fit| fit.output));
    let gates = Gates::linear(model.config(), outputs.zip(calibration.queries()));
    let predicts_answers = 8 * num_targets < num_tokens;
    Ok(Calibrated { gates, explained, cache_lengths, num_samples: samples.len(), num_tokens, predicts_answers })
}
