//! Rankings of passages as HELMET reads them, and `trec_eval`'s figures of them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use super::bags::{compiled, share};
use super::python::strip;

static RUN: LazyLock<Regex> = LazyLock::new(|| compiled(r"\d+(?:[\s\x1c-\x1f]*>[\s\x1c-\x1f]*\d+)*"));

/// The ids of the longest run `3 > 1 > 2`, the best first, each once; where there is none, the whole text in lower case. HELMET's
/// `parse_rankings`.
pub fn parse_ranking(output: &str) -> Vec<String> {
    let text = output.replace(['[', ']', ':'], "").to_lowercase().replace("id", "");
    let mut longest = "";
    for run in RUN.find_iter(&text) {
        if run.as_str().chars().count() > longest.chars().count() {
            longest = run.as_str();
        }
    }
    if longest.is_empty() {
        return vec![text];
    }
    let mut ids: Vec<String> = Vec::new();
    for id in longest.split('>').map(strip) {
        if !ids.iter().any(|other| other == id) {
            ids.push(id.to_owned());
        }
    }
    ids
}

/// A ranking beside the labels of its passages: 0 for irrelevant, more for the more relevant.
#[derive(Clone, Debug, PartialEq)]
pub struct Ranking {
    /// Labels in the order of the ranking; 0 where an id is unknown.
    labels: Vec<u32>,
    /// The relevant labels, the largest first.
    best: Vec<u32>,
}

impl Ranking {
    pub fn new(ids: &[String], labels: &BTreeMap<String, u32>) -> Self {
        let mut best: Vec<u32> = labels.values().copied().filter(|label| *label > 0).collect();
        best.sort_unstable_by(|a, b| b.cmp(a));
        Self { labels: ids.iter().map(|id| labels.get(id).copied().unwrap_or(0)).collect(), best }
    }

    fn relevant(&self, k: usize) -> usize {
        self.labels.iter().take(k).filter(|label| **label > 0).count()
    }

    /// Normalised discounted cumulative gain of the first `k`: gain = label, discount = log2(rank + 1).
    pub fn ndcg(&self, k: usize) -> f64 {
        let gain = |labels: &[u32]| -> f64 {
            labels.iter().take(k).enumerate().map(|(at, label)| f64::from(*label) / (at as f64 + 2.0).log2()).sum()
        };
        if self.best.is_empty() { 0.0 } else { gain(&self.labels) / gain(&self.best) }
    }

    /// Mean of the precision at each relevant one of the first `k`, over all relevant ones.
    pub fn average_precision(&self, k: usize) -> f64 {
        let hits = (1..=self.labels.len().min(k)).filter(|rank| self.labels[rank - 1] > 0);
        hits.map(|rank| self.precision(rank)).sum::<f64>() / self.best.len().max(1) as f64
    }

    /// Share of the relevant ones that are among the first `k`.
    pub fn recall(&self, k: usize) -> f64 {
        share(self.relevant(k), self.best.len())
    }

    /// Share of relevant ones among `k` places.
    pub fn precision(&self, k: usize) -> f64 {
        share(self.relevant(k), k)
    }

    /// 1 by the rank of the first relevant one.
    pub fn reciprocal_rank(&self) -> f64 {
        self.labels.iter().position(|label| *label > 0).map_or(0.0, |at| 1.0 / (at as f64 + 1.0))
    }
}
