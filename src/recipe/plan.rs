//! What a checked recipe says: plain values with every default filled in, one struct per table.

use std::path::PathBuf;
use std::sync::LazyLock;

use super::data::{DataRecipe, HeadRecipe, HeadTable};
use super::distill::DistillRecipe;
use super::eval::EvalRecipe;
use super::grad::GradRecipe;
use super::kv_cache::CacheRecipe;
use super::model::{LoraRecipe, ModelRecipe};
use super::table::{RecipeKey, RecipeTable, TableEntries, dotted};
use super::training::{CheckpointRecipe, LogRecipe, OptimizerRecipe, ReportRecipe, TopOfFile, TrainRecipe};

/// A recipe: checked, complete, with absolute paths.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    pub model: ModelRecipe,
    /// The adapter; `None` where all weights are trained.
    pub lora: Option<LoraRecipe>,
    pub data: DataRecipe,
    pub head: HeadRecipe,
    /// What is mixed into the loss of the next token.
    pub distill: Option<DistillRecipe>,
    pub kv_cache: CacheRecipe,
    pub grad: GradRecipe,
    pub train: TrainRecipe,
    pub optimizer: OptimizerRecipe,
    pub eval: EvalRecipe,
    pub checkpoint: CheckpointRecipe,
    pub log: LogRecipe,
    /// A command that also gets the metrics.
    pub report: ReportRecipe,
    /// Where the run is written; the command line may say it instead.
    pub output_dir: Option<PathBuf>,
}

impl Recipe {
    /// The tables as they are written, without what stands above them.
    pub(super) fn sections(&self) -> Vec<(&'static str, TableEntries)> {
        fn section<T: RecipeTable>(table: &T) -> (&'static str, TableEntries) {
            (T::NAME, table.entries())
        }
        let model = [Some(section(&self.model)), self.lora.as_ref().map(section)];
        let mut data = section(&self.data);
        // The sets have them.
        data.1.retain(|(key, _)| key != "train" || self.data.sets.is_empty());
        let rest = [
            data,
            section(&HeadTable { distill: self.distill.clone(), ..self.head.to_table() }),
            section(&self.kv_cache),
            (GradRecipe::NAME, self.grad.written()),
            section(&self.train),
            section(&self.optimizer),
            section(&self.eval),
            section(&self.checkpoint),
            section(&self.log),
            section(&self.report),
        ];
        model.into_iter().flatten().chain(rest).collect()
    }
}

/// All tables of a recipe by their names, with all keys that they may have; the last one is what stands above them, without a name.
pub static TABLES: LazyLock<Vec<(&str, Vec<RecipeKey>)>> = LazyLock::new(|| {
    fn table<T: RecipeTable>() -> (&'static str, Vec<RecipeKey>) {
        (T::NAME, T::keys())
    }
    vec![
        table::<ModelRecipe>(),
        table::<LoraRecipe>(),
        table::<DataRecipe>(),
        table::<HeadTable>(),
        table::<CacheRecipe>(),
        table::<GradRecipe>(),
        table::<TrainRecipe>(),
        table::<OptimizerRecipe>(),
        table::<EvalRecipe>(),
        table::<CheckpointRecipe>(),
        table::<LogRecipe>(),
        table::<ReportRecipe>(),
        table::<TopOfFile>(),
    ]
});

/// All keys, each with its table.
pub(super) fn keys() -> impl Iterator<Item = (&'static str, &'static RecipeKey)> {
    TABLES.iter().flat_map(|(table, keys)| keys.iter().map(move |key| (*table, key)))
}

/// All keys, each by its dotted name.
pub fn dotted_keys() -> impl Iterator<Item = (String, &'static RecipeKey)> {
    keys().map(|(table, key)| (dotted(table, &key.name), key))
}
