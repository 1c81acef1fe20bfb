//! `lastrec`: the most recent tokens and the first few, which every query keeps looking at (attention sinks, arXiv 2309.17453).

use serde::Deserialize;

use crate::cache::{CacheError, Entries, Policy, Rank};
use crate::recipe::Choice;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(alias = "sink_tokens")]
    init_grace_tokens: Option<usize>,
}

#[derive(Debug)]
struct Lastrec {
    sinks: usize,
}

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: Params = choice.params()?;
    let sinks = params.init_grace_tokens.unwrap_or_else(|| (cache_length / 8).clamp(1, 16));
    if sinks >= cache_length {
        return Err(choice
            .reject(
                Some("init_grace_tokens"),
                format!("`init_grace_tokens` = {sinks} leaves no slot to evict: `cache_length` is {cache_length}"),
                format!("choose fewer than {cache_length}"),
            )
            .into());
    }
    Ok(Box::new(Lastrec { sinks }))
}

impl Policy for Lastrec {
    fn rank(&self, _entries: &Entries<'_>) -> Rank {
        Rank::ByPosition { keep_first: self.sinks }
    }

    fn sinks(&self) -> usize {
        self.sinks
    }
}
