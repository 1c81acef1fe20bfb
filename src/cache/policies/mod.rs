//! The policies: one file each, and one line in the registry.

mod adakv;
mod dense;
mod expected_attention;
mod h2o;
mod h2o_orig;
mod h2o_vlen;
mod heavy_hitters;
mod keydiff;
mod knorm;
mod lastrec;
mod params;
mod qh2o;
mod qh2o_params;
mod qh2o_vlen;
mod smart_lastrec;
mod snapkv;
mod streaming_llm;
mod tova;

use super::{CacheError, Policy};
use crate::recipe::PolicyRecipe;

/// Builds a policy from its parameters and the cache length of its layer.
pub(super) type Constructor = fn(&PolicyRecipe, usize) -> Result<Box<dyn Policy>, CacheError>;

/// All policies by their recipe names.
pub(crate) use lastrec::rolling;

pub(super) const REGISTRY: &[(&str, Constructor)] = &[
    ("adakv", adakv::build),
    ("dense", dense::build),
    ("expected-attention", expected_attention::build),
    ("h2o", h2o::build),
    ("h2o-orig", h2o_orig::build),
    ("h2o-vlen", h2o_vlen::build),
    ("keydiff", keydiff::build),
    ("knorm", knorm::build),
    ("lastrec", lastrec::build),
    ("qh2o", qh2o::build),
    ("qh2o-vlen", qh2o_vlen::build),
    ("smart-lastrec", smart_lastrec::build),
    ("snapkv", snapkv::build),
    ("streaming-llm", streaming_llm::build),
    ("tova", tova::build),
];

/// The names that a recipe may use.
pub fn names() -> Vec<&'static str> {
    REGISTRY.iter().map(|(name, _)| *name).collect()
}
