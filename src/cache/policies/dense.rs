//! `dense`: keeps everything.

use serde::Deserialize;

use crate::cache::{CacheError, Entries, Policy, Score};
use crate::recipe::Choice;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {}

#[derive(Debug)]
struct Dense;

pub(super) fn build(choice: &Choice, _cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let Params {} = choice.params()?;
    Ok(Box::new(Dense))
}

impl Policy for Dense {
    /// Never asked: nothing leaves a dense cache.
    fn score(&self, _entries: &Entries<'_>) -> Score {
        Score::ByPosition { keep_first: 0 }
    }

    fn evicts(&self) -> bool {
        false
    }
}
