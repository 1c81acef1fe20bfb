//! `triattention`: what queries to come can be expected to look at stays, by statistics of a layer's queries before they are turned to their
//! positions (`TriAttention`, Mao et al. 2026, arXiv 2604.04921), which `kvtune calibrate` takes. A key's score for a query head is that of
//! the mean query at distances of 1, 2, 4, …, 65 536, and of how much longer queries are than it; each head's scores are normalised, and the
//! largest of the query heads of a KV head counts. That is the paper's choice by layer and head. Departs from it in that it decides anew for
//! each chunk, not every 128 tokens, that a prompt's entries leave as all others do, and that the first tokens stay.

use tch::{Kind, Tensor};

use super::params::grace_period_and_sinks;
use crate::cache::{Entries, EvictionOrder, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct Triattention {
    grace: usize,
    sinks: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let [grace, sinks] = grace_period_and_sinks(recipe, cache_length)?;
    Ok(Box::new(Triattention { grace, sinks }))
}

impl Policy for Triattention {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.query_statistics.map(|statistics| {
            let score_bgrc = statistics.score(&entries.keys(), entries.next_position - 1);
            let held_bg1c = entries.position_bgc.ge(0).unsqueeze(2);
            let kind = score_bgrc.kind();
            let count = held_bg1c.sum_dim_intlist(&[-1i64][..], true, kind).clamp_min(1.0);
            let mean = |x: &Tensor| x.where_scalarother(&held_bg1c, 0.0).sum_dim_intlist(&[-1i64][..], true, kind) / &count;
            let around = &score_bgrc - mean(&score_bgrc);
            let deviation = mean(&around.square()).sqrt().clamp_min(1e-6);
            (around / deviation).amax([2i64], false).to_kind(Kind::Float)
        }))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits {
            grace: self.grace,
            sinks: self.sinks,
            compares_heads: true,
            needs_query_statistics: true,
            ..PolicyTraits::default()
        }
    }
}
