//! The policies: one file each, and one line in the registry.

mod dense;
mod h2o;
mod lastrec;

use super::{CacheError, Policy};
use crate::recipe::Choice;

/// Builds a policy from its parameters and the cache length of its layer.
pub(super) type Constructor = fn(&Choice, usize) -> Result<Box<dyn Policy>, CacheError>;

/// All policies by their recipe names.
pub(super) const REGISTRY: &[(&str, Constructor)] = &[("dense", dense::build), ("h2o", h2o::build), ("lastrec", lastrec::build)];

/// The names that a recipe may use.
pub fn names() -> Vec<&'static str> {
    REGISTRY.iter().map(|(name, _)| *name).collect()
}
