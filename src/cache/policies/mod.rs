//! The policies: one file for each way to score, and one line for each name in the registry.

mod adakv;
mod defensivekv;
mod dense;
mod dropkv;
mod expected_attention;
mod heavy_hitters;
mod keydiff;
mod knorm;
mod lagkv;
mod lastrec;
mod learned;
mod params;
mod registry;
mod rkv;
mod smart_lastrec;
mod snapkv;
mod tova;
mod triattention;
mod window;

pub(crate) use lastrec::rolling;
pub(crate) use params::STREAMING_LLM_SINKS;
pub use registry::{PolicyEntry, REGISTRY, build, initial_part, names, of_any_length};

use super::Policy;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

/// Builds a policy from its parameters and the cache length of its layer.
type Constructor = fn(&PolicyRecipe, usize) -> Result<Box<dyn Policy>, Fault>;
