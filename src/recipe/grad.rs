//! What a recipe says of the gradient: how it is tiled, and how what the backward phase needs waits for it.

use std::path::PathBuf;

use super::auto::Auto;
use super::kv_cache::BufferKind;
use super::plan::HeadRecipe;
use super::resolve::{Checked, Resolver};
use super::schema;
use super::words::words;

/// `[grad]`.
#[derive(Clone, Debug, PartialEq)]
pub struct GradRecipe {
    /// Layers of a cell, default 1.
    pub layers_per_cell: usize,
    /// The width of a cell, relative to the width at which its layer checkpoint weighs as much as one cache; default 1.
    pub chunks_per_cell_multiplier: f64,
    /// The width of a cell in chunks; where it is given, or left open, the multiplier says nothing.
    pub chunks_per_cell: Option<usize>,
    /// Hidden states at the borders of layer bands.
    pub layer_checkpoints: StoreRecipe,
    /// Keys and values that were overwritten.
    pub undo_log: StoreRecipe,
    /// Where files of stores are; default: `scratch` in the run's directory.
    pub scratch_dir: Option<PathBuf>,
    /// Whether tokens from the first target on are run one by one, as they would be generated; default false. The first target of
    /// any sequence counts for the whole batch, so that sequences of a batch depend on each other: a sequence is what it is alone in batches of
    /// one sequence only.
    pub single_tokens_for_targets: bool,
    /// What a run does where memory runs out; default `fail`.
    pub on_out_of_memory: OnOutOfMemory,
    /// Whether a GPU captures what columns of equal shape have in common as CUDA graphs, default false; a CPU has none.
    pub cuda_graphs: bool,
    /// Keys that are written `"auto"`: the planner decides. In the order of [`OpenKey::ALL`], none twice. While a key is open, its
    /// own field holds the default.
    pub open: Vec<OpenKey>,
}

impl GradRecipe {
    /// With the defaults for what is open: for who makes no gradient.
    pub fn closed(&self) -> Self {
        Self { open: Vec::new(), ..self.clone() }
    }

    /// Whether `key` is left for the planner to decide.
    pub fn is_open(&self, key: OpenKey) -> bool {
        self.open.contains(&key)
    }
}

words! {
    /// A key of `[grad]` that may be left open: it trades time for memory, or one kind of memory for another.
    OpenKey {
        /// Layers of a cell.
        LayersPerCell = "layers_per_cell",
        /// The width of a cell.
        ChunksPerCell = "chunks_per_cell",
        /// The form of layer checkpoints.
        LayerCheckpoints = "layer_checkpoints",
        /// Their place.
        LayerCheckpointsPlace = "layer_checkpoints_place",
        /// The form of the undo log.
        UndoLog = "undo_log",
        /// Its place.
        UndoLogPlace = "undo_log_place",
    }
}

/// How what the backward phase needs waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreRecipe {
    /// Default `plain`.
    pub form: StoreForm,
    /// Default `memory`.
    pub place: StorePlace,
}

impl StoreRecipe {
    /// The default: exact, and in the host's memory.
    pub const PLAIN: Self = Self { form: StoreForm::Plain, place: StorePlace::Memory };
}

words! {
    /// How tensors wait.
    StoreForm {
        /// As they are.
        Plain = "plain",
        /// In 1.19 bytes a value: smaller, and the gradient is no longer exact.
        Int8 = "int8",
        /// In 0.69 bytes a value: smaller still, and further from exact.
        Int4 = "int4",
    }
}

words! {
    /// What a run does where memory runs out.
    OnOutOfMemory {
        /// It ends.
        Fail = "fail",
        /// It makes the step again with smaller cells, and at last with layer checkpoints in `int8`.
        Retreat = "retreat",
    }
}

words! {
    /// Where tensors wait.
    StorePlace {
        /// In the host's memory.
        Memory = "memory",
        /// In a file that is deleted at the end.
        File = "file",
    }
}

impl Resolver<'_> {
    pub(super) fn grad(&self, schema: schema::GradTable, buffer: Option<BufferKind>, head: &HeadRecipe) -> Checked<GradRecipe> {
        let single_tokens_for_targets = schema.single_tokens_for_targets.unwrap_or(false);
        if single_tokens_for_targets && *head != HeadRecipe::NextToken {
            let key = "grad.single_tokens_for_targets";
            let message = format!("`{key}` contradicts the head, which has one target per sequence, and no token behind it");
            return self.refuse(key, message, "remove it, or write `head.kind = \"next_token\"`");
        }
        let open = open_keys(&schema);
        let given = |count: Option<Auto<usize>>| count.and_then(Auto::given);
        let multiplier = schema.chunks_per_cell_multiplier.unwrap_or(1.0);
        let is_fine = multiplier >= 0.1 && multiplier.is_finite();
        let hint = "1.0 makes a layer checkpoint of a cell weigh as much as one cache; less saves memory and costs time";
        Ok(GradRecipe {
            layers_per_cell: self.count("grad.layers_per_cell", given(schema.layers_per_cell).unwrap_or(1))?,
            chunks_per_cell_multiplier: self.check(
                "grad.chunks_per_cell_multiplier",
                multiplier,
                is_fine,
                "at least 0.1",
                hint,
            )?,
            chunks_per_cell: self.optional_count("grad.chunks_per_cell", given(schema.chunks_per_cell))?,
            layer_checkpoints: store(schema.layer_checkpoints, schema.layer_checkpoints_place),
            undo_log: self.undo_log(store(schema.undo_log, schema.undo_log_place), buffer)?,
            scratch_dir: schema.scratch_dir.map(|path| self.path("grad.scratch_dir", &path)).transpose()?,
            single_tokens_for_targets,
            on_out_of_memory: schema.on_out_of_memory.unwrap_or(OnOutOfMemory::Fail),
            cuda_graphs: schema.cuda_graphs.unwrap_or(false),
            open,
        })
    }

    /// The undo log of a quantised cache holds the cache's own few bits, to the bit. An open form is no contradiction: there is one
    /// left to choose.
    fn undo_log(&self, store: StoreRecipe, buffer: Option<BufferKind>) -> Checked<StoreRecipe> {
        let buffer = buffer.unwrap_or(BufferKind::Plain);
        if store.form == StoreForm::Plain || buffer.undo_log_may_round() {
            return Ok(store);
        }
        let message = format!(
            "`grad.undo_log = \"{}\"` contradicts `kv_cache.buffer = \"{buffer}\"`: what is overwritten is kept in the few bits \
             that the cache has for it",
            store.form
        );
        self.refuse("grad.undo_log", message, "remove it, or write `undo_log = \"plain\"`: it is small already, and stays exact")
    }
}

fn store(form: Option<Auto<StoreForm>>, place: Option<Auto<StorePlace>>) -> StoreRecipe {
    let (default, form, place) = (StoreRecipe::PLAIN, form.and_then(Auto::given), place.and_then(Auto::given));
    StoreRecipe { form: form.unwrap_or(default.form), place: place.unwrap_or(default.place) }
}

fn open_keys(schema: &schema::GradTable) -> Vec<OpenKey> {
    let is_open = |key: OpenKey| match key {
        OpenKey::LayersPerCell => matches!(schema.layers_per_cell, Some(Auto::Open)),
        OpenKey::ChunksPerCell => matches!(schema.chunks_per_cell, Some(Auto::Open)),
        OpenKey::LayerCheckpoints => matches!(schema.layer_checkpoints, Some(Auto::Open)),
        OpenKey::LayerCheckpointsPlace => matches!(schema.layer_checkpoints_place, Some(Auto::Open)),
        OpenKey::UndoLog => matches!(schema.undo_log, Some(Auto::Open)),
        OpenKey::UndoLogPlace => matches!(schema.undo_log_place, Some(Auto::Open)),
    };
    OpenKey::ALL.iter().copied().filter(|&key| is_open(key)).collect()
}
