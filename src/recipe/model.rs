//! What a recipe says of the model, and of the adapter that is trained on it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use toml::Value;

use super::diagnose::Checked;
use super::table::table;
use super::value::{COUNT, PART, RecipeReader, RecipeValue, positive};
use super::words::words;
use crate::files;

table! {
    /// The table `[model]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ModelRecipe in "model" {
        /// A Hugging Face model directory; where there is none, a name on the Hub as `"Qwen/Qwen2.5-0.5B"`, which is looked up in the
        /// Hugging Face cache (`HF_HUB_CACHE`, `HF_HOME`). Nothing is downloaded: `hf download` does that.
        #[also(
            "model.checkpoint_dir", "model.base_model", "model.model_name_or_path", "model.name_or_path", "checkpoint_dir",
            "base_model", "model_name_or_path", "checkpointer.checkpoint_dir", "model.name",
        )]
        #[required("the directory of the model")]
        pub path: PathBuf,
        /// Branch, tag or commit of a model that is named as on the Hub.
        #[also("model.model_revision", "model_revision", "revision")]
        #[default("`main`")]
        pub revision: Option<String> = None,
        /// A PEFT adapter to start from. What `[lora]` leaves out but `r`, `alpha` and `target_modules` is as in the adapter.
        #[also("lora_model_dir", "adapter_name_or_path")]
        pub adapter: Option<PathBuf> = None,
        /// Element type of weights and activations. An adapter's matrices are f32 at least. Weights that are trained in
        /// `bf16` have f32 masters, which the checkpoint holds with the optimiser's state.
        #[also("model.precision", "model.torch_dtype", "precision", "dtype", "torch_dtype", "train.precision")]
        #[word("f32", "float32", "fp32", "32-true", "32")]
        #[word("bf16", "bfloat16", "bf16-true")]
        #[word("f64", "float64", "fp64", "64-true", "64")]
        pub dtype: Dtype = Dtype::F32,
        /// A GPU may round the factors of f32 products to 10 bits of mantissa.
        #[also("model.tf32", "train.tf32", "train.allow_tf32", "allow_tf32", "tf32")]
        pub allow_tf32: bool = false,
        /// In place of what `config.json` says of scaled rotary embeddings: `{ rope_type = "dynamic_yarn",
        /// original_max_position_embeddings = 8192, beta_fast = 32.0, beta_slow = 1.0 }`, `YaRN` by the length of each sequence, as in
        /// `keys_values`. Sequences up to the original length (without one, that of `config.json`) are as without scaling.
        pub rope_scaling: Option<RopeScalingRecipe> = None,
    }
}

impl ModelRecipe {
    /// A name on the Hub becomes the directory of its snapshot, which is another one after the next download.
    pub(super) fn located(self, reader: &RecipeReader<'_>) -> Self {
        let written = reader.document.root.entry("model.path").and_then(|entry| entry.node.as_str());
        let name = written.filter(|_| !self.path.exists());
        let snapshot = name.and_then(|name| files::hub_snapshot(name, self.revision.as_deref()));
        Self { path: snapshot.unwrap_or(self.path), ..self }
    }
}

/// How rotary embeddings are scaled, whatever the model's files say.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScalingRecipe {
    /// By which rule.
    #[serde(alias = "type")]
    pub rope_type: RopeType,
    /// Tokens of the sequences that the model was first trained on; as in its files, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_max_position_embeddings: Option<usize>,
    /// Pairs of channels that turn more often than this over the original length are kept.
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    /// Pairs that turn less often than this are stretched.
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

words! {
    /// A rule by which rotary embeddings are scaled that models' files do not have.
    pub enum RopeType {
        /// `YaRN`, whose factor is how many times longer a sequence is than the original length.
        DynamicYarn = "dynamic_yarn",
    }
}

impl RecipeValue for RopeScalingRecipe {
    fn takes(_: Option<&str>) -> String {
        "table".to_owned()
    }

    fn to_value(&self) -> Option<Value> {
        let original =
            self.original_max_position_embeddings.map(|tokens| ("original_max_position_embeddings", (tokens as i64).into()));
        let all = [
            ("rope_type", self.rope_type.name().into()),
            ("beta_fast", self.beta_fast.into()),
            ("beta_slow", self.beta_slow.into()),
        ];
        Some(Value::Table(all.into_iter().chain(original).map(|(key, value): (&str, Value)| (key.to_owned(), value)).collect()))
    }

    fn checked(self, reader: &RecipeReader<'_>, key: &str) -> Checked<Self> {
        if self.original_max_position_embeddings == Some(0) {
            let message = format!("`{key}.original_max_position_embeddings` must be at least 1, found 0");
            return reader.refuse(
                key,
                message,
                "write the length in tokens that the model was first trained on, or leave it out",
            );
        }
        let Self { beta_fast, beta_slow, .. } = self;
        if beta_slow > 0.0 && beta_fast > beta_slow && beta_fast.is_finite() {
            return Ok(self);
        }
        let message =
            format!("`{key}.beta_fast` must be more than `beta_slow`, and both more than 0, found {beta_fast} and {beta_slow}");
        reader.refuse(key, message, "usual values are 32 and 1")
    }
}

words! {
    /// The element type of weights and activations.
    pub enum Dtype {
        /// 32-bit floats.
        F32 = "f32",
        /// Brain floats.
        Bf16 = "bf16",
        /// 64-bit floats, for checks.
        F64 = "f64",
    }
}

table! {
    /// The table `[lora]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct LoraRecipe in "lora" {
        /// Rank of the adapter.
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
        /// Modules that get an adapter: every linear module of the decoder layers, `["q_proj", "v_proj", …]`, or as in PEFT a regular
        /// expression that matches whole names, as `'.*\.(0|2)\.mlp\.(gate|up)_proj'`.
        #[also(
            "lora.target", "lora.targets", "lora.lora_target", "lora.lora_target_modules", "lora_target", "lora_target_modules",
            "target_modules",
        )]
        #[word("all-linear", "all", "all_linear")]
        pub target_modules: TargetModules = TargetModules::AllLinear,
        /// Matrices of all experts side by side, and routers, that get an adapter too, by PEFT's names: `["mlp.experts.gate_up_proj",
        /// "mlp.experts.down_proj", "mlp.gate.weight"]` (`mlp.router.weight` of gpt-oss; that of GLM-4.5 PEFT cannot read). With
        /// `all-linear` the first two do, and of all other linears those of attention.
        pub target_parameters: Vec<String> = Vec::new(),
        /// Modules of which whole copies are trained beside the adapter: `embed_tokens`, `lm_head`. Of a tied model each is a copy of its own,
        /// as in PEFT. The matrix of `head.kind = "seq_classification"` is always one.
        #[also("additional_trainable_modules", "lora.additional_target", "additional_target", "lora_modules_to_save")]
        pub modules_to_save: Vec<String> = Vec::new(),
        /// Modules that get none though they are among `target_modules`: whole names, or the ends of names from behind a dot.
        pub exclude_modules: Vec<String> = Vec::new(),
        /// The layers that get an adapter, from 0; `[]` are all.
        #[also("peft_layers_to_transform")]
        pub layers_to_transform: Vec<usize> = Vec::new(),
        /// Ranks of some modules, by regular expressions that match their names to the end: `{ q_proj = 16 }`. The first in alphabetical
        /// order that matches counts, which is PEFT's order, too.
        #[rule(COUNT)]
        pub rank_pattern: BTreeMap<String, usize> = BTreeMap::new(),
        /// The same for `alpha`.
        #[rule(positive("usual values are `r` to twice `r`"))]
        pub alpha_pattern: BTreeMap<String, f64> = BTreeMap::new(),
        /// rsLoRA: the update is scaled by `alpha / √r` instead.
        #[also("use_rslora", "peft_use_rslora")]
        pub use_rslora: bool = false,
        /// `DoRA`: the length of each row of a weight is trained by itself. It takes one more output per module, and more time.
        #[also("use_dora", "peft_use_dora")]
        pub use_dora: bool = false,
        /// The matrix B has a bias.
        pub lora_bias: bool = false,
        /// The biases of the base model that are trained: none, or those of the modules with an adapter.
        pub bias: TrainedBias = TrainedBias::None,
        /// How the matrix A of a new adapter is drawn; B begins as zero. With `pissa` both begin as the largest part of each weight,
        /// which is found before the first step, and what is saved is LoRA of rank `2·r` beside the weights as they were.
        #[word("uniform", "kaiming")]
        pub init_lora_weights: InitLora = InitLora::Uniform,
    }
}

impl LoraRecipe {
    /// With a default for everything else.
    pub fn plain(r: usize, alpha: f64, dropout: f64, target_modules: TargetModules) -> Self {
        Self {
            r,
            alpha,
            dropout,
            target_modules,
            target_parameters: Vec::new(),
            modules_to_save: Vec::new(),
            exclude_modules: Vec::new(),
            layers_to_transform: Vec::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            use_rslora: false,
            use_dora: false,
            lora_bias: false,
            bias: TrainedBias::None,
            init_lora_weights: InitLora::Uniform,
        }
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

    /// The same for weights that are drawn: to look for their largest part would take time, and tell nothing.
    pub fn for_drawn_weights(self) -> Self {
        let is_part = self.init_lora_weights == InitLora::Pissa;
        Self { init_lora_weights: if is_part { InitLora::Uniform } else { self.init_lora_weights }, ..self }
    }
}

words! {
    /// Which biases of the base model are trained beside an adapter.
    pub enum TrainedBias {
        /// None.
        None = "none",
        /// Those of the modules that have an adapter.
        LoraOnly = "lora_only",
    }
}

words! {
    /// How a new adapter begins.
    pub enum InitLora {
        /// Uniform in ±1/√in.
        Uniform = "uniform",
        /// Normal, with a standard deviation of 1/r.
        Gaussian = "gaussian",
        /// Both matrices are the largest singular values of the weight with their vectors, and the weight keeps the rest.
        Pissa = "pissa",
    }
}

/// The modules that get an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear module of the decoder layers.
    AllLinear,
    /// By PEFT's names, as `q_proj`.
    Names(Vec<String>),
    /// By a regular expression that matches whole names, as `model.layers.3.mlp.up_proj`.
    Matching(String),
}

impl RecipeValue for TargetModules {
    fn takes(_: Option<&str>) -> String {
        "`all-linear`, an array of names, or a regular expression".to_owned()
    }

    fn to_value(&self) -> Option<Value> {
        Some(match self {
            Self::AllLinear => Value::from("all-linear"),
            Self::Names(names) => Value::from(names.clone()),
            Self::Matching(expression) => Value::from(expression.clone()),
        })
    }

    fn checked(self, reader: &RecipeReader<'_>, key: &str) -> Checked<Self> {
        if let Self::Names(names) = &self {
            reader.distinct(key, names, 1, "write `\"all-linear\"`, or names as `[\"q_proj\", \"v_proj\"]`")?;
        }
        Ok(self)
    }
}

/// `all-linear`, `q_proj, v_proj`, or the expression.
impl fmt::Display for TargetModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => f.write_str("all-linear"),
            Self::Names(names) => f.write_str(&names.join(", ")),
            Self::Matching(expression) => f.write_str(expression),
        }
    }
}

impl<'de> Deserialize<'de> for TargetModules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WordOrList;

        impl<'de> Visitor<'de> for WordOrList {
            type Value = TargetModules;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`\"all-linear\"` or an array of module names")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<TargetModules, E> {
                match word {
                    "all-linear" => Ok(TargetModules::AllLinear),
                    // A whole name has dots, which a word without any sign matches nowhere: it is a slip of the pen.
                    _ if word.contains(|sign: char| !sign.is_alphanumeric() && !matches!(sign, '_' | '-' | ' ')) => {
                        Ok(TargetModules::Matching(word.to_owned()))
                    }
                    _ => Err(E::unknown_variant(word, &["all-linear", "[\"q_proj\", …]"])),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, names: A) -> Result<TargetModules, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(names)).map(TargetModules::Names)
            }
        }

        deserializer.deserialize_any(WordOrList)
    }
}
