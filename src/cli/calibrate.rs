//! `kvtune calibrate`: gates and slots by layer, from what the gradient says of a full cache.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::evaluate::{SampleArguments, targets};
use crate::files;
use crate::model::{GATE_TENSORS, ModelConfig};
use crate::report::console;
use crate::train;
use crate::units::Fault;

#[derive(Debug, Args)]
pub(super) struct Calibrate {
    /// A run (its best known end), a checkpoint, or a model without an adapter.
    #[arg(value_name = "RUN|CHECKPOINT|MODEL")]
    path: PathBuf,
    /// The recipe whose data the model reads; a run's own, if left out.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Directory to write the gates to; must be empty or not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Slots of a layer in the mean, in place of the recipe's: several with commas, which are shared out one by one.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Vec<u32>,
    #[command(flatten)]
    samples: SampleArguments,
}

impl Calibrate {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        files::require_unused(&self.out)?;
        let targets = targets(std::slice::from_ref(&self.path), &[], self.recipe.as_deref())?;
        let Some(target) = targets.first() else { return Ok(()) };
        let (recipe, notes) = target.recipe(&self.set)?;
        for note in &notes {
            console::note_once(note);
        }
        train::set_numerics(&recipe, device);
        let own = recipe.kv_cache.cache_length.by_layer(ModelConfig::load(&recipe.model)?.num_layers());
        let own = own.iter().sum::<usize>() / own.len().max(1);
        let asked: Vec<usize> = self.cache_length.iter().map(|&slots| slots as usize).collect();
        let means = if asked.is_empty() { vec![own] } else { asked };
        let model = target.load(&recipe, device)?;
        let tokenizer = train::tokenizer(&recipe.model.path)?;
        let splits = train::open_data(&recipe, model.config(), tokenizer.as_ref())?;
        console::note_once(&splits.report.to_string());
        let dataset = self.samples.choose(splits, &recipe)?;
        let found = train::calibrate(&recipe, &model, tokenizer.as_ref(), &dataset, &means)?;
        found.gates.save(&self.out)?;
        let tokens: usize = dataset.lengths().iter().sum();
        let (samples, out) = (dataset.len(), self.out.display());
        let lengths = means.iter().zip(&found.cache_lengths);
        let lengths: Vec<String> =
            lengths.map(|(mean, slots)| format!("cache_length = {slots:?}    # {mean} in the mean")).collect();
        let lengths = lengths.join("\n");
        let words = format!(
            "{samples} samples, {tokens} tokens; the gates in `{}` explain {:.2} of what entries are worth\n\n[kv_cache]\ngates = \"{out}\"\n{lengths}",
            self.out.join(GATE_TENSORS).display(),
            found.explained,
        );
        let facts = json!({ "samples": samples, "tokens": tokens, "gates": self.out, "explained": found.explained, "cache_lengths": found.cache_lengths });
        console::outcome(&words, &facts)
    }
}
