//! `kvtune check`: parses, resolves, looks at model and data, and prints what would run.

use std::path::PathBuf;

use clap::Args;
use tch::{Device, Kind};

use crate::engine::ChunkPlan;
use crate::error::Error;
use crate::model::{Model, ModelConfig};
use crate::recipe::{HeadRecipe, Recipe};
use crate::report::console;
use crate::report::table::Table;
use crate::train::{self, Schedule, TrainError};

#[derive(Debug, Args)]
pub(super) struct Check {
    /// The recipe.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
}

impl Check {
    pub(super) fn run(&self) -> Result<(), Error> {
        let resolved = Recipe::load(&self.recipe, &self.set)?;
        resolved.notes.iter().for_each(|note| console::note(note));
        let recipe = resolved.recipe;
        let config = Model::check(&recipe.model.path)?;
        train::adapter(&recipe, &config, Kind::Float, Device::Cpu)?;
        let tokenizer = train::tokenizer(&recipe.model.path)?;
        let engine = train::engine(&recipe, &config, tokenizer.as_ref())?;
        let data = train::open_data(&recipe, &config, tokenizer.as_ref())?;
        console::result(&data.report.to_string())?;
        let longest = data.train.lengths().iter().copied().max().unwrap_or(0);
        let plan = engine.settings().plan(&[longest]).map_err(TrainError::from)?;
        train::check_lengths(&engine, &data)?;
        let schedule = Schedule::new(&recipe, data.train.lengths());
        Ok(console::result(&table(&recipe, &config, &plan, longest, &schedule).to_string())?)
    }
}

fn table(recipe: &Recipe, config: &ModelConfig, plan: &ChunkPlan, longest: usize, schedule: &Schedule) -> Table {
    let head = match &recipe.head {
        HeadRecipe::NextToken => "next_token".to_owned(),
        HeadRecipe::SeqClassificationOnLogits(labels) => format!("seq_classification_on_logits, {labels}"),
    };
    let num_rows = config.num_layers.div_ceil(recipe.grad.layers_per_cell.min(config.num_layers));
    let mut table = Table::new(&["what", "value"]);
    let shape = format!(
        "{} layers × {}, {} query heads, {} KV heads of {}",
        config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    );
    table.row(&["model", &recipe.model.path.display().to_string()]);
    table.row(&["shape", &shape]);
    table.row(&["adapter", &format!("LoRA r {} alpha {}, {}", recipe.lora.r, recipe.lora.alpha, recipe.lora.target_modules)]);
    table.row(&["head", &head]);
    let cache = format!(
        "{}, {} slots, chunks of {}",
        recipe.kv_cache.policy.name, recipe.kv_cache.cache_length, recipe.kv_cache.chunk_size
    );
    table.row(&["KV cache", &cache]);
    table.row(&["longest sample", &format!("{longest} tokens in {} chunks", plan.spans.len())]);
    table.row(&["cells", &format!("{num_rows} rows × {} columns", plan.columns.len())]);
    table.row(&["steps", &schedule.to_string()]);
    table
}
