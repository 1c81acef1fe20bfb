//! `kvtune verify`: the proof on the user's own model and data.

use std::path::PathBuf;

use clap::Args;
use tch::Device;

use super::counts::at_least_one;
use super::dump;
use super::recipe_file::RecipeFile;
use crate::cache::ReplayLog;
use crate::data::{Batch, Dataset};
use crate::engine::{ChunkKey, Settings, StepContext};
use crate::error::Error;
use crate::model::Model;
use crate::recipe::{Dtype, Recipe, StoreForm, ValidationSource};
use crate::report::console;
use crate::report::table::Table;
use crate::train;
use crate::verify::{Comparison, Nearness, compare, fits_in_f64};

#[derive(Debug, Args)]
pub(super) struct Verify {
    #[command(flatten)]
    recipe: RecipeFile,
    /// Samples to prove, from the start of the training file, in one batch. Default: `train.micro_batch_size`; with `--dump`,
    /// all samples of the file.
    #[arg(long, value_name = "K", value_parser = at_least_one())]
    samples: Option<usize>,
    /// Write loss, gradients, logits, evictions and the replay log to this directory.
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Evict what this replay log of an earlier dump says, instead of asking the policy.
    #[arg(long, value_name = "FILE")]
    replay_log: Option<PathBuf>,
}

/// More samples than this in one dumped batch must be asked for.
const MAX_DUMPED: usize = 64;
/// Spread of the proof's B matrices where no adapter is given: at zero, half of the gradients would be zero.
const PROOF_B: f64 = 0.02;

impl Verify {
    pub(super) fn run(&self, device: Device) -> Result<(), Error> {
        let mut recipe = self.recipe.load()?;
        // The proof takes the rows of the file in their order.
        recipe.data.validation = ValidationSource::Fraction(0.0);
        let model = proof_model(&recipe, recipe.model.dtype, device)?;
        let tokenizer = train::tokenizer(&recipe.model.path)?;
        let mut engine = train::engine(&recipe, model.config(), tokenizer.as_ref(), None)?;
        if let Some(path) = &self.replay_log {
            engine = engine.following(ReplayLog::load(path)?);
        }
        let data = train::open_data(&recipe, model.config(), tokenizer.as_ref())?;
        console::note(&data.report.to_string());
        let batch = self.batch(&data.train, recipe.train.micro_batch_size)?;
        // The sizes of the first training step, where they are drawn.
        let key = ChunkKey { seed: recipe.train.seed, step: 0 };
        let context = StepContext { weight: 1.0 / batch.num_targets().max(1) as f64, dropout: None, chunk_sizes: Some(key) };
        if let Some(dir) = &self.dump {
            dump::write(dir, (&engine, &model), &batch, context)?;
            console::note(&format!("wrote the dump to {}", dir.display()));
        }
        let dtype = if fits_in_f64(&model, &batch) { Dtype::F64 } else { Dtype::F32 };
        let model = if recipe.model.dtype == dtype { model } else { proof_model(&recipe, dtype, device)? };
        let comparison = compare(&engine, &model, &batch, context)?;
        judge(&comparison, engine.settings(), dtype, &batch)
    }

    fn batch(&self, data: &Dataset, micro_batch_size: usize) -> Result<Batch, Error> {
        let default = if self.dump.is_some() { data.len() } else { micro_batch_size };
        if self.samples.is_none() && default > MAX_DUMPED {
            let message = format!("the file has {default} samples, which would be dumped as one batch");
            return Err(Error::Usage { message, hint: "say how many with `--samples`".into() });
        }
        let count = self.samples.unwrap_or(default).min(data.len());
        Ok(data.batch(&(0..count).collect::<Vec<_>>())?)
    }
}

fn proof_model(recipe: &Recipe, dtype: Dtype, device: Device) -> Result<Model, Error> {
    let mut recipe = recipe.clone();
    recipe.model.dtype = dtype;
    let mut model = train::model(&recipe, device)?;
    if let (None, Some(adapter)) = (&recipe.model.adapter, model.adapter_mut()) {
        adapter.set_b_normal(PROOF_B, recipe.train.seed);
    }
    Ok(model)
}

/// Where stores round the gradient is not exact, but must point the same way. How long the difference is depends on the model: it is told
/// beside what the models of the tests keep.
fn judge_nearness(comparison: &Comparison, stores: &[(&'static str, StoreForm)], bound: Nearness) -> Result<(), Error> {
    let (cosine, error) = comparison.whole();
    let Nearness { smallest_cosine, largest_error } = bound;
    let written: Vec<String> = stores.iter().map(|(key, form)| format!("`{key} = \"{form}\"`")).collect();
    let (written, beside) = (written.join(", "), if error <= largest_error { "at most" } else { "more than the" });
    console::result(&format!(
        "{written}: cosine of the whole gradient {cosine:.6} (at least {smallest_cosine}), relative error {:.3} % ({beside} {:.1} %, as \
         the models of the tests have it)",
        100.0 * error,
        100.0 * largest_error
    ))?;
    if cosine >= smallest_cosine {
        let plain: Vec<String> = stores.iter().map(|(key, _)| format!("--set {key}=plain")).collect();
        console::result(&format!("near enough; for a proof to rounding, verify with `{}`", plain.join(" ")))?;
        return Ok(());
    }
    Err(Error::Imprecise { stores: written, cosine, smallest: smallest_cosine })
}

/// Prints the table and fails beyond the tolerance.
fn judge(comparison: &Comparison, settings: &Settings, dtype: Dtype, batch: &Batch) -> Result<(), Error> {
    let mut table = Table::new(&["matrix", "|reference|", "relative error", "cosine"]);
    for m in &comparison.matrices {
        let (error, cosine) = if m.reference_norm > 0.0 {
            (format!("{:.2e}", m.relative_error), format!("{:.9}", m.cosine))
        } else {
            ("untested".to_owned(), "–".to_owned())
        };
        table.row(&[&m.name, &format!("{:.3e}", m.reference_norm), &error, &cosine]);
    }
    console::result(&table.to_string())?;
    if let Some(bound) = Nearness::of_stores(settings) {
        return judge_nearness(comparison, &settings.inexact_stores(), bound);
    }
    let tolerance = if dtype == Dtype::F64 { 1e-12 } else { 2e-5 };
    let (worst, untested) = (comparison.worst(), comparison.untested().len());
    let (rows, tokens) = (batch.rows.len(), batch.num_tokens());
    console::result(&format!(
        "{rows} samples, {tokens} tokens, in {dtype}: loss {:.9}, reference {:.9}\nworst relative error {worst:.2e} (tolerance \
         {tolerance:.0e}), {} matrices tested, {untested} untested",
        comparison.loss,
        comparison.reference_loss,
        comparison.matrices.len() - untested,
    ))?;
    if worst <= tolerance {
        let verdict = if untested == 0 { "proved" } else { "proved, except for the untested matrices" };
        return Ok(console::result(verdict)?);
    }
    Err(Error::Disproved { worst, tolerance })
}
