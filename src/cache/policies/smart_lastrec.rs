//! `smart-lastrec`: the most recent tokens, and the initial part of the prompt: what stands before the end that a regular expression
//! finds, up to a part of the cache.

use serde::Deserialize;

use crate::cache::{Entries, EvictionOrder, Policy, PolicyTraits, Scope};
use crate::recipe::{InitialPart, PolicyRecipe, WrittenRegex};
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SmartLastrecParams {
    end_initial_regex: WrittenRegex,
    max_initial_fraction: Option<f64>,
    include_end_string: Option<bool>,
    #[serde(default)]
    pad_id: u32,
    range_is_prefix: Option<bool>,
}

#[derive(Debug)]
struct SmartLastrec {
    initial: InitialPart,
    /// Tokens of the initial part that stay.
    most: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let p: SmartLastrecParams = recipe.params()?;
    let fraction = p.max_initial_fraction.unwrap_or(0.1);
    if !(fraction > 0.0 && fraction < 1.0) {
        let message = format!("`max_initial_fraction` = {fraction} is not between 0 and 1");
        return Err(recipe.reject(Some("max_initial_fraction"), message, "choose a part of the cache, as 0.1".into()));
    }
    let initial = InitialPart {
        end_regex: p.end_initial_regex,
        include_end_string: p.include_end_string.unwrap_or(true),
        pad_id: p.pad_id,
        range_is_prefix: p.range_is_prefix.unwrap_or(true),
    };
    let most = ((cache_length as f64 * fraction) as usize).max(1);
    Ok(Box::new(SmartLastrec { initial, most }))
}

impl Policy for SmartLastrec {
    fn score(&self, _entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::ByPosition { keep_first: 0 }
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { initial_part: Some((&self.initial, self.most)), scope: Scope::Sequence, ..PolicyTraits::default() }
    }
}
