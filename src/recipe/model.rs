//! What a recipe says of the model, and of the adapter that is trained on it.

use std::fmt;
use std::path::PathBuf;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Value;

use super::diagnose::Checked;
use super::table::table;
use super::value::{COUNT, PART, RecipeReader, RecipeValue, positive};
use super::words::words;

table! {
    /// The table `[model]`.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ModelRecipe in "model" {
        /// A Hugging Face model directory.
        #[also(
            "model.checkpoint_dir", "model.base_model", "model.model_name_or_path", "model.name_or_path", "checkpoint_dir",
            "base_model", "model_name_or_path", "checkpointer.checkpoint_dir",
        )]
        #[required("the directory of the model")]
        pub path: PathBuf,
        /// A PEFT adapter to start from. It may have `use_rslora`, `rank_pattern`, `alpha_pattern` and `exclude_modules`.
        pub adapter: Option<PathBuf> = None,
        /// Element type of weights and activations. An adapter's matrices are f32 at least. `bf16` trains adapters only.
        #[also("model.precision", "model.torch_dtype", "precision", "dtype", "torch_dtype", "train.precision")]
        #[word("f32", "float32", "fp32", "32-true", "32")]
        #[word("bf16", "bfloat16", "bf16-true")]
        #[word("f64", "float64", "fp64", "64-true", "64")]
        pub dtype: Dtype = Dtype::F32,
        /// A GPU may round the factors of f32 products to 10 bits of mantissa.
        #[also("model.tf32", "train.tf32", "train.allow_tf32", "allow_tf32", "tf32")]
        pub allow_tf32: bool = false,
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
        /// Modules that get an adapter: every linear module of the decoder layers, or `["q_proj", "v_proj", …]`.
        #[also(
            "lora.target", "lora.targets", "lora.lora_target", "lora.lora_target_modules", "lora_target", "lora_target_modules",
            "target_modules",
        )]
        #[word("all-linear", "all", "all_linear")]
        pub target_modules: TargetModules = TargetModules::AllLinear,
        /// Matrices of all experts side by side, and routers, that get an adapter too, by PEFT's names: `["mlp.experts.gate_up_proj",
        /// "mlp.experts.down_proj", "mlp.gate.weight"]`. With `all-linear` the first two do.
        pub target_parameters: Vec<String> = Vec::new(),
    }
}

/// The modules that get an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear module of the decoder layers.
    AllLinear,
    /// By PEFT's names, as `q_proj`.
    Names(Vec<String>),
}

impl RecipeValue for TargetModules {
    fn takes(_: Option<&str>) -> String {
        "`all-linear`, or an array of names".to_owned()
    }

    fn to_value(&self) -> Option<Value> {
        Some(match self {
            Self::AllLinear => Value::from("all-linear"),
            Self::Names(names) => Value::from(names.clone()),
        })
    }

    fn checked(self, reader: &RecipeReader<'_>, key: &str) -> Checked<Self> {
        if let Self::Names(names) = &self {
            reader.distinct(key, names, 1, "write `\"all-linear\"`, or names as `[\"q_proj\", \"v_proj\"]`")?;
        }
        Ok(self)
    }
}

/// `all-linear`, or `q_proj, v_proj`.
impl fmt::Display for TargetModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => f.write_str("all-linear"),
            Self::Names(names) => f.write_str(&names.join(", ")),
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
