//! `qh2o`: as `h2o`, but an entry that suffers from quantisation leaves earlier. It needs a quantised buffer.

use super::qh2o_params::Params;
use crate::cache::{CacheError, Policy};
use crate::recipe::Choice;

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    Ok(Box::new(Params::read(choice, cache_length)?))
}
