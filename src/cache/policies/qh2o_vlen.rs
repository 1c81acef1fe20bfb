//! `qh2o-vlen`: as `h2o-vlen`, but an entry that suffers from quantisation leaves earlier. It needs a quantised buffer.

use super::qh2o_params::Qh2oParams;
use crate::cache::{CacheError, Policy};
use crate::recipe::PolicyRecipe;

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    Ok(Box::new(Qh2oParams::read(choice, cache_length)?.by_value()))
}
