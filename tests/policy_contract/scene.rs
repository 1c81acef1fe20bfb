//! A scene: one policy, one buffer, one batch; and the attention that its chunks pay.

use std::ops::Range;

use kvtune::cache::{self, CacheShape, ChunkSpan, Policy};
use kvtune::engine::{ChunkPlan, ColumnWidth};
use kvtune::ops::frequencies::RopeSpec;
use kvtune::ops::query_statistics::{QueryStatistics, QuerySums};
use kvtune::recipe::{BufferKind, PolicyRecipe, Storage};
use tch::{Device, Kind, Tensor};

use super::content::{HEAD_DIM, Head, PER_GROUP, SCALE, TAG_WIDTH, mixed, query};
use super::shelf::{self, EXAMPLE};
use super::slow_policies::{Notes, SlowAttention, SlowStatistics};

/// One policy on one batch.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    /// Recipe name.
    pub(crate) policy: &'static str,
    /// As TOML.
    pub(crate) params: String,
    /// How an entry is stored.
    pub(crate) buffer: BufferKind,
    /// Whether the buffer is sent to the host and back at odd moments.
    pub(crate) is_offloaded: bool,
    /// Caches that grow begin with a few slots.
    pub(crate) storage: Storage,
    /// KV heads.
    pub(crate) groups: i64,
    /// Tokens by sequence.
    pub(crate) lengths: Vec<usize>,
    /// Slots.
    pub(crate) capacity: usize,
    /// Tokens of a chunk.
    pub(crate) chunk: usize,
    /// How many different amounts of attention there are: few make many ties.
    pub(crate) levels: u64,
    /// Tokens of the prefill span, at most: the slots of the smallest layer, if that is not this one.
    pub(crate) first: usize,
    /// Begin and end of the positions that never leave, by sequence, or of each sequence's initial part for a policy that looks for one; empty
    /// where there are none.
    pub(crate) initial_parts: Vec<(usize, usize)>,
}

/// The base of the frequencies.
const THETA: f64 = 1e4;

/// The mean query of a query head before it is turned.
fn mean_query(head: usize) -> Head {
    query([7, head, 0])
}

/// A query to one side of the mean, or to the other.
fn query_beside_mean(head: usize, sign: f64) -> Head {
    let (mean, aside) = (mean_query(head), query([8, head, 0]));
    std::array::from_fn(|i| mean[i] + sign * aside[i])
}

/// Slots that a cache which grows has at first, and of which its pages are.
const FIRST_SLOTS: usize = 3;

impl Scene {
    /// Statistics of the layer's queries, where the policy needs them.
    pub(crate) fn query_statistics(&self) -> Option<QueryStatistics> {
        let frequencies = RopeSpec::plain(THETA, HEAD_DIM).frequencies(&[1], Kind::Double, Device::Cpu);
        let heads = 0..self.groups as usize * PER_GROUP;
        // Two queries for each head, at equal distance to either side of its mean.
        let queries = |sign: f64| heads.clone().map(|head| query_beside_mean(head, sign)).collect::<Vec<Head>>();
        let mut sums = QuerySums::default();
        for sign in [1.0, -1.0] {
            let all = queries(sign).concat();
            sums.add(&Tensor::from_slice(&all).view([1, -1, 1, HEAD_DIM as i64]), HEAD_DIM as i64 / 2);
        }
        let [mean_hd, length_excess_hf] = sums.statistics(Some(&frequencies)).unwrap();
        let statistics = || QueryStatistics::new([&mean_hd, &length_excess_hf], Some(frequencies));
        self.build().traits().needs_query_statistics.then(statistics)
    }

    /// The policy.
    pub(crate) fn build(&self) -> Box<dyn Policy> {
        let recipe = PolicyRecipe::with_params(self.policy, toml::from_str(&self.params).unwrap());
        let build = if self.policy == EXAMPLE { shelf::build } else { cache::build };
        build(&recipe, self.capacity).unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// The policy whose scores count and its parameters, and the floor of one that shares out slots by them.
    pub(crate) fn rule(&self) -> (String, toml::Table, Option<f64>) {
        let params: toml::Table = toml::from_str(&self.params).unwrap();
        if self.policy != "adakv" {
            return (self.policy.to_owned(), params, None);
        }
        let floor = params.get("floor").map_or_else(|| self.default_floor(), |floor| floor.as_float().unwrap());
        let (name, inner) = match params.get("policy") {
            None => ("snapkv".to_owned(), toml::Table::new()),
            Some(toml::Value::String(name)) => (name.clone(), toml::Table::new()),
            Some(table) => {
                let (name, inner) = table.as_table().unwrap().iter().next().unwrap();
                (name.clone(), inner.as_table().unwrap().clone())
            }
        };
        (name, inner, Some(floor))
    }

    /// A fifth; in a small cache as much as leaves a slot beside the window of the default `snapkv`, which is protected.
    fn default_floor(&self) -> f64 {
        let window = (self.capacity / 8).clamp(1, 32);
        if self.capacity / 5 > window { 0.2 } else { ((window as f64 + 1.5) / self.capacity as f64).min(1.0) }
    }

    /// Of a sequence's initial part, so many tokens stay; of any other range, all.
    fn most_protected(&self) -> usize {
        if self.policy != "smart-lastrec" {
            return usize::MAX;
        }
        let fraction = self.rule().1.get("max_initial_fraction").map_or(0.1, |fraction| fraction.as_float().unwrap());
        ((fraction * self.capacity as f64) as usize).max(1)
    }

    /// Whether a position of a sequence is protected.
    pub(crate) fn protects(&self, sequence: usize, position: usize) -> bool {
        let stays =
            |&(start, end): &(usize, usize)| (start..end.min(start.saturating_add(self.most_protected()))).contains(&position);
        self.initial_parts.get(sequence).is_some_and(stays)
    }

    /// What the cache is told of it.
    pub(crate) fn told(&self, policy: &dyn Policy) -> Vec<Range<usize>> {
        let traits = policy.traits();
        let told =
            |&(start, end): &(usize, usize)| if traits.initial_part.is_some() { traits.kept_of(start..end) } else { start..end };
        self.initial_parts.iter().map(told).collect()
    }

    /// The largest chunk that never evicts itself or what is protected.
    pub(crate) fn largest_chunk(&self) -> usize {
        let policy = self.build();
        let longest = self.initial_parts.iter().map(|(start, end)| end - start).max().unwrap_or(0);
        // A policy that looks for an initial part allows for it.
        let beside = if policy.traits().initial_part.is_some() { 0 } else { longest };
        policy.traits().max_chunk_size(self.capacity).saturating_sub(beside)
    }

    /// Tokens of the longest sequence.
    pub(crate) fn total(&self) -> usize {
        self.lengths.iter().copied().max().unwrap()
    }

    /// The chunks. A cache that evicts nothing holds the whole batch.
    pub(crate) fn plan(&self, evicts: bool) -> ChunkPlan {
        let span = if evicts { self.capacity.min(self.first) } else { self.total() };
        ChunkPlan::new(&self.lengths, span, self.chunk, ColumnWidth::Chunks(1))
    }

    /// The dimensions of the cache.
    pub(crate) fn shape(&self, evicts: bool) -> CacheShape {
        let cache_length = if evicts { self.capacity.min(self.total()) } else { self.total() };
        CacheShape {
            batch: self.lengths.len() as i64,
            groups: self.groups,
            head_dim: HEAD_DIM as i64,
            model_feature: self.build().traits().model_feature,
            further: &[TAG_WIDTH],
            cache_length,
            allocated: if self.storage == Storage::Preallocated { cache_length } else { FIRST_SLOTS },
            is_paged: self.storage == Storage::Paged,
            buffer: self.buffer,
            is_offloaded: self.is_offloaded,
            kind: Kind::Double,
            device: Device::Cpu,
        }
    }

    /// What the token at `query` pays to the one at `position`: multiples of 1/8, which sum without rounding.
    fn pays(&self, [sequence, head]: [usize; 2], query: usize, position: usize) -> f32 {
        let level = mixed(&[7, sequence, head, query, position]) % self.levels;
        if position <= query { level as f32 / 8.0 } else { 0.0 }
    }

    /// What the `last` positions of a chunk (or all of them) pay to `position`. Pads pay nothing.
    pub(crate) fn paid_at(&self, [sequence, head]: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize) -> f32 {
        let first = last.map_or(0, |last| span.len.saturating_sub(last));
        (first..span.real_of(sequence)).map(|at| self.pays([sequence, head], span.start + at, position)).sum()
    }
}

impl SlowAttention for Scene {
    fn query_statistics(&self, query_head: usize) -> SlowStatistics {
        let (mean, half) = (mean_query(query_head), HEAD_DIM / 2);
        let length = |x: &Head, f: usize| x[f].hypot(x[f + half]);
        let of_both = |f| [1.0, -1.0].map(|sign| length(&query_beside_mean(query_head, sign), f)).iter().sum::<f64>() / 2.0;
        let longer = (0..half).map(|f| of_both(f) - length(&mean, f)).collect();
        let speed = (0..half).map(|f| THETA.powf(-(f as f64) / half as f64)).collect();
        SlowStatistics { mean, longer, speed, distances: (0..=16).map(|power| 2f64.powi(power)).collect() }
    }

    fn mass(&self, at: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize, _: &Notes) -> f32 {
        self.paid_at(at, span, last, position)
    }

    fn query(&self, at: [usize; 3]) -> Head {
        query(at)
    }

    fn shape(&self) -> (usize, f64) {
        (PER_GROUP, SCALE)
    }
}
