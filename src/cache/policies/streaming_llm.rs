//! `streaming-llm`: `lastrec` with the four first tokens of its paper (Xiao et al. 2023, arXiv 2309.17453). Departs from it in that
//! keys keep the positions of their tokens instead of those of their slots.

use super::lastrec;
use crate::cache::{CacheError, Policy};
use crate::recipe::PolicyRecipe;

/// As in the paper.
const SINKS: usize = 4;

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    lastrec::with_default(choice, cache_length, SINKS)
}
