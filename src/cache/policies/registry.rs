//! The registry: the policies by their recipe names.

use super::params::STREAMING_LLM_SINKS;
use super::{
    Constructor, adakv, defensivekv, dense, dropkv, expected_attention, heavy_hitters, keydiff, knorm, lagkv, lastrec, learned,
    rkv, smart_lastrec, snapkv, tova, triattention,
};
use crate::cache::Policy;
use crate::recipe::{InitialPart, PolicyRecipe};
use crate::units::Fault;

/// A policy that a recipe may name.
#[derive(Clone, Copy, Debug)]
pub struct PolicyEntry {
    pub name: &'static str,
    /// What stays in the cache.
    pub keeps: &'static str,
    build: Constructor,
}

/// All policies, in alphabetical order.
pub const REGISTRY: &[PolicyEntry] = &[
    entry("adakv", "what another policy keeps, with a larger budget for heads", |c, n| adakv::around(c, n, build)),
    entry(
        "defensivekv",
        "what one of the last few queries of a chunk would miss most, by attention and by what values add",
        defensivekv::build,
    ),
    entry("dense", "everything", dense::build),
    entry(
        "dropkv",
        "entries without which the outputs of the last few queries of a chunk would move, with their neighbours",
        dropkv::build,
    ),
    entry("expected-attention", "what queries like those of the last chunk are expected to attend to", expected_attention::build),
    entry("h2o", "the largest attention mass so far", heavy_hitters::h2o),
    entry("h2o-orig", "as `h2o`, attention mass summed over the sequences of the batch", heavy_hitters::h2o_orig),
    entry("h2o-vlen", "as `h2o`, attention mass weighted with the norm of the value", heavy_hitters::h2o_vlen),
    entry("keydiff", "keys that point elsewhere than most", keydiff::build),
    entry("knorm", "keys of small norm", knorm::build),
    entry("lagkv", "tokens whose keys and values spread unlike those of the next partition", lagkv::build),
    entry("lastrec", "the most recent tokens and the first few", lastrec::build),
    entry("learned", "what the model's gates expect to matter", learned::build),
    entry("qh2o", "as `h2o`, but entries that suffer from quantisation leave earlier", heavy_hitters::qh2o),
    entry("qh2o-vlen", "as `h2o-vlen`, but entries that suffer from quantisation leave earlier", heavy_hitters::qh2o_vlen),
    entry(
        "rkv",
        "what the last few queries of a chunk attend to, with its neighbours, unless other keys of its chunk resemble it",
        rkv::build,
    ),
    entry("smart-lastrec", "the most recent tokens and the initial part of each sequence's prompt", smart_lastrec::build),
    entry("snapkv", "what the last few queries of a chunk attend to, with its neighbours", snapkv::build),
    entry("streaming-llm", "as `lastrec`, with the four first tokens", |c, n| lastrec::with_default(c, n, STREAMING_LLM_SINKS)),
    entry("tova", "what the last query of a chunk attends to", tova::build),
    entry(
        "triattention",
        "what queries to come can be expected to attend to, by statistics of the layer's queries",
        triattention::build,
    ),
];

const fn entry(name: &'static str, keeps: &'static str, build: Constructor) -> PolicyEntry {
    PolicyEntry { name, keeps, build }
}

pub fn names() -> Vec<&'static str> {
    REGISTRY.iter().map(|entry| entry.name).collect()
}

/// Builds the policy that a recipe names, for a layer of `cache_length` slots.
pub fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let entry = REGISTRY.iter().find(|entry| entry.name == recipe.name).ok_or_else(|| recipe.unknown(&names()))?;
    (entry.build)(recipe, cache_length)
}

/// The policy that a recipe names, to be asked for what no length of a cache changes: what it needs, and not how many tokens stay.
pub fn of_any_length(recipe: &PolicyRecipe) -> Result<Box<dyn Policy>, Fault> {
    build(recipe, usize::MAX)
}

/// What the initial part of a prompt is for the policy that a recipe names, if that protects it.
pub fn initial_part(recipe: &PolicyRecipe) -> Result<Option<InitialPart>, Fault> {
    Ok(of_any_length(recipe)?.traits().initial_part.map(|(part, _)| part.clone()))
}
