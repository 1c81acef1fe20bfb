//! Every policy as anyone would write it who need not be fast: one dictionary per sequence and head, each sequence as if it were alone.

use std::collections::BTreeMap;

use kvtune::cache::{ChunkSpan, Policy};

use super::content::{Content, Head};
use super::scene::Scene;
use super::slow_scores::dot;

/// What is noted of each position that one head holds.
pub(crate) type Notes = BTreeMap<usize, f32>;

/// Statistics of the queries of a query head before they are turned.
pub(crate) struct SlowStatistics {
    pub(crate) mean: Head,
    /// By how much pairs of channels are longer than those of the mean, and by which angle they turn from token to token.
    pub(crate) longer: Vec<f64>,
    pub(crate) speed: Vec<f64>,
    /// How far away queries are looked for.
    pub(crate) distances: Vec<f64>,
}

/// The attention that a slow policy goes by.
pub(crate) trait SlowAttention {
    /// Statistics of the queries of a query head.
    fn query_statistics(&self, query_head: usize) -> SlowStatistics;

    /// What the `last` positions of a chunk (or all of them) pay to `position`, one of those that a head of a sequence holds.
    fn mass(&self, at: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize, held: &Notes) -> f32;

    /// The query of a sequence, query head and position.
    fn query(&self, at: [usize; 3]) -> Head;

    /// Query heads of a KV head, and the factor on `q · k`.
    fn shape(&self) -> (usize, f64);

    /// A softmax over what a head holds: what the query of a sequence, query head and position gives to each position.
    fn weights(
        &self,
        content: &Content,
        [sequence, query_head, at]: [usize; 3],
        start: usize,
        held: &Notes,
    ) -> BTreeMap<usize, f64> {
        let (per_group, scale) = self.shape();
        let query = self.query([sequence, query_head, at]);
        let exp = |p: usize| (dot(&query, content.seen([sequence, query_head / per_group, p], start).0) * scale).exp();
        let seen: BTreeMap<usize, f64> = held.keys().filter(|&&p| p <= at).map(|&p| (p, exp(p))).collect();
        let sum: f64 = seen.values().sum();
        seen.into_iter().map(|(p, weight)| (p, weight / sum)).collect()
    }
}

/// The positions that every sequence and head holds.
pub(crate) struct SlowPolicy<'a> {
    pub(super) scene: &'a Scene,
    pub(super) content: &'a Content,
    pub(super) attention: &'a dyn SlowAttention,
    pub(super) prefill: usize,
    /// The policy whose scores count, and its parameters.
    pub(super) rule: String,
    params: toml::Table,
    /// Of a policy that shares out slots.
    pub(super) floor: Option<f64>,
    /// By sequence, once its slots are shared out: those of each head.
    pub(super) shares: Vec<Option<Vec<usize>>>,
    evicts: bool,
    grace: usize,
    sinks: usize,
    /// By sequence and head.
    pub(super) notes: Vec<Vec<Notes>>,
    pub(super) is_scored: bool,
    /// Begin and end of each chunk that came in.
    pub(super) chunks: Vec<(usize, usize)>,
    /// Sequences in which a choice hung on the last digits: from then on nothing can be said of them.
    pub(super) unclear: Vec<bool>,
}

impl<'a> SlowPolicy<'a> {
    pub(crate) fn new(
        scene: &'a Scene,
        (content, attention): (&'a Content, &'a dyn SlowAttention),
        prefill: usize,
        policy: &dyn Policy,
    ) -> Self {
        let sequences = scene.lengths.len();
        let (rule, params, floor) = scene.rule();
        Self {
            scene,
            content,
            attention,
            prefill,
            rule,
            params,
            floor,
            shares: vec![None; sequences],
            evicts: !policy.traits().keeps_all,
            grace: policy.traits().grace,
            sinks: policy.traits().sinks,
            notes: vec![vec![Notes::new(); scene.groups as usize]; sequences],
            is_scored: false,
            chunks: Vec::new(),
            unclear: vec![false; sequences],
        }
    }

    /// The positions that a head holds; `None` where that cannot be foreseen.
    pub(crate) fn held(&self, sequence: usize, head: usize) -> Option<Vec<i64>> {
        (!self.unclear[sequence]).then(|| self.notes[sequence][head].keys().map(|&p| p as i64).collect())
    }

    /// What is noted of a position; `None` where nothing is, or it cannot be foreseen.
    pub(crate) fn noted(&self, [sequence, head]: [usize; 2], position: usize) -> Option<f32> {
        (self.is_scored && !self.unclear[sequence]).then(|| self.notes[sequence][head].get(&position).copied()).flatten()
    }

    /// Whether any sequence could not be foreseen.
    pub(crate) fn is_unclear(&self) -> bool {
        self.unclear.contains(&true)
    }

    pub(super) fn count(&self, key: &str) -> Option<usize> {
        self.params.get(key).and_then(toml::Value::as_integer).map(|x| x as usize)
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        self.params.get(key).and_then(toml::Value::as_bool).unwrap_or(false)
    }

    pub(super) fn fraction(&self, key: &str, default: f64) -> f64 {
        self.params.get(key).and_then(toml::Value::as_float).unwrap_or(default)
    }

    pub(super) fn word(&self, key: &str) -> Option<&str> {
        self.params.get(key).and_then(toml::Value::as_str)
    }

    /// Tokens below `next` that are old enough to leave, and no first tokens.
    pub(super) fn candidates(&self, [sequence, head]: [usize; 2], next: usize) -> Vec<usize> {
        let may_leave = |p: &usize| p + self.grace < next && *p >= self.sinks && !self.scene.protects(sequence, *p);
        self.notes[sequence][head].keys().copied().filter(may_leave).collect()
    }

    /// What does not fit leaves, and the chunk comes in. All heads choose before any loses something.
    pub(crate) fn take(&mut self, span: &ChunkSpan) {
        self.share_out(span);
        self.chunks.push((span.start, span.start + span.len));
        let heads: Vec<[usize; 2]> = (0..self.notes.len())
            .flat_map(|sequence| (0..self.notes[sequence].len()).map(move |head| [sequence, head]))
            .collect();
        let leaving: Vec<Vec<usize>> = heads.iter().map(|&at| self.leaving(at, span)).collect();
        for ([sequence, head], leaving) in heads.into_iter().zip(leaving) {
            let notes = &mut self.notes[sequence][head];
            notes.retain(|p, _| !leaving.contains(p));
            notes.extend((span.start..span.start + span.real_of(sequence)).map(|p| (p, 0.0)));
        }
    }

    /// Slots that a head may fill.
    fn capacity(&self, [sequence, head]: [usize; 2]) -> usize {
        self.shares[sequence].as_ref().map_or(self.scene.capacity, |shares| shares[head])
    }

    /// How many entries a head must lose for its tokens of a chunk to fit.
    pub(super) fn excess(&self, at: [usize; 2], span: &ChunkSpan) -> usize {
        let held = self.notes[at[0]][at[1]].len();
        if self.evicts { (held + span.real_of(at[0])).saturating_sub(self.capacity(at)) } else { 0 }
    }

    fn leaving(&mut self, at: [usize; 2], span: &ChunkSpan) -> Vec<usize> {
        let count = self.excess(at, span);
        self.lowest(at, span.start, count)
    }

    /// The `count` entries of a head that leave first.
    pub(super) fn lowest(&mut self, at: [usize; 2], next: usize, count: usize) -> Vec<usize> {
        if count == 0 {
            return Vec::new();
        }
        let mut order = self.candidates(at, next);
        assert!(order.len() >= count, "{:?}: {count} of {order:?}", self.scene);
        let Some(scores) = self.scores(at, next) else {
            // No score yet, or never any: the oldest leave, and some first ones only when nothing else is left.
            let (first, rest): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|&p| p < self.first_that_stay());
            return rest.into_iter().chain(first.into_iter().rev()).take(count).collect();
        };
        // Adding zero makes -0.0 a zero like the other.
        order.sort_by(|p, q| (scores[p] + 0.0).total_cmp(&(scores[q] + 0.0)).then(p.cmp(q)));
        if let (Some(last), Some(stays)) = (order.get(count - 1), order.get(count)) {
            self.unclear[at[0]] |= self.is_close(scores[last], scores[stays]);
        }
        order.truncate(count);
        order
    }

    /// Whether roundings may have ordered two scores.
    pub(super) fn is_close(&self, low: f32, high: f32) -> bool {
        // The score of `dropkv` is a square of differences, which round where values are alike.
        let rounded = if self.rule == "dropkv" && self.tolerance() > 0.0 { 1e-10 } else { 0.0 };
        let difference = high - low;
        difference < rounded || (low < high && difference < self.tolerance() * low.abs().max(high.abs()))
    }
}
