//! What a checked recipe says: plain values with every default filled in, one struct per table.

use std::path::PathBuf;

use super::data::{DataRecipe, HeadRecipe, HeadTable};
use super::eval::EvalRecipe;
use super::grad::GradRecipe;
use super::kv_cache::CacheRecipe;
use super::model::{LoraRecipe, ModelRecipe};
use super::table::{RecipeKey, RecipeTable, TableEntries};
use super::training::{CheckpointRecipe, LogRecipe, OptimizerRecipe, ReportRecipe, TopOfFile, TrainRecipe};

/// A recipe: checked, complete, with absolute paths.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The model that is trained.
    pub model: ModelRecipe,
    /// The adapter; `None` where all weights are trained.
    pub lora: Option<LoraRecipe>,
    pub data: DataRecipe,
    pub head: HeadRecipe,
    /// How the past is kept.
    pub kv_cache: CacheRecipe,
    /// How the gradient is tiled.
    pub grad: GradRecipe,
    /// Lengths and sizes of the run.
    pub train: TrainRecipe,
    /// The optimiser and its schedule.
    pub optimizer: OptimizerRecipe,
    pub eval: EvalRecipe,
    pub checkpoint: CheckpointRecipe,
    pub log: LogRecipe,
    /// Who gets the figures besides.
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
            section(&self.head.to_table()),
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

/// All tables and their keys; the last one is what stands above them, without a name.
pub(super) fn tables() -> [(&'static str, Vec<RecipeKey>); 13] {
    fn table<T: RecipeTable>() -> (&'static str, Vec<RecipeKey>) {
        (T::NAME, T::keys())
    }
    [
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
}
