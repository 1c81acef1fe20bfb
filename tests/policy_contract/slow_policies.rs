//! lastrec and h2o as anyone would write them who need not be fast: one dictionary per row and head.

use std::collections::BTreeMap;

use kvtune::cache::{ChunkSpan, Policy};

use super::Scene;

/// The policies as dictionaries from position to score, per row and head, each row as if it were alone.
pub(super) struct SlowPolicy<'a> {
    scene: &'a Scene,
    prefill: usize,
    params: toml::Table,
    /// By row and head.
    scores: Vec<Vec<BTreeMap<i64, f32>>>,
    is_scored: bool,
}

impl<'a> SlowPolicy<'a> {
    pub(super) fn new(scene: &'a Scene, prefill: usize) -> Self {
        let scores = vec![vec![BTreeMap::new(); scene.groups as usize]; scene.lengths.len()];
        Self { scene, prefill, params: toml::from_str(&scene.params).unwrap(), scores, is_scored: false }
    }

    pub(super) fn held(&self, row: usize, head: usize) -> Vec<i64> {
        self.scores[row][head].keys().copied().collect()
    }

    fn count(&self, key: &str) -> Option<usize> {
        self.params.get(key).and_then(toml::Value::as_integer).map(|x| x as usize)
    }

    fn flag(&self, key: &str) -> bool {
        self.params.get(key).and_then(toml::Value::as_bool).unwrap_or(false)
    }

    /// One chunk: evict, insert, and (after the prefill span) add up the attention.
    pub(super) fn step(&mut self, span: &ChunkSpan, policy: &dyn Policy) {
        let is_scored = span.start >= self.prefill;
        for row in 0..self.scores.len() {
            for head in 0..self.scores[row].len() {
                let excess = (self.scores[row][head].len() + span.real[row]).saturating_sub(self.scene.capacity);
                let excess = if policy.evicts() { excess } else { 0 };
                for position in self.leaving(row, head, span.start, excess) {
                    self.scores[row][head].remove(&position);
                }
                let entries = &mut self.scores[row][head];
                entries.extend((span.start..span.start + span.real[row]).map(|p| (p as i64, 0.0)));
                if is_scored && span.real[row] > 0 {
                    for (&p, score) in entries.iter_mut() {
                        *score += self.scene.paid(row, head, span.index, p);
                    }
                }
            }
        }
        self.is_scored |= is_scored;
    }

    fn leaving(&self, row: usize, head: usize, start: usize, count: usize) -> Vec<i64> {
        let capacity = self.scene.capacity;
        let entries = &self.scores[row][head];
        let mut order: Vec<i64> = if self.scene.policy == "lastrec" {
            let sinks = self.count("init_grace_tokens").unwrap_or((capacity / 8).clamp(1, 16)) as i64;
            entries.keys().copied().filter(|&p| p >= sinks).collect()
        } else {
            let grace = self.count("grace_period").unwrap_or(0);
            entries.keys().copied().filter(|&p| p < start as i64 - grace as i64).collect()
        };
        if self.scene.policy == "h2o" && !self.is_scored {
            let fraction = self.params.get("keep_initial_fraction").and_then(toml::Value::as_float).unwrap_or(0.05);
            let keep = ((fraction * capacity as f64).floor() as usize).min(order.len().saturating_sub(count));
            order.drain(..keep);
        } else if self.scene.policy == "h2o" {
            let first = self.prefill as i64 - i64::from(self.flag("reference_counts"));
            let value = |p: &i64| {
                let scorers = if self.flag("normalize_scores") { (start as i64 - (*p).max(first)) as f32 } else { 1.0 };
                entries[p] / scorers
            };
            order.sort_by(|a, b| value(a).total_cmp(&value(b)).then(a.cmp(b)));
        }
        order.truncate(count);
        assert_eq!(order.len(), count);
        order
    }
}
