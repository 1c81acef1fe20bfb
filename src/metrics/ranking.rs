//! Rankings of passages as HELMET reads them, and `trec_eval`'s figure of them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use super::bags::compiled;
use super::python::strip;

static RUN: LazyLock<Regex> = LazyLock::new(|| compiled(r"\d+(?:[\s\x1c-\x1f]*>[\s\x1c-\x1f]*\d+)*"));

/// HELMET's `parse_rankings`: the ids of the longest run `3 > 1 > 2`, each once; where there is none, the whole text in lower case.
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

/// Normalised discounted cumulative gain of the first `k`: gain = label, 0 for ids without one, discount = log2(rank + 1).
pub fn ndcg(ids: &[String], labels: &BTreeMap<String, u32>, k: usize) -> f64 {
    let gain = |labels: &[u32]| -> f64 {
        labels.iter().take(k).enumerate().map(|(at, label)| f64::from(*label) / (at as f64 + 2.0).log2()).sum()
    };
    let mut best: Vec<u32> = labels.values().copied().filter(|label| *label > 0).collect();
    best.sort_unstable_by(|a, b| b.cmp(a));
    let ranked: Vec<u32> = ids.iter().map(|id| labels.get(id).copied().unwrap_or(0)).collect();
    if best.is_empty() { 0.0 } else { gain(&ranked) / gain(&best) }
}
