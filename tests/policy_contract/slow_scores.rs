//! The scores of the slow policies, each by the rule of its paper.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;

use kvtune::cache::ChunkSpan;
use kvtune::recipe::{BufferKind, Storage};

use super::content::{Content, Drawn, HEAD_DIM, Head};
use super::scenes::scenes;
use super::shelf::EXAMPLE;
use super::slow_policies::{Notes, SlowPolicy, SlowStatistics};

impl SlowPolicy<'_> {
    /// Scores closer than this, in relation to their size, may be ordered either way.
    pub(crate) fn tolerance(&self) -> f32 {
        if self.content.drawn == Drawn::Real { 2e-5 } else { 0.0 }
    }

    /// First tokens that stay while there are no scores, as far as others can leave.
    pub(super) fn first_that_stay(&self) -> usize {
        let is_hitter = self.rule.contains("h2o");
        let fraction = if is_hitter { self.fraction("keep_initial_fraction", 0.05) } else { 0.0 };
        (fraction * self.scene.capacity as f64).floor() as usize
    }

    /// The score of each position that a head holds, the lowest leaving first; `None` where the policy goes by position.
    pub(super) fn scores(&self, at: [usize; 2], next: usize) -> Option<Notes> {
        let notes = &self.notes[at[0]][at[1]];
        match self.rule.as_str() {
            "dense" | "lastrec" | "smart-lastrec" | "streaming-llm" => None,
            "knorm" => Some(notes.keys().map(|&p| (p, -length(self.content.exact([at[0], at[1], p]).0) as f32)).collect()),
            "learned" => {
                Some(notes.iter().map(|(&p, &mass)| (p, self.expected_and_seen([at[0], at[1], p], next, mass))).collect())
            }
            EXAMPLE => Some(notes.keys().map(|&p| (p, length(self.content.exact([at[0], at[1], p]).1) as f32)).collect()),
            "keydiff" => Some(self.unlike_the_others(at)),
            "triattention" => Some(self.to_come(at, next)),
            "qh2o" | "qh2o-vlen" => self.is_scored.then(|| self.with_error(at, next)),
            "h2o" | "h2o-vlen" | "h2o-orig" => self.is_scored.then(|| self.per_query(at, next)),
            "tova" | "snapkv" | "expected-attention" | "defensivekv" | "dropkv" | "lagkv" => {
                self.is_scored.then(|| notes.clone())
            }
            "rkv" => self.is_scored.then(|| self.less_redundancy(at)),
            other => panic!("{}", missing(other)),
        }
    }

    /// Attention so far, divided by the number of queries that saw it where the recipe says so.
    fn per_query(&self, [sequence, head]: [usize; 2], next: usize) -> Notes {
        let counted = if self.flag("score_prefill") { 0 } else { self.prefill - usize::from(self.flag("reference_counts")) };
        let scorers = |p: usize| if self.flag("normalize_scores") { (next - p.max(counted)) as f32 } else { 1.0 };
        self.notes[sequence][head].iter().map(|(&p, &score)| (p, score / scorers(p))).collect()
    }

    /// Minus the cosine of each key with the mean of the directions of all.
    fn unlike_the_others(&self, [sequence, head]: [usize; 2]) -> Notes {
        let positions: Vec<usize> = self.notes[sequence][head].keys().copied().collect();
        let directions: Vec<Head> = positions
            .iter()
            .map(|&p| {
                let key = self.content.stored([sequence, head, p]).0;
                key.map(|x| x / length(key))
            })
            .collect();
        let mut mean: Head = [0.0; HEAD_DIM];
        for direction in &directions {
            (0..HEAD_DIM).for_each(|i| mean[i] += direction[i] / positions.len() as f64);
        }
        let size = length(&mean);
        // Directions along axes make the product a count: rounded, so that what ties is seen to tie.
        let exact = |x: f64| if self.content.drawn == Drawn::Axes { (x * positions.len() as f64).round() } else { x / size };
        positions.iter().zip(&directions).map(|(&p, d)| (p, -exact(dot(d, &mean)) as f32)).collect()
    }

    /// Attention and the error of quantisation, both mapped to 0..1 over the candidates of all heads of a sequence.
    fn with_error(&self, [sequence, head]: [usize; 2], next: usize) -> Notes {
        let error = |head: usize, p: usize| {
            let ((k, v), (stored_k, stored_v)) =
                (self.content.exact([sequence, head, p]), self.content.stored([sequence, head, p]));
            length(&std::array::from_fn(|i| stored_k[i] - k[i])) as f32
                + length(&std::array::from_fn(|i| stored_v[i] - v[i])) as f32
        };
        let mut both: Vec<(f32, f32)> = Vec::new();
        for other in 0..self.notes[sequence].len() {
            let scores = self.per_query([sequence, other], next);
            both.extend(self.candidates([sequence, other], next).iter().map(|&p| (scores[&p], error(other, p))));
        }
        let score_unit = unit(both.iter().map(|x| x.0));
        let error_unit = unit(both.iter().map(|x| x.1));
        let a = self.fraction("combination_constant", 0.5);
        let scores = self.per_query([sequence, head], next);
        let combined = |(p, score): (usize, f32)| {
            (p, score_unit(score) * a as f32 + error_unit(error(head, p)) * ((a - 1.0) / 2.0) as f32 + (1.0 - a) as f32)
        };
        scores.into_iter().map(combined).collect()
    }

    /// After a chunk's attention.
    pub(crate) fn observe(&mut self, span: &ChunkSpan) {
        let is_hitter = self.rule.contains("h2o");
        let is_observed = match self.rule.as_str() {
            "tova" | "snapkv" | "expected-attention" | "defensivekv" | "dropkv" | "lagkv" | "rkv" => true,
            "learned" => !self.flag("gate_alone"),
            _ => is_hitter && (span.start >= self.prefill || self.flag("score_prefill")),
        };
        if !is_observed {
            return;
        }
        self.is_scored = true;
        let sequences: Vec<usize> = (0..self.notes.len()).filter(|&sequence| span.real_of(sequence) > 0).collect();
        let given: Vec<Vec<Notes>> = sequences
            .iter()
            .map(|&sequence| (0..self.notes[sequence].len()).map(|head| self.given([sequence, head], span, &sequences)).collect())
            .collect();
        for (&sequence, heads) in sequences.iter().zip(given) {
            for (notes, given) in self.notes[sequence].iter_mut().zip(heads) {
                for (p, score) in given {
                    *notes.get_mut(&p).unwrap() = if is_hitter || self.rule == "learned" { notes[&p] + score } else { score };
                }
            }
        }
    }

    fn mass(&self, [sequence, head]: [usize; 2], span: &ChunkSpan, last: Option<usize>, position: usize) -> f32 {
        self.attention.mass([sequence, head], span, last, position, &self.notes[sequence][head])
    }

    /// What a chunk gives to each position of a head; `sequences` are those that have queries in it.
    fn given(&self, at: [usize; 2], span: &ChunkSpan, sequences: &[usize]) -> Notes {
        let notes = &self.notes[at[0]][at[1]];
        let by_position = |of: &dyn Fn(usize) -> f32| notes.keys().map(|&p| (p, of(p))).collect::<Notes>();
        match self.rule.as_str() {
            "h2o" | "qh2o" | "learned" => by_position(&|p| self.mass(at, span, None, p)),
            "h2o-orig" => by_position(&|p| {
                let holders = sequences.iter().filter(|&&sequence| self.notes[sequence][at[1]].contains_key(&p));
                holders.map(|&sequence| self.mass([sequence, at[1]], span, None, p)).sum()
            }),
            "h2o-vlen" | "qh2o-vlen" => {
                let norm = |p: usize| length(self.content.exact([at[0], at[1], p]).1) as f32;
                let weighted = by_position(&|p| self.mass(at, span, None, p) * norm(p));
                let sum = weighted.values().sum::<f32>().max(f32::MIN_POSITIVE);
                weighted.into_iter().map(|(p, x)| (p, x * span.len as f32 / sum)).collect()
            }
            "tova" => by_position(&|p| {
                let heads = 0..self.scene.groups as usize;
                let holders = heads.clone().filter(|&head| self.notes[at[0]][head].contains_key(&p));
                holders.map(|head| self.mass([at[0], head], span, Some(1), p)).sum::<f32>() / heads.len() as f32
            }),
            "snapkv" | "rkv" => self.windowed(at, span),
            "dropkv" => self.perturbed(at, span),
            "defensivekv" => self.at_worst(at, span),
            "lagkv" => self.ranked(at, span),
            "expected-attention" => self.expected(at, span),
            other => panic!("{}", missing(other)),
        }
    }

    /// What a gate expects, and beside it what has come since.
    fn expected_and_seen(&self, at: [usize; 3], next: usize, mass: f32) -> f32 {
        let (gate, queries) = (self.content.number(at), (next - at[2]) as f32);
        if self.flag("gate_alone") { gate } else { gate + (mass.max(f32::MIN_POSITIVE) / (queries * queries)).ln() }
    }

    fn window(&self) -> usize {
        self.count("window_size").unwrap_or((self.scene.capacity / 8).clamp(1, 32))
    }

    /// What the window pays to each position and to its neighbours: the largest, or the mean.
    fn windowed(&self, at: [usize; 2], span: &ChunkSpan) -> Notes {
        let (window, is_rkv) = (self.window(), self.rule == "rkv");
        let queries = if is_rkv { window.min(span.len) as f32 } else { 1.0 };
        let mass = |&p: &usize| (p, self.mass(at, span, Some(window), p) / queries);
        let mass = self.notes[at[0]][at[1]].keys().map(mass).collect();
        self.pooled(&mass, if is_rkv { 7 } else { 5 }, self.word("pooling") == Some("mean"))
    }

    fn pooled(&self, of: &Notes, kernel: usize, is_mean: bool) -> Notes {
        let half = self.count("kernel_size").unwrap_or(kernel) / 2;
        let values: Vec<f32> = of.values().copied().collect();
        let around = |i: usize| &values[i.saturating_sub(half)..(i + half + 1).min(values.len())];
        let mean = |near: &[f32]| near.iter().sum::<f32>() / near.len() as f32;
        let pool = |near: &[f32]| if is_mean { mean(near) } else { near.iter().copied().fold(0.0, f32::max) };
        of.keys().enumerate().map(|(i, &p)| (p, pool(around(i)))).collect()
    }

    /// How far the outputs of the window's queries would move without each position, squared.
    fn perturbed(&self, [sequence, head]: [usize; 2], span: &ChunkSpan) -> Notes {
        let held = &self.notes[sequence][head];
        let (per_group, _) = self.attention.shape();
        let value = |p: usize| self.content.seen([sequence, head, p], span.start).1;
        let mut moved: BTreeMap<usize, f64> = held.keys().map(|&p| (p, 0.0)).collect();
        for at in (span.len.saturating_sub(self.window())..span.real_of(sequence)).map(|at| span.start + at) {
            for query_head in head * per_group..(head + 1) * per_group {
                let weights = self.attention.weights(self.content, [sequence, query_head, at], span.start, held);
                let out: Head = std::array::from_fn(|i| weights.iter().map(|(&p, weight)| weight * value(p)[i]).sum());
                for (&p, weight) in &weights {
                    let rest = 1.0 - weight;
                    // What the others give without it, less what was.
                    let without = |i: usize| (out[i] - weight * value(p)[i]) / rest - out[i];
                    let nearly_alone = |i: usize| weight / 1e-6 * (value(p)[i] - out[i]);
                    let far: Head = std::array::from_fn(|i| if rest > 1e-6 { without(i) } else { nearly_alone(i) });
                    *moved.get_mut(&p).unwrap() += dot(&far, &far) / per_group as f64;
                }
            }
        }
        self.pooled(&moved.into_iter().map(|(p, x)| (p, x as f32)).collect(), 7, true)
    }

    /// What the loss of each position would do at worst; those of the first stage lie above all others.
    fn at_worst(&self, at: [usize; 2], span: &ChunkSpan) -> Notes {
        let (risks, first) = self.risks(at, span);
        let noted = |p: &usize| risks.get(p).map_or(0.0, |risk| risk + f64::from(u8::from(first.contains(p))));
        self.notes[at[0]][at[1]].keys().map(|p| (*p, noted(p) as f32)).collect()
    }

    /// The risk of each position before the window, and the positions of the first stage.
    fn risks(&self, [sequence, head]: [usize; 2], span: &ChunkSpan) -> (BTreeMap<usize, f64>, Vec<usize>) {
        let (held, window, end) = (&self.notes[sequence][head], self.window(), span.start + span.len);
        let (per_group, _) = self.attention.shape();
        let mut old: Vec<usize> = held.keys().copied().filter(|p| p + window < end).collect();
        let (mut worst, mut all) = (vec![0.0f64; old.len()], 0.0);
        let mut share: BTreeMap<usize, f64> = old.iter().map(|&p| (p, 0.0)).collect();
        for at in (span.len.saturating_sub(window)..span.real_of(sequence)).map(|at| span.start + at) {
            for query_head in head * per_group..(head + 1) * per_group {
                let weights = self.attention.weights(self.content, [sequence, query_head, at], span.start, held);
                all += weights.values().sum::<f64>();
                let row: Notes = old.iter().map(|&p| (p, weights[&p] as f32)).collect();
                for p in &old {
                    *share.get_mut(p).unwrap() += weights[p];
                }
                let near = self.pooled(&row, 5, true);
                let scale = old.iter().map(|p| weights[p]).sum::<f64>() / near.values().map(|&x| f64::from(x)).sum::<f64>();
                for (worst, &x) in worst.iter_mut().zip(near.values()) {
                    *worst = worst.max(f64::from(x) * scale);
                }
            }
        }
        let mean = worst.iter().sum::<f64>() / old.len() as f64;
        let norm = |p: usize| f64::from(self.content.number([sequence, head, p]));
        let norms: f64 = old.iter().map(|&p| norm(p)).sum::<f64>().max(f64::MIN_POSITIVE);
        let risks = old.iter().zip(&worst).map(|(&p, worst)| (p, worst.max(mean) * norm(p) / norms)).collect();
        old.sort_by(|p, q| share[q].total_cmp(&share[p]).then(p.cmp(q)));
        let mut reached = all - share.values().sum::<f64>();
        let is_within = |p: &usize| {
            reached += share[p];
            reached < 0.9 * all
        };
        (risks, old.into_iter().take_while(is_within).collect())
    }

    /// Attention, less how far other keys of its chunk resemble a key.
    fn less_redundancy(&self, [sequence, head]: [usize; 2]) -> Notes {
        let (lambda, threshold) = (self.fraction("attention_weight", 0.1), self.fraction("similarity_threshold", 0.5));
        let key = |p: usize| self.content.exact([sequence, head, p]).0;
        let cosine = |p: usize, q: usize| if p == q { 0.0 } else { dot(key(p), key(q)) / length(key(p)) / length(key(q)) };
        let similar = |p: usize| {
            let &(start, end) = self.chunks.iter().find(|(start, end)| (*start..*end).contains(&p)).unwrap();
            let last = |q: usize| (start..end).rev().find(|&other| cosine(q, other) > threshold).unwrap_or(start);
            (start..end).filter(|&q| last(q) != p).map(|q| cosine(q, p)).sum::<f64>() / (end - start) as f64
        };
        let held = &self.notes[sequence][head];
        let exp: BTreeMap<usize, f64> = held.keys().map(|&p| (p, similar(p).exp())).collect();
        let sum: f64 = exp.values().sum();
        held.iter().map(|(&p, &attention)| (p, (f64::from(attention) * lambda - exp[&p] / sum * (1.0 - lambda)) as f32)).collect()
    }

    /// The ranks of positions whose next partition has become complete.
    fn ranked(&self, [sequence, head]: [usize; 2], span: &ChunkSpan) -> Notes {
        let lag = self.count("lag_size").unwrap_or((self.scene.capacity / 8).clamp(1, 128));
        let (sinks, end) = (self.count("init_grace_tokens").unwrap_or(4), span.start + span.real_of(sequence));
        let seen = |p: usize| self.content.seen([sequence, head, p], span.start);
        let mut ranks = Notes::new();
        for first in (sinks..end).step_by(lag).filter(|first| (span.start + 1..=end).contains(&(first + 2 * lag))) {
            let spread = |of: &dyn Fn(usize) -> Head| {
                let channel = |p: usize, i: usize| {
                    let next = (first + lag..first + 2 * lag).map(|p| of(p)[i]);
                    let (low, high) = (next.clone().fold(f64::INFINITY, f64::min), next.fold(f64::NEG_INFINITY, f64::max));
                    (of(p)[i] - low) / if high > low { high - low } else { 1.0 }
                };
                let deviation = |p: usize| {
                    let channels: Head = std::array::from_fn(|i| channel(p, i));
                    let mean = channels.iter().sum::<f64>() / HEAD_DIM as f64;
                    (channels.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (HEAD_DIM - 1) as f64).sqrt()
                };
                let all: Vec<f64> = (first..first + lag).map(deviation).collect();
                let most = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = all.iter().map(|x| (x - most).exp()).sum();
                all.into_iter().map(|x| (x - most).exp() / sum).collect::<Vec<f64>>()
            };
            let (keys, values) = (spread(&|p| *seen(p).0), spread(&|p| *seen(p).1));
            let score: Vec<f64> = keys.into_iter().zip(values).map(|(k, v)| k + v).collect();
            for (i, own) in score.iter().enumerate() {
                let below = score.iter().enumerate().filter(|(j, other)| other.total_cmp(own).then(j.cmp(&i)).is_le()).count();
                ranks.insert(first + i, below as f32 / lag as f32);
            }
        }
        ranks
    }

    /// The softmax of `log E exp(q · k · scale)` for queries distributed as those of the chunk, times the norm of the value.
    fn expected(&self, [sequence, head]: [usize; 2], span: &ChunkSpan) -> Notes {
        let seen = |p: usize| self.content.seen([sequence, head, p], span.start);
        let mut sum: BTreeMap<usize, f64> = BTreeMap::new();
        let (per_group, scale) = self.attention.shape();
        for query_head in head * per_group..(head + 1) * per_group {
            let query = |p| self.attention.query([sequence, query_head, p]).map(|x| x * scale);
            let queries: Vec<Head> = (span.start..span.start + span.len).map(query).collect();
            let n = queries.len() as f64;
            // Mean and variance of q · k, which are those of a normal distribution.
            let logit = |k: &Head| {
                let products: Vec<f64> = queries.iter().map(|q| dot(q, k)).collect();
                let mean = products.iter().sum::<f64>() / n;
                mean + products.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n / 2.0
            };
            let logits: Vec<(usize, f64)> = self.notes[sequence][head].keys().map(|&p| (p, logit(seen(p).0))).collect();
            let total: f64 = logits.iter().map(|(_, x)| x.exp()).sum();
            for (p, logit) in logits {
                *sum.entry(p).or_default() += logit.exp() / total / per_group as f64;
            }
        }
        sum.into_iter().map(|(p, weight)| (p, (weight * length(seen(p).1)) as f32)).collect()
    }

    /// `Σ_f |q̄||k| cos(ω(t + δ) + φ_q − φ_k) + longer · |k|`, the mean over distances δ, normalised over what the head holds; the largest of its
    /// query heads. Keys are turned to their positions already.
    fn to_come(&self, [sequence, head]: [usize; 2], next: usize) -> Notes {
        let held: Vec<usize> = self.notes[sequence][head].keys().copied().collect();
        let (per_group, half) = (self.attention.shape().0, HEAD_DIM / 2);
        let last = (next - 1) as f64;
        let mut largest = vec![f64::NEG_INFINITY; held.len()];
        for query_head in head * per_group..(head + 1) * per_group {
            let SlowStatistics { mean, longer, speed, distances } = self.attention.query_statistics(query_head);
            let score = |&p: &usize| {
                let k = self.content.stored([sequence, head, p]).0;
                let of_pair = |f: usize| {
                    let angle = |x: &Head| x[f + half].atan2(x[f]);
                    let (q_length, k_length) = (mean[f].hypot(mean[f + half]), k[f].hypot(k[f + half]));
                    let cosines = distances.iter().map(|d| (speed[f] * (last + d) + angle(&mean) - angle(k)).cos());
                    k_length * (q_length * cosines.sum::<f64>() / distances.len() as f64 + longer[f])
                };
                (0..half).map(of_pair).sum::<f64>()
            };
            let scores: Vec<f64> = held.iter().map(score).collect();
            let mean = scores.iter().sum::<f64>() / scores.len() as f64;
            let deviation = (scores.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / scores.len() as f64).sqrt().max(1e-6);
            largest.iter_mut().zip(&scores).for_each(|(largest, x)| *largest = largest.max((x - mean) / deviation));
        }
        held.into_iter().zip(largest).map(|(p, score)| (p, score as f32)).collect()
    }
}

/// What to do about a policy of the registry that has no rule here.
fn missing(policy: &str) -> String {
    format!(
        "`{policy}` has no slow rule: add its score to `scores` in tests/policy_contract/slow_scores.rs and, if it goes by attention, \
         what a chunk gives to `observe` and `given`; docs/guides/add-a-policy.md shows how"
    )
}

/// The map of `values` to 0..1; of a constant to 0.
fn unit(values: impl Iterator<Item = f32> + Clone) -> impl Fn(f32) -> f32 {
    let low = values.clone().fold(f32::INFINITY, f32::min);
    let high = values.fold(f32::NEG_INFINITY, f32::max);
    move |x| if high > low { (x - low) / (high - low) } else { 0.0 }
}

pub(crate) fn dot(a: &Head, b: &Head) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn length(x: &Head) -> f64 {
    dot(x, x).sqrt()
}

#[test]
fn a_policy_without_a_rule_is_told_what_to_add() {
    let scene = scenes((0, ("knorm", "")), (BufferKind::Plain, false), Storage::Preallocated).remove(0);
    let (policy, content) = (scene.build(), Content::new(&scene));
    let mut slow = SlowPolicy::new(&scene, (&content, &scene), scene.capacity, &*policy);
    slow.rule = "new-policy".to_owned();
    let told = std::panic::catch_unwind(AssertUnwindSafe(|| slow.scores([0, 0], 0)));
    let told = told.unwrap_err().downcast::<String>().unwrap();
    assert!(
        told.starts_with("`new-policy` has no slow rule: add its score to `scores` in tests/policy_contract/slow_scores.rs"),
        "{told}"
    );
}
