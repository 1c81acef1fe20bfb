//! What a recipe says of the model, and of the adapter that is trained on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use toml::Value;

use super::diagnose::Checked;
use super::modules::ModuleSet;
use super::table::{RecipeTable, table};
use super::tree::Document;
use super::value::{COUNT, PART, RecipeValue, positive};
use super::words::words;
use crate::files::{self, TensorFile};

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct ModelRecipe in "model" {
        /// A Hugging Face model directory, or a GGUF file; where there is none, a name on the Hub as `"Qwen/Qwen2.5-0.5B"`, which is looked up in the
        /// Hugging Face cache (`HF_HUB_CACHE`, `HF_HOME`). Nothing is downloaded: `hf download` does that.
        #[also(
            "model.checkpoint_dir", "model.base_model", "model.model_name_or_path", "model.name_or_path", "checkpoint_dir",
            "base_model", "model_name_or_path", "checkpointer.checkpoint_dir", "model.name",
        )]
        #[default("required")]
        pub path: PathBuf = PathBuf::new(),
        /// Branch, tag or commit of a model that is named as on the Hub.
        #[also("model.model_revision", "model_revision", "revision")]
        #[default("`main`")]
        pub revision: Option<String> = None,
        /// A PEFT adapter to start from. Keys that `[lora]` leaves out are taken from the adapter, except `dropout` and trained copies that
        /// its settings do not name.
        #[also("lora_model_dir", "adapter_name_or_path")]
        pub adapter: Option<PathBuf> = None,
        /// Element type of weights and activations. An adapter's matrices are f32 at least. Weights that are trained in
        /// `bf16` have f32 masters, which the checkpoint holds with the optimiser's state.
        #[also("model.precision", "model.torch_dtype", "precision", "dtype", "torch_dtype", "train.precision")]
        pub dtype: Dtype = Dtype::F32,
        /// Quantises the frozen matrices of the layers as they are loaded. As in bitsandbytes: `nf4` and `fp4` in blocks of 64 numbers,
        /// `nf4-double` with 8-bit scales (`QLoRA`), `int8` by rows. `mxfp4`: blocks of 32 (OCP MX).
        pub quantize: Option<Quantize> = None,
        /// A GPU may round the factors of f32 products to 10 bits of mantissa.
        #[also("model.tf32", "train.tf32", "train.allow_tf32", "allow_tf32", "tf32")]
        pub allow_tf32: bool = false,
        /// In place of what `config.json` says of scaled rotary embeddings, with the keys and defaults of Transformers: `{ rope_type = "yarn",
        /// factor = 4.0 }`, and likewise `linear`, `dynamic`, `llama3` and `longrope`. Without `original_max_position_embeddings` the original
        /// length is that of `config.json`. `{ rope_type = "dynamic_yarn", original_max_position_embeddings = 8192, beta_fast = 32.0, beta_slow =
        /// 1.0 }` is `YaRN` by the length of each sequence, as in `keys_values`: sequences up to the original length are as without scaling.
        pub rope_scaling: Option<RopeScalingRecipe> = None,
    }
}

impl ModelRecipe {
    /// A name on the Hub becomes the directory of its snapshot, which is another one after the next download.
    pub(super) fn located(self, document: &Document) -> Self {
        let written = document.root.entry("model.path").and_then(|entry| entry.node.as_str());
        let name = written.filter(|_| !self.path.exists());
        let snapshot = name.and_then(|name| files::hub_snapshot(name, self.revision.as_deref()));
        Self { path: snapshot.unwrap_or(self.path), ..self }
    }
}

/// How rotary embeddings are scaled, whatever the model's files say: the keys of `rope_parameters` in a `config.json`. Which kinds there
/// are, and which keys they have, is known where a `config.json` is read.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct RopeScalingRecipe(pub toml::Table);

impl RopeScalingRecipe {
    /// What to write where sequences of `tokens` are longer than `positions`.
    pub fn hint(tokens: usize, positions: usize) -> String {
        format!(
            "scale the rotary embeddings with `model.rope_scaling = {{ rope_type = \"yarn\", factor = {}.0, \
             original_max_position_embeddings = {positions} }}`",
            tokens.div_ceil(positions.max(1)).max(2)
        )
    }

    pub fn rope_type(&self) -> &str {
        self.0.get("rope_type").and_then(Value::as_str).unwrap_or_default()
    }
}

impl RecipeValue for RopeScalingRecipe {
    fn takes(_: Option<&str>) -> String {
        "table".to_owned()
    }

    fn checked(mut self, document: &Document, key: &str) -> Checked<Self> {
        // The older name; what says both is looked at where a `config.json` is read.
        if !self.0.contains_key("rope_type")
            && let Some(kind) = self.0.remove("type")
        {
            self.0.insert("rope_type".to_owned(), kind);
        }
        if self.rope_type().is_empty() {
            let message = format!("`{key}.rope_type` is missing");
            return document.refuse(key, message, "write `{ rope_type = \"yarn\", factor = 4.0 }`, or another kind");
        }
        Ok(self)
    }
}

words! {
    pub enum Dtype {
        F32 = "f32" | "float32" | "fp32" | "32-true" | "32",
        Bf16 = "bf16" | "bfloat16" | "bf16-true",
        F64 = "f64" | "float64" | "fp64" | "64-true" | "64",
    }
}

words! {
    pub enum Quantize {
        Nf4 = "nf4",
        Nf4Double = "nf4-double",
        Fp4 = "fp4",
        Int8 = "int8",
        Mxfp4 = "mxfp4",
    }
}

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct LoraRecipe in "lora" {
        /// Rank of the adapter's matrices.
        #[also("lora.rank", "lora.lora_r", "lora.lora_rank", "model.lora_rank", "lora_r", "lora_rank")]
        #[rule(COUNT)]
        pub r: usize = 8,
        /// The update is scaled by `alpha / r`.
        #[also("lora.lora_alpha", "model.lora_alpha", "lora_alpha")]
        #[rule(positive("usual values are `r` to twice `r`"))]
        pub alpha: f64 = 16.0,
        /// Dropout of the adapter's input.
        #[also("lora.lora_dropout", "model.lora_dropout", "lora_dropout")]
        #[rule(PART)]
        pub dropout: f64 = 0.0,
        /// Modules that get an adapter: `all-linear` (all linear modules of the decoder layers), an array of names, or, as in PEFT, a regular
        /// expression that matches the full name, such as `'.*\.(0|2)\.mlp\.(gate|up)_proj'`. A name in the array is a full name,
        /// `model.layers.1.mlp.up_proj`, or the end of one after a dot, `up_proj`. `embed_tokens` and `lm_head` get an adapter only if they are
        /// named. For single experts, PEFT 0.21 loads adapters of gate, up and down together, or of down alone, in models without dense layers;
        /// it refuses or misreads others. It loads `target_parameters`.
        #[also(
            "lora.target", "lora.targets", "lora.lora_target", "lora.lora_target_modules", "lora_target", "lora_target_modules",
            "target_modules",
        )]
        pub target_modules: ModuleSet = ModuleSet::AllLinear,
        /// Stacked matrices of all experts, and routers, that get an adapter too, by PEFT's names: `["mlp.experts.gate_up_proj",
        /// "mlp.experts.down_proj", "mlp.gate.weight"]` (gpt-oss: `mlp.router.weight`; PEFT cannot read the router of GLM-4.5). In a model with
        /// experts, `all-linear` means the first two and the linear modules of attention. `1.mlp.experts.down_proj` names those of one layer.
        #[also("lora_target_parameters")]
        pub target_parameters: Vec<String> = Vec::new(),
        /// Modules that are trained as full copies: `embed_tokens`, `lm_head` and norms. As in PEFT, a name means all modules whose names end in
        /// it (`norm`: every norm; `model.norm`: the last), and the copies of tied matrices are trained separately. The matrix of
        /// `head.kind = "seq_classification"` is always trained. `sinks`, the attention sinks of gpt-oss, have no name in PEFT's files and are
        /// saved in `extra_trained.safetensors`.
        #[also("additional_trainable_modules", "lora.additional_target", "additional_target", "lora_modules_to_save")]
        pub modules_to_save: Vec<String> = Vec::new(),
        /// Modules without an adapter although `target_modules` names them: full names, the ends of names after a dot, or a regular expression
        /// that matches full names. As in PEFT, `target_parameters` are not affected.
        pub exclude_modules: ModuleSet = ModuleSet::NONE,
        /// Layers that get an adapter, counted from 0; `[]` means all. As in PEFT, a module that `target_modules` names in full always gets one.
        #[also("peft_layers_to_transform")]
        pub layers_to_transform: Vec<usize> = Vec::new(),
        /// Names of the module lists that `layers_to_transform` indexes, as regular expressions, as in PEFT; `[]` is `["layers"]`.
        #[also("peft_layers_pattern")]
        pub layers_pattern: Vec<String> = Vec::new(),
        /// Ranks of some modules, by regular expressions that match the end of their names: `{ q_proj = 16 }`. The first match in alphabetical
        /// order counts, as in PEFT. An entry of `target_parameters` is matched by its name there: `gate.weight`.
        #[rule(COUNT)]
        pub rank_pattern: BTreeMap<String, usize> = BTreeMap::new(),
        /// Values of `alpha` for some modules, written like `rank_pattern`.
        #[rule(positive("usual values are `r` to twice `r`"))]
        pub alpha_pattern: BTreeMap<String, f64> = BTreeMap::new(),
        /// rsLoRA: the update is scaled by `alpha / √r` instead.
        #[also("use_rslora", "peft_use_rslora")]
        pub use_rslora: bool = false,
        /// `DoRA`: the magnitude of each row of a weight is trained separately. It stores one more output per module, and takes more time.
        #[also("use_dora", "peft_use_dora")]
        pub use_dora: bool = false,
        /// The matrix B has a bias.
        pub lora_bias: bool = false,
        /// The biases of the base model that are trained: none, those of the modules with an adapter, or `all` (not where
        /// experts or routers have biases: gpt-oss, GLM-4.5).
        pub bias: TrainedBias = TrainedBias::None,
        /// How a new adapter starts. `uniform`, `gaussian`: the distribution of the matrix A; B is zero. `pissa`: A and B are the largest
        /// singular components of each weight, computed before the first step; the adapter is saved as LoRA of rank `2·r` for the original
        /// weights.
        pub init_lora_weights: InitLora = InitLora::Uniform,
    }
}

/// The settings of a PEFT adapter in its directory.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// What is trained beside an adapter and has no name in PEFT's files, by the names in the model. PEFT leaves this file alone.
pub const EXTRA_TENSORS: &str = "extra_trained.safetensors";
/// Where that file has the names of `modules_to_save` that mean its tensors: in its metadata, as a JSON list.
pub const EXTRA_MODULES: &str = "modules_to_save";

/// The names of `modules_to_save` that mean the tensors of an adapter's [`EXTRA_TENSORS`].
pub fn extra_modules(extra: &TensorFile) -> Vec<String> {
    let listed = extra.metadata().remove(EXTRA_MODULES).and_then(|list| serde_json::from_str(&list).ok());
    listed.unwrap_or_else(|| extra.names())
}

impl LoraRecipe {
    /// What a recipe says, and in place of what it leaves out what the PEFT adapter in `dir` says.
    pub(super) fn of(document: &Document, dir: Option<&Path>) -> Checked<Self> {
        let mut own = Self::read(document)?;
        let is_said = |key: &str| document.has(&format!("lora.{key}"));
        // What is wrong with an adapter is said where it is loaded.
        let read = dir.map(|dir| files::read_json::<Map<String, Json>>(&dir.join(ADAPTER_CONFIG)));
        let Some(Ok(mut table)) = read else { return Ok(own) };
        if let Some(Json::String(bias)) = table.get_mut("bias") {
            bias.make_ascii_lowercase();
        }
        // What the recipe says counts. An empty text says nothing, as where the adapter is loaded.
        table.retain(|key, value| *value != "" && !is_said(if key == "lora_alpha" { "alpha" } else { key }));
        take(&table, "r", &mut own.r);
        take(&table, "lora_alpha", &mut own.alpha);
        take(&table, "target_modules", &mut own.target_modules);
        if !is_said("target_modules") {
            // PEFT writes it for none, where parameters are targets.
            if table.get("target_modules").is_some_and(Json::is_null) {
                own.target_modules = ModuleSet::NONE;
            }
            take_list(&table, "target_parameters", &mut own.target_parameters);
        }
        take_list(&table, "modules_to_save", &mut own.modules_to_save);
        let extra = dir.map(|dir| dir.join(EXTRA_TENSORS)).filter(|path| !is_said("modules_to_save") && files::is_there(path));
        if let Some(Ok(extra)) = extra.map(|path| TensorFile::open(&path)) {
            own.modules_to_save.extend(extra_modules(&extra));
        }
        // A classifier's own matrix is told by the head.
        own.modules_to_save.retain(|name| is_said("modules_to_save") || !["classifier", "score"].contains(&name.as_str()));
        take_list(&table, "layers_to_transform", &mut own.layers_to_transform);
        take_list(&table, "layers_pattern", &mut own.layers_pattern);
        if !is_said("layers_pattern") && own.layers_pattern == ["layers"] {
            own.layers_pattern.clear();
        }
        take(&table, "exclude_modules", &mut own.exclude_modules);
        take(&table, "rank_pattern", &mut own.rank_pattern);
        take(&table, "alpha_pattern", &mut own.alpha_pattern);
        take(&table, "use_rslora", &mut own.use_rslora);
        take(&table, "use_dora", &mut own.use_dora);
        take(&table, "lora_bias", &mut own.lora_bias);
        take(&table, "bias", &mut own.bias);
        Ok(own)
    }

    /// With a default for everything else.
    pub fn plain(r: usize, alpha: f64, dropout: f64, target_modules: ModuleSet) -> Self {
        Self { r, alpha, dropout, target_modules, ..Self::default() }
    }

    /// What such an adapter is called.
    pub fn kind(&self) -> &'static str {
        match (self.use_dora, self.use_rslora) {
            (false, false) => "LoRA",
            (false, true) => "rsLoRA",
            (true, false) => "DoRA",
            (true, true) => "DoRA + rsLoRA",
        }
    }

    /// The adapter beside weights that are drawn: to look for their largest part would take time, and tell nothing.
    pub fn for_drawn_weights(self) -> Self {
        let is_part = self.init_lora_weights == InitLora::Pissa;
        Self { init_lora_weights: if is_part { InitLora::Uniform } else { self.init_lora_weights }, ..self }
    }
}

/// Takes the value of a key of an adapter's settings, where it is there; one that cannot be read is left to whoever loads the adapter.
fn take<T: DeserializeOwned>(table: &Map<String, Json>, key: &str, own: &mut T) {
    if let Some(value) = table.get(key).and_then(|value| serde_json::from_value(value.clone()).ok()) {
        *own = value;
    }
}

/// Takes a list, in whose place may stand its only item.
fn take_list<T: DeserializeOwned>(table: &Map<String, Json>, key: &str, own: &mut Vec<T>) {
    take(table, key, own);
    let mut only: Option<T> = None;
    take(table, key, &mut only);
    own.extend(only);
}

words! {
    #[derive(Default)]
    pub enum TrainedBias {
        #[default]
        None = "none",
        LoraOnly = "lora_only",
        All = "all",
    }
}

words! {
    #[derive(Default)]
    pub enum InitLora {
        #[default]
        Uniform = "uniform" | "kaiming",
        /// Normal, with a standard deviation of 1/r.
        Gaussian = "gaussian",
        Pissa = "pissa",
    }
}
