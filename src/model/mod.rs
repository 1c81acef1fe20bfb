//! Learned weights and how they act on hidden states; knows no cache and no tokenizer.
//!
//! A [`Model`] is read from a directory in Hugging Face's layout. What is trained is an [`Adapter`] (LoRA) beside its frozen
//! weights, or the weights themselves; [`Model::parameters`] are either. What remembers the past plugs in through [`Attend`], so that the
//! same layers serve plain attention, caches and their backward.

mod adapter;
mod adapter_files;
mod all_weights;
mod attend;
mod attention;
mod captured;
mod causal_lm;
mod check;
mod config;
mod config_file;
mod count;
mod decoder;
mod embedding;
mod families;
mod feed_forward;
mod fields;
mod fingerprint;
mod footprint;
mod gates;
mod init;
mod io_layers;
mod layout;
mod linear;
mod load;
mod merge;
mod names;
mod peft;
mod positions;
mod projection;
mod quantised;
mod random;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod small;
mod source;
mod spec;
mod targets;
mod tensor_problems;
mod vectors;
mod waiting_layers;
mod weights;
mod without_adapter;

pub use adapter::{Adapter, AdapterFeature};
pub use all_weights::{CHAT_TEMPLATE, companions};
pub use attend::{Attend, Qkv, Routed};
pub use captured::{CapturedLayers, ColumnLayers};
pub use causal_lm::Model;
pub use config::{ModelConfig, ModelLinear, PackedSize, PackedSizes};
pub use count::{TrainedPart, sizes_of_weights, trained_by_kind};
pub use fingerprint::{fingerprint, has_fingerprint};
pub use footprint::{ColumnShape, LayerBytes, LayerFootprint};
pub use gates::{GATE_TENSORS, Gates};
pub use init::init_model;
pub use load::kind_of;
pub use merge::MergedModel;
pub use peft::{ADAPTER_CONFIG, ADAPTER_TENSORS, EXTRA_TENSORS, LayerLists, ModulePatterns, PeftConfig, PeftFiles, read_peft};
pub use positions::{DropoutContext, Positions};
pub use projection::Projection;
#[cfg(test)]
pub(crate) use simulated::while_graphs_are_simulated;
pub use source::ModelSource;
pub use spec::{
    Activation, AttentionSpec, DynamicYarnScaling, ExpertNames, ExpertsSpec, FeedForwardSpec, LayerNorms, LayerSpec, LinearSpec,
    Llama3Scaling, LongRopeScaling, NormSpec, Preference, QkNorm, QueryGrowth, RopeScaling, RopeSpec, YarnScaling,
};
pub use waiting_layers::ModelPlacement;
pub use weights::MODEL_TENSORS;

use crate::units::{Fault, FaultKind, quoted};

/// A value of a key of `[lora]` that can't be had.
fn bad_setting(key: &str, found: &str, expected: &str) -> Fault {
    let message = format!("`lora.{key}` is {}, expected {expected}", quoted(found));
    Fault::usage(message, format!("correct `lora.{key}` in the recipe")).of_kind(FaultKind::BadSetting)
}
