//! The recipe: a TOML file becomes a checked, complete plan, or an error that points at the place.
//!
//! The way: `tree` (text with places) → `overrides` (`--set`) → `alias` (other spellings) → `resolve` (types, defaults,
//! contradictions) → `plan` (the [`Recipe`]). No tensor, and no look at files, but for a model by its name on the Hub.
//! A key is a field of its table's struct, with type, default, meaning, rule and other spellings. `table` makes the rest of it.

mod alias;
mod chat;
mod contradictions;
mod data;
mod data_paths;
mod data_sets;
pub(crate) mod diagnose;
mod distill;
mod eval;
mod foreign;
mod format;
mod grad;
mod import;
mod initial_part;
mod kv_cache;
mod load;
mod model;
mod modules;
mod overrides;
mod plan;
mod policy_recipe;
mod read;
mod refusals;
mod resolve;
mod sets_by_name;
mod suggest;
mod table;
mod training;
mod tree;
mod value;
mod words;
mod write;

pub use chat::{Boundary, ChatRecipe, TemplateChoice, TemplateDate, TrainOn};
pub use data::*;
pub use distill::DistillRecipe;
pub use eval::{BestMetric, EvalRecipe, GenerateRecipe, MetricMode};
pub use format::{DataFormat, HelmetFamily, know_formats};
pub use grad::{AttentionOutputs, GradRecipe, KeepGraph, OnOutOfMemory, OpenKey, StoreForm, StorePlace, StoreRecipe};
pub use kv_cache::{BufferKind, CacheLength, CacheRecipe, Chunking, Pyramid, Storage, full_cache_chunk_size};
pub use load::Resolved;
pub use model::{
    ADAPTER_CONFIG, Dtype, EXTRA_MODULES, EXTRA_TENSORS, InitLora, LoraRecipe, ModelRecipe, Quantize, RopeScalingRecipe,
    TrainedBias, extra_modules,
};
pub use modules::{ModuleSet, WrittenRegex, is_named};
pub use policy_recipe::{PolicyRecipe, check_policies_by};
pub use training::*;
pub use {initial_part::*, plan::Recipe, write::Difference};
// What the reference is written from.
#[doc(hidden)]
pub use {alias::FLAT, foreign::FOREIGN, foreign::Meaning, plan::TABLES, plan::dotted_keys, suggest::ADVICE, table::RecipeKey};
