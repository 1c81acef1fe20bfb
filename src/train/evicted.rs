//! What the caches evict of a run: as the lengths of its samples tell before it begins, and as its steps have recorded it.

use std::fmt;

use crate::cache::{ChunkSpan, ReplayLog};
use crate::engine::Settings;
use crate::recipe::Recipe;
use crate::report::metrics::Evicted;
use crate::units::{Fault, counted};
use crate::verify::{departures, stays};

#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedEvictions {
    policy: String,
    samples: usize,
    longest: usize,
    /// Slots of the smallest cache and of the largest.
    slots: (usize, usize),
    /// Samples that are longer than the smallest cache.
    longer: usize,
    /// The part of their entries that leaves, over all layers under the policy.
    share: f64,
}

impl ExpectedEvictions {
    /// For samples of so many tokens; `None` where the policy never evicts.
    pub fn new(recipe: &Recipe, settings: &Settings, lengths: &[usize]) -> Option<Self> {
        let slots: Vec<usize> = settings.policy_slots().into_iter().flatten().collect();
        let (smallest, largest) = (*slots.iter().min()?, *slots.iter().max()?);
        if settings.keeps_all() {
            return None;
        }
        let longer: Vec<usize> = lengths.iter().copied().filter(|&tokens| tokens > smallest).collect();
        let evicted: usize = longer.iter().flat_map(|tokens| slots.iter().map(|slots| tokens.saturating_sub(*slots))).sum();
        let entries = longer.iter().sum::<usize>() * slots.len();
        Some(Self {
            policy: recipe.kv_cache.policy.name.clone(),
            samples: lengths.len(),
            longest: lengths.iter().copied().max().unwrap_or(0),
            slots: (smallest, largest),
            longer: longer.len(),
            share: evicted as f64 / entries.max(1) as f64,
        })
    }

    /// What is to be looked at, where nothing will be evicted.
    pub fn warning(&self) -> Option<String> {
        let Self { policy, longest, slots: (smallest, _), .. } = self;
        let why = format!("no sample is longer than the cache ({longest} tokens at most, {smallest} slots)");
        let advice = "the run is the same as with `dense`; lower `kv_cache.cache_length`, or train on longer samples";
        (self.longer == 0).then(|| format!("the policy `{policy}` evicts nothing: {why}; {advice}"))
    }
}

impl fmt::Display for ExpectedEvictions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { samples, longer, slots: (smallest, largest), share, .. } = self;
        let slots = if smallest == largest { smallest.to_string() } else { format!("{smallest} to {largest}") };
        let (samples, are) = (counted(*samples, "sample"), if *longer == 1 { "is" } else { "are" });
        write!(f, "{longer} of {samples} {are} longer than the cache ({slots} slots); ")?;
        if *longer == 0 {
            write!(f, "nothing is evicted")
        } else {
            write!(f, "{:.1} % of their entries are evicted", 100.0 * share)
        }
    }
}

/// What each layer has evicted, from the choices of a micro-batch.
pub(super) fn evicted_by_layer(log: &ReplayLog) -> Result<Vec<Evicted>, Fault> {
    let batch = log.spans.first().map_or(0, ChunkSpan::num_sequences);
    let tokens: Vec<usize> = (0..batch).map(|b| log.spans.iter().map(|span| span.real_of(b)).sum()).collect();
    let layer = |layer: usize| {
        let mut sums = Evicted::default();
        for (heads, &tokens) in departures(log, layer, log.num_deciders(layer))?.iter().zip(&tokens) {
            for head in heads {
                sums.entries += tokens as f64;
                for stay in stays(&head[..tokens]).flatten() {
                    sums.evicted += 1.0;
                    sums.stay += stay as f64;
                }
            }
        }
        Ok(sums)
    };
    (0..log.layers.len()).map(layer).collect()
}
