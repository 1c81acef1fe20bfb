//! What a recipe says of the gradient: how it is tiled, and how what the backward phase needs waits for it.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::Unexpected;
use toml::Value;

use super::diagnose::Checked;
use super::read::AUTO;
use super::table::{RecipeField, RecipeKey, RecipeTable, TableEntries, table};
use super::tree::Document;
use super::value::{COUNT, KeyRule, RecipeValue};
use super::words::{forms, words};

/// A cell is at least a tenth as wide as it is by default.
const WIDTH: KeyRule = KeyRule {
    takes: "number ≥ 0.1",
    expected: "at least 0.1",
    hint: "1.0 makes a layer checkpoint of a cell weigh as much as one cache; less saves memory and costs time",
    is_fine: |width| width >= 0.1 && width.is_finite(),
};

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct GradRecipe in "grad" {
        /// Layers of a cell. More need less recomputation and more memory.
        #[rule(COUNT)]
        #[auto = true]
        pub layers_per_cell: usize = 1,
        /// Width of a cell. At 1.0 its layer checkpoint is about as large as one layer's cache.
        #[rule(WIDTH)]
        pub chunks_per_cell_multiplier: f64 = 1.0,
        /// Width of a cell in chunks. The multiplier is then ignored.
        #[rule(COUNT)]
        #[auto = true]
        #[default("by the multiplier")]
        pub chunks_per_cell: Option<usize> = None,
        /// How hidden states between layer bands are kept: exact, or rounded.
        #[also("grad.layercp_qname")]
        #[auto = true]
        pub layer_checkpoints: StoreRecipe = StoreRecipe::PLAIN,
        /// How overwritten cache entries are kept: exact, or rounded. With a quantised `buffer` only `plain`.
        #[also("grad.cachecp_qname")]
        #[auto = true]
        pub undo_log: StoreRecipe = StoreRecipe::PLAIN,
        /// Where the stores' files are, which have no names. It need not exist: its file system counts.
        #[default("the run's directory")]
        pub scratch_dir: Option<PathBuf> = None,
        /// From the first target in a batch on, every token is a chunk of its own, as in generation. With `next_token` only.
        #[also("single_tokens_for_targets")]
        pub single_tokens_for_targets: bool = false,
        /// `fail` ends the run. `retreat` repeats the step with smaller cells and the same choices, finally with `int8` layer checkpoints, which
        /// round the gradient.
        pub on_out_of_memory: OnOutOfMemory = OnOutOfMemory::Fail,
        /// Number of cells whose autograd graphs the forward phase keeps, so that they are not recomputed. They are counted in the order of the
        /// backward phase, from the last column of the top layer band; below that band only whole bands are kept. `all`: those of every cell,
        /// however many columns a batch has. `auto`: as many as fit; in host memory they take at most half of what a step leaves free.
        pub keep_graph: KeepGraph = KeepGraph::Auto,
        /// `keep`: the attention outputs of the forward phase are kept in host memory, T · H · (D · w + 4) bytes a layer, so that recomputed
        /// cells skip attention. With exact stores only.
        #[auto = true]
        pub attention_outputs: AttentionOutputs = AttentionOutputs::Recompute,
        /// A GPU generates text with captured CUDA graphs; needs `kv_cache.static`. Training uses none.
        #[also("train.cuda_graphs", "cuda_graphs")]
        pub cuda_graphs: bool = false,
        /// Keys that are written `"auto"`: the planner decides. In the order of [`OpenKey::ALL`], none twice. While a key is open,
        /// its own field holds the default.
        pub open: Vec<OpenKey> = Vec::new(),
    }
}

impl GradRecipe {
    /// With the defaults for what is open, and no graph that is kept unless so many are: for who makes no gradient.
    pub fn closed(&self) -> Self {
        let keep_graph = if self.keep_graph == KeepGraph::Auto { KeepGraph::None } else { self.keep_graph };
        Self { open: Vec::new(), keep_graph, ..self.clone() }
    }

    /// Whether the planner has nothing to decide.
    pub fn is_closed(&self) -> bool {
        self.open.is_empty() && self.keep_graph != KeepGraph::Auto
    }

    /// With what `other` has for the keys that are left to the planner, and its kept graphs beside the same cells.
    pub fn decided_as(&self, other: &Self) -> Self {
        let mut grad = Self { open: Vec::new(), ..self.clone() };
        for key in &self.open {
            match key {
                OpenKey::LayersPerCell => grad.layers_per_cell = other.layers_per_cell,
                OpenKey::ChunksPerCell => grad.chunks_per_cell = other.chunks_per_cell,
                OpenKey::LayerCheckpoints => grad.layer_checkpoints.form = other.layer_checkpoints.form,
                OpenKey::LayerCheckpointsPlace => grad.layer_checkpoints.place = other.layer_checkpoints.place,
                OpenKey::UndoLog => grad.undo_log.form = other.undo_log.form,
                OpenKey::UndoLogPlace => grad.undo_log.place = other.undo_log.place,
                OpenKey::AttentionOutputs => grad.attention_outputs = other.attention_outputs,
            }
        }
        // Kept outputs need exact stores. Where what is written now does not go with what was decided, the defaults do.
        if grad.attention_outputs == AttentionOutputs::Keep && grad.rounds() {
            grad = Self { open: Vec::new(), ..self.clone() };
        }
        let with_graphs = Self { keep_graph: other.keep_graph, ..grad.clone() };
        if grad.keep_graph == KeepGraph::Auto && with_graphs.tiling() == other.tiling() { with_graphs } else { grad }
    }

    /// Whether `key` is left for the planner to decide.
    pub fn is_open(&self, key: OpenKey) -> bool {
        self.open.contains(&key)
    }

    /// Whether a store rounds what waits in it.
    pub fn rounds(&self) -> bool {
        [self.layer_checkpoints, self.undo_log].iter().any(|store| store.form != StoreForm::Plain)
    }

    /// Whether a store is a file, or may become one.
    pub fn may_use_files(&self) -> bool {
        let is_open = |key: &OpenKey| matches!(key, OpenKey::LayerCheckpointsPlace | OpenKey::UndoLogPlace);
        self.open.iter().any(is_open)
            || [self.layer_checkpoints, self.undo_log].iter().any(|store| store.place == StorePlace::File)
    }

    /// The keys that may be left to the planner, as a recipe would have them in one line: `grad = { layers_per_cell = 4, … }`.
    pub fn tiling(&self) -> String {
        let is_of_tiling = |name: &str| name == "keep_graph" || OpenKey::ALL.iter().any(|key| key.name() == name);
        let entries = self.written().into_iter().filter(|(name, _)| is_of_tiling(name));
        let written: Vec<String> = entries.map(|(name, value)| format!("{name} = {value}")).collect();
        format!("grad = {{ {} }}", written.join(", "))
    }

    /// The table with the keys that are left open.
    pub(super) fn written(&self) -> TableEntries {
        // A width that is left open is written, too, though it has no default.
        let width = if self.is_open(OpenKey::ChunksPerCell) { Some(1) } else { self.chunks_per_cell };
        let mut entries = Self { chunks_per_cell: width, ..self.clone() }.entries();
        for (name, value) in &mut entries {
            if self.open.iter().any(|key| key.name() == name) {
                *value = Value::from(AUTO);
            }
        }
        entries
    }
}

/// No key of its own: it is read from those that are left open.
impl RecipeField for Vec<OpenKey> {
    fn keys(_: RecipeKey, _: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        Vec::new()
    }

    fn find(_: &Document, _: &str) -> Checked<Option<Self>> {
        Ok(None)
    }

    fn entries(&self, _: &str) -> TableEntries {
        Vec::new()
    }
}

words! {
    /// A key of `[grad]` that may be left open: it trades time for memory, or one kind of memory for another.
    pub enum OpenKey {
        LayersPerCell = "layers_per_cell",
        ChunksPerCell = "chunks_per_cell",
        LayerCheckpoints = "layer_checkpoints",
        LayerCheckpointsPlace = "layer_checkpoints_place",
        UndoLog = "undo_log",
        UndoLogPlace = "undo_log_place",
        AttentionOutputs = "attention_outputs",
    }
}

words! {
    pub enum AttentionOutputs {
        Recompute = "recompute",
        Keep = "keep",
    }
}

/// Cells whose graphs the forward phase keeps for the backward phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KeepGraph {
    None,
    /// The planner decides how many there is room for; none where nobody plans.
    Auto,
    All,
    /// So many, counted in the order of the backward phase.
    #[serde(untagged)]
    Cells(usize),
}

impl KeepGraph {
    /// The most that are kept, as far as it is decided: `usize::MAX` for all.
    pub fn cells(self) -> usize {
        match self {
            Self::None | Self::Auto => 0,
            Self::Cells(cells) => cells,
            Self::All => usize::MAX,
        }
    }

    /// The reverse of [`KeepGraph::cells`].
    pub fn of(cells: usize) -> Self {
        match cells {
            0 => Self::None,
            usize::MAX => Self::All,
            cells => Self::Cells(cells),
        }
    }
}

impl RecipeValue for KeepGraph {
    fn takes(_: Option<&str>) -> String {
        format!("`none`, `auto`, `all`, or {}", COUNT.takes)
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        if let Self::Cells(cells) = self {
            COUNT.check(document, key, &Value::Integer(cells as i64))?;
        }
        Ok(self)
    }
}

const KEEP_GRAPH: &str = "`\"none\"`, `\"auto\"`, `\"all\"`, or a whole number of cells";

forms! {
    KeepGraph: KEEP_GRAPH;
    word<E> |word| match word {
        "none" => Ok(KeepGraph::None),
        "auto" => Ok(KeepGraph::Auto),
        "all" => Ok(KeepGraph::All),
        _ => Err(E::invalid_value(Unexpected::Str(word), &KEEP_GRAPH)),
    };
    whole |cells| KeepGraph::Cells(cells);
}

/// How what the backward phase needs waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreRecipe {
    pub form: StoreForm,
    pub place: StorePlace,
}

impl StoreRecipe {
    /// The default: exact, and in the host's memory.
    pub const PLAIN: Self = Self { form: StoreForm::Plain, place: StorePlace::Memory };
}

/// Prints form and place, as `int8, file`.
impl fmt::Display for StoreRecipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.form, self.place)
    }
}

/// Two keys: the form has the name of the field, and the place another one beside it.
impl RecipeField for StoreRecipe {
    fn keys(key: RecipeKey, default: &dyn Fn(&str) -> String) -> Vec<RecipeKey> {
        let place = RecipeKey::named(&place_key(&key.name), "Where they are kept: in host memory or in a scratch file.");
        let place = RecipeKey { may_be_auto: key.may_be_auto, ..place };
        StoreForm::keys(key, default).into_iter().chain(StorePlace::keys(place, default)).collect()
    }

    fn find(document: &Document, key: &str) -> Checked<Option<Self>> {
        let form = StoreForm::find(document, key)?.unwrap_or(Self::PLAIN.form);
        let place = StorePlace::find(document, &place_key(key))?.unwrap_or(Self::PLAIN.place);
        Ok(Some(Self { form, place }))
    }

    fn entries(&self, key: &str) -> TableEntries {
        [self.form.entries(key), self.place.entries(&place_key(key))].concat()
    }
}

fn place_key(key: &str) -> String {
    format!("{key}_place")
}

words! {
    pub enum StoreForm {
        Plain = "plain" | "default",
        /// In 1.19 bytes a value: smaller, and the gradient is no longer exact.
        Int8 = "int8" | "torch-quantized8",
        /// In 0.69 bytes a value: smaller still, and further from exact.
        Int4 = "int4" | "torch-quantized4",
    }
}

words! {
    pub enum OnOutOfMemory {
        Fail = "fail",
        Retreat = "retreat",
    }
}

words! {
    pub enum StorePlace {
        Memory = "memory",
        /// In a file that is deleted at the end.
        File = "file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_decided_does_not_contradict_what_is_written() {
        let rounded = StoreRecipe { form: StoreForm::Int8, ..StoreRecipe::PLAIN };
        let asked = |key: OpenKey| GradRecipe { open: vec![key], ..GradRecipe::default() };
        let decided = GradRecipe { layers_per_cell: 3, attention_outputs: AttentionOutputs::Keep, ..GradRecipe::default() };
        let other = GradRecipe { layer_checkpoints: rounded, ..asked(OpenKey::AttentionOutputs) }.decided_as(&decided);
        assert_eq!((other.attention_outputs, other.layers_per_cell), (AttentionOutputs::Recompute, 1));
        let keeps = GradRecipe { attention_outputs: AttentionOutputs::Keep, ..asked(OpenKey::LayerCheckpoints) };
        let decided = GradRecipe { layer_checkpoints: rounded, ..GradRecipe::default() };
        assert_eq!(keeps.decided_as(&decided).layer_checkpoints, StoreRecipe::PLAIN);
        assert_eq!(asked(OpenKey::LayerCheckpoints).decided_as(&decided).layer_checkpoints, rounded);
    }
}
