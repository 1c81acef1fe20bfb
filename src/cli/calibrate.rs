//! `kvtune calibrate`: gates and slots by layer, from what the gradient says of a full cache.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::evaluate::{SampleArguments, targets};
use crate::data::Tokenizer;
use crate::engine::Settings;
use crate::files::{self, io_fault};
use crate::model::{GATE_TENSORS, ModelConfig};
use crate::recipe::{CacheLength, CacheRecipe, Recipe};
use crate::report::console;
use crate::train::{self, Calibrated, GRACE_PERIOD, SLOTS_STEP};
use crate::units::Fault;

/// Calibrate the cache of a model: gates for the policy `learned`, query statistics for `triattention`, slots for each layer.
#[derive(Debug, Args)]
pub(super) struct Calibrate {
    /// A run (its `final`, else its newest checkpoint), a checkpoint, or a model without an adapter.
    #[arg(value_name = "RUN|CHECKPOINT|MODEL")]
    path: PathBuf,
    /// The recipe whose data the model reads; a run's own, if left out.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Directory to write gates and query statistics to; must be empty or not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Mean slots per layer, in place of the recipe's. Several, separated by commas, give a list of slots for each.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Vec<u32>,
    #[command(flatten)]
    samples: SampleArguments,
}

impl Calibrate {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        files::require_unused(&self.out)?;
        let target = targets(std::slice::from_ref(&self.path), &[], self.recipe.as_deref(), &self.set)?.swap_remove(0);
        let (own, notes) = target.recipe(&self.set)?;
        for note in &notes {
            console::note_once(note);
        }
        let config = ModelConfig::load(&own.model)?;
        if config.layers.iter().all(|layer| layer.attention.rule.window.is_some()) {
            let message =
                "all layers of the model have a sliding window, and no policy evicts from them: there is nothing to calibrate";
            return Err(Fault::usage(message, "take a model with layers that attend to the whole sequence"));
        }
        let means = self.means(&own, &config)?;
        let recipe = train::for_calibration(&own);
        train::set_numerics(&recipe, device);
        let model = target.load(&recipe, device)?;
        let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
        let splits = train::open_data(&recipe, model.config(), tokenizer.as_ref())?;
        console::note_once(&splits.to_string());
        let dataset = self.samples.choose(splits, &recipe)?;
        let found = train::calibrate(&own, &model, tokenizer.as_ref(), &dataset, &means)?;
        found.gates.save(&self.out)?;
        if model.has_gates() {
            let dir = target.dir().display();
            console::warning(&format!(
                "`{dir}` has gates of its own, which go before `kv_cache.gates`: replace its `{GATE_TENSORS}`"
            ));
        }
        for lengths in &found.cache_lengths {
            let kv = CacheRecipe { cache_length: CacheLength::PerLayer(lengths.clone()), ..own.kv_cache.clone() };
            if let Err(error) = Settings::new(&config, &kv, &own.grad.closed()) {
                console::warning(&format!("the recipe does not take these lengths as it is: {error}"));
            }
        }
        self.tell(&found)
    }

    /// Slots of a layer on average: those that are asked for, or the recipe's.
    fn means(&self, recipe: &Recipe, config: &ModelConfig) -> Result<Vec<usize>, Fault> {
        let mut means: Vec<usize> = self.cache_length.iter().map(|&slots| slots as usize).collect();
        if means.is_empty() {
            let lengths = recipe.kv_cache.cache_length.by_layer(config.num_layers());
            means.push(lengths.iter().sum::<usize>() / lengths.len().max(1));
        }
        let fewest = train::fewest_slots(recipe)?;
        let Some(mean) = means.iter().find(|mean| **mean < fewest) else { return Ok(means) };
        let message =
            format!("{mean} slots can't be shared out over layers: each gets a multiple of {SLOTS_STEP}, at least {fewest}");
        Err(Fault::usage(message, "give a larger `--cache-length`, or a smaller `kv_cache.chunk_size`"))
    }

    fn tell(&self, found: &Calibrated) -> Result<(), Fault> {
        let Calibrated { explained, cache_lengths, num_samples, num_tokens, .. } = found;
        // A recipe looks for what it names beside itself.
        let out = std::path::absolute(&self.out).map_err(io_fault("find", &self.out))?;
        let gates = toml::Value::from(out.display().to_string());
        let (key, value) =
            if found.predicts_answers { ("gate_alone", json!(true)) } else { ("grace_period", json!(GRACE_PERIOD)) };
        // Of several keys of one name all but the first are comments.
        let line = |(i, slots): (usize, &Vec<usize>)| {
            let mean = slots.iter().sum::<usize>() / slots.len().max(1);
            format!("{}cache_length = {slots:?}    # {mean} on average", if i == 0 { "" } else { "# " })
        };
        let words = format!(
            "{num_samples} samples, {num_tokens} tokens; the gates explain {explained:.2} of the variance of importance\n\n[kv_cache]\n\
             policy.learned = {{ {key} = {value} }}\ngates = {gates}\n{}",
            cache_lengths.iter().enumerate().map(line).collect::<Vec<_>>().join("\n"),
        );
        let facts = json!({
            "samples": num_samples, "tokens": num_tokens, "gates": out, "explained": explained, "cache_lengths": cache_lengths,
            "policy": { "learned": { key: value } }
        });
        console::outcome(&words, &facts)
    }
}
