//! A scene: one policy, one buffer, one batch; and the attention that its chunks pay.

use kvtune::cache::{self, CacheShape, ChunkSpan, Policy};
use kvtune::engine::{ChunkPlan, ColumnWidth};
use kvtune::ops::expected_queries::ExpectedQueries;
use kvtune::ops::frequencies::RopeSpec;
use kvtune::recipe::{BufferKind, PolicyRecipe, Storage};
use tch::{Device, Kind, Tensor};

use super::content::{HEAD_DIM, Head, PER_GROUP, SCALE, TAG_WIDTH, mixed, query};
use super::shelf::{self, EXAMPLE};
use super::slow_policies::{LikelyQueries, Notes, SlowAttention};

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
    /// Columns of a chunk.
    pub(crate) chunk: usize,
    /// How many different amounts of attention there are: few make many ties.
    pub(crate) levels: u64,
    /// Tokens of the prefill span, at most: the slots of the smallest layer, if that is not this one.
    pub(crate) first: usize,
    /// Begin and end of the positions that never leave, by sequence, or of each sequence's initial part for a policy that looks for one; empty
    /// where there are none.
    pub(crate) protected: Vec<(usize, usize)>,
}

/// The base of the frequencies.
const THETA: f64 = 1e4;

/// The mean query of a query head before it is turned.
fn mean_query(head: usize) -> Head {
    query([7, head, 0])
}

/// How long the pairs of its queries are in the mean: longer than in the mean query.
fn pair_lengths(head: usize) -> [f64; HEAD_DIM / 2] {
    let mean = mean_query(head);
    std::array::from_fn(|f| mean[f].hypot(mean[f + HEAD_DIM / 2]) + (mixed(&[8, head, f]) % 8) as f64 / 8.0)
}

/// Slots that a cache which grows has at first, and of which its pages are.
const FIRST_SLOTS: usize = 3;

impl Scene {
    /// What the queries of the layer are like, where the policy goes by it.
    pub(crate) fn expected(&self) -> Option<ExpectedQueries> {
        let heads = 0..self.groups as usize * PER_GROUP;
        let (means, lengths): (Vec<Head>, Vec<[f64; HEAD_DIM / 2]>) =
            heads.map(|head| (mean_query(head), pair_lengths(head))).unzip();
        let size = |width: usize| [means.len() as i64, width as i64];
        let mean_hd = Tensor::from_slice(&means.concat()).view(size(HEAD_DIM));
        let length_hf = Tensor::from_slice(&lengths.concat()).view(size(HEAD_DIM / 2));
        let frequencies = RopeSpec::plain(THETA, HEAD_DIM).frequencies(&[1], Kind::Double, Device::Cpu);
        let expected = || ExpectedQueries::of_queries(&mean_hd, &length_hf, Some(frequencies));
        self.build().traits().expects_queries.then(expected)
    }

    /// The policy.
    pub(crate) fn build(&self) -> Box<dyn Policy> {
        let choice = PolicyRecipe::with_params(self.policy, toml::from_str(&self.params).unwrap());
        let build = if self.policy == EXAMPLE { shelf::build } else { cache::build };
        build(&choice, self.capacity).unwrap_or_else(|e| panic!("{self:?}: {e}"))
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
        self.protected.get(sequence).is_some_and(stays)
    }

    /// What the cache is told of it.
    pub(crate) fn told(&self, policy: &dyn Policy) -> Vec<(usize, usize)> {
        let traits = policy.traits();
        let told = |&range: &(usize, usize)| if traits.initial_part.is_some() { traits.protects(range) } else { range };
        self.protected.iter().map(told).collect()
    }

    /// The largest chunk that never evicts itself or what is protected.
    pub(crate) fn largest_chunk(&self) -> usize {
        let policy = self.build();
        let longest = self.protected.iter().map(|(start, end)| end - start).max().unwrap_or(0);
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
            entry_number: self.build().traits().entry_number,
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

    /// What the `last` columns of a chunk (or all of them) pay to `position`. Pads pay nothing.
    pub(crate) fn paid_at(&self, [sequence, head]: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize) -> f32 {
        let first = last.map_or(0, |last| span.len.saturating_sub(last));
        (first..span.real_of(sequence)).map(|column| self.pays([sequence, head], span.start + column, position)).sum()
    }
}

impl SlowAttention for Scene {
    fn likely(&self, query_head: usize) -> LikelyQueries {
        let (mean, half) = (mean_query(query_head), HEAD_DIM / 2);
        let spread = (0..half).map(|f| pair_lengths(query_head)[f] - mean[f].hypot(mean[f + half])).collect();
        let speed = (0..half).map(|f| THETA.powf(-(f as f64) / half as f64)).collect();
        LikelyQueries { mean, spread, speed, distances: (0..=16).map(|power| 2f64.powi(power)).collect() }
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
