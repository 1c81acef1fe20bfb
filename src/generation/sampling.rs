//! From the logits of the next token to the token: penalties, cuts and the draw, in the order and by the formulas of Transformers
//! (`LogitsProcessor`s of its generation, version 5.3), and OpenAI's penalties behind the first.

use std::cmp::Ordering;
use std::collections::HashSet;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SamplingRules {
    /// Drawn; otherwise the most likely token is taken, and of the rules only those count that come before `temperature`.
    pub do_sample: bool,
    /// Logits of tokens that have occurred, in the prompt too, are divided by it, negative ones multiplied (arXiv 1909.05858).
    pub repetition_penalty: f64,
    /// What logits of tokens lose that have been written, once each (OpenAI's API; −2 to 2).
    pub presence_penalty: f64,
    /// The same for each time.
    pub frequency_penalty: f64,
    /// No run of so many tokens occurs twice; 0 for any.
    pub no_repeat_ngram_size: usize,
    /// No end token comes before so many new ones.
    pub min_new_tokens: usize,
    pub suppress_tokens: Vec<u32>,
    /// Logits are divided by it.
    pub temperature: f64,
    /// So many of the most likely tokens stay, and all that are as likely as the last of them; 0 for all.
    pub top_k: usize,
    /// The fewest most likely tokens stay that are together as likely as this (nucleus sampling, arXiv 1904.09751).
    pub top_p: f64,
    /// Tokens stay that are this fraction as likely as the most likely one (arXiv 2407.01082).
    pub min_p: f64,
    /// The tokens closest to the entropy stay that are together as likely as this (arXiv 2202.00666).
    pub typical_p: f64,
    /// Tokens stay that are at least as likely (arXiv 2210.15191).
    pub epsilon_cutoff: f64,
    /// Tokens stay that are at least as likely, or less likely where the entropy is high (arXiv 2210.15191).
    pub eta_cutoff: f64,
}

impl Default for SamplingRules {
    fn default() -> Self {
        Self {
            do_sample: false,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            no_repeat_ngram_size: 0,
            min_new_tokens: 0,
            suppress_tokens: Vec::new(),
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
        }
    }
}

/// What the choice depends on beside the logits.
#[derive(Clone, Copy, Debug)]
pub struct TokensSoFar<'a> {
    pub ids: &'a [u32],
    pub num_prompt: usize,
    /// Tokens that end a text.
    pub eos: &'a [u32],
}

/// A token that may come next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub id: u32,
    /// The logit after the rules.
    pub logit: f32,
}

/// Where a draw stands: the same place gives the same number, whatever else is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawPlace {
    pub seed: u64,
    /// The index among the samples of one prompt.
    pub sample: u64,
    pub step: u64,
}

impl DrawPlace {
    /// Draws a number from `0..1`.
    fn unit(self) -> f64 {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(self.sample);
        rng.set_word_pos(u128::from(self.step) * 2);
        rng.random()
    }
}

impl SamplingRules {
    /// The next token; `None` where none may come.
    ///
    /// # Shapes
    /// One logit per token of the vocabulary; they are changed by the penalties.
    pub fn choose(&self, logits: &mut [f32], so_far: TokensSoFar<'_>, place: DrawPlace) -> Option<u32> {
        self.penalise(logits, so_far);
        // Below that, as in vLLM, a quotient may not be finite.
        if !self.do_sample || self.temperature < 1e-5 {
            return most_likely(logits);
        }
        draw(&self.candidates(logits), place.unit())
    }

    /// Applies the penalties and bans, which apply to greedy decoding, too.
    pub fn penalise(&self, logits: &mut [f32], so_far: TokensSoFar<'_>) {
        let TokensSoFar { ids, num_prompt, eos } = so_far;
        let banned = banned_by_ngrams(ids, self.no_repeat_ngram_size);
        let too_early = if ids.len() < num_prompt + self.min_new_tokens { eos } else { &[] };
        let forbidden = banned.iter().chain(too_early).chain(&self.suppress_tokens);
        if (self.repetition_penalty - 1.0).abs() > 0.0 {
            let penalty = self.repetition_penalty as f32;
            let mut seen = vec![false; logits.len()];
            for &id in ids {
                let Some(logit) = logits.get_mut(id as usize) else { continue };
                if !std::mem::replace(&mut seen[id as usize], true) {
                    *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
                }
            }
        }
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            let mut seen = HashSet::new();
            for &id in &ids[num_prompt.min(ids.len())..] {
                if let Some(logit) = logits.get_mut(id as usize) {
                    let once = if seen.insert(id) { self.presence_penalty } else { 0.0 };
                    *logit -= (once + self.frequency_penalty) as f32;
                }
            }
        }
        for &id in forbidden {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// The tokens that may be drawn, ascending, from logits that have been penalised.
    pub fn candidates(&self, logits: &[f32]) -> Vec<Candidate> {
        let temperature = self.temperature as f32;
        let scaled = |(id, &logit): (usize, &f32)| Candidate { id: id as u32, logit: logit / temperature };
        let mut kept: Vec<Candidate> = logits.iter().enumerate().map(scaled).collect();
        cut_top_k(&mut kept, self.top_k);
        kept.retain(|candidate| candidate.logit > f32::NEG_INFINITY);
        if kept.is_empty() {
            return kept;
        }
        if self.top_p < 1.0 {
            cut_top_p(&mut kept, self.top_p);
        }
        if self.min_p > 0.0 {
            cut_below(&mut kept, |highest, _| highest * self.min_p);
        }
        if self.typical_p < 1.0 {
            cut_untypical(&mut kept, self.typical_p);
        }
        if self.epsilon_cutoff > 0.0 {
            cut_below(&mut kept, |_, _| self.epsilon_cutoff);
        }
        if self.eta_cutoff > 0.0 {
            cut_below(&mut kept, |_, all| self.eta_cutoff.min(self.eta_cutoff.sqrt() * (-entropy(all)).exp()));
        }
        kept
    }
}

/// The first of the highest logits.
fn most_likely(logits: &[f32]) -> Option<u32> {
    let possible = logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
    possible.reduce(|best, other| if other.1 > best.1 { other } else { best }).map(|(id, _)| id as u32)
}

/// How likely each is: they add up to 1.
pub fn probabilities(candidates: &[Candidate]) -> Vec<f64> {
    let highest = candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = candidates.iter().map(|c| f64::from(c.logit - highest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// The candidate at `unit` of the way through all probability.
fn draw(candidates: &[Candidate], unit: f64) -> Option<u32> {
    let mut rest = unit;
    for (candidate, probability) in candidates.iter().zip(probabilities(candidates)) {
        rest -= probability;
        if rest < 0.0 {
            return Some(candidate.id);
        }
    }
    // Rounding has left a little.
    candidates.last().map(|candidate| candidate.id)
}

/// Tokens that would repeat a run of so many.
fn banned_by_ngrams(ids: &[u32], size: usize) -> Vec<u32> {
    if size == 0 || ids.len() + 1 < size {
        return Vec::new();
    }
    let last = &ids[ids.len() + 1 - size..];
    ids.windows(size).filter(|run| run[..size - 1] == *last).map(|run| run[size - 1]).collect()
}

fn descending(a: Candidate, b: Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit)
}

fn cut_top_k(kept: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= kept.len() {
        return;
    }
    let mut order = kept.clone();
    let lowest = order.select_nth_unstable_by(k - 1, |a, b| descending(*a, *b)).1.logit;
    kept.retain(|candidate| candidate.logit >= lowest);
}

/// Drops the least likely candidates that together have at most the probability `1 − p`; the most likely one stays.
fn cut_top_p(kept: &mut Vec<Candidate>, p: f64) {
    let probability = probabilities(kept);
    // Those below that have at most half of it together, so they go. They are nearly all of a vocabulary, which takes long to sort.
    let rare = (1.0 - p) / (2 * kept.len()) as f64;
    let (rest, mut order): (Vec<usize>, Vec<usize>) = (0..kept.len()).partition(|&i| probability[i] < rare);
    order.sort_by(|&a, &b| descending(kept[b], kept[a]));
    let mut together: f64 = rest.iter().map(|&i| probability[i]).sum();
    let goes = order[..order.len() - 1].iter().take_while(|&&i| {
        together += probability[i];
        together <= 1.0 - p
    });
    let mut leaves = vec![true; kept.len()];
    order[goes.count()..].iter().for_each(|&i| leaves[i] = false);
    remove(kept, |i| leaves[i]);
}

/// Drops candidates less likely than a bound, which follows from the highest probability and all of them; the most likely one stays.
fn cut_below(kept: &mut Vec<Candidate>, bound: impl Fn(f64, &[f64]) -> f64) {
    let probability = probabilities(kept);
    let highest = probability.iter().copied().fold(0.0, f64::max);
    let bound = bound(highest, &probability).min(highest);
    remove(kept, |i| probability[i] < bound);
}

fn entropy(probability: &[f64]) -> f64 {
    -probability.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

fn cut_untypical(kept: &mut Vec<Candidate>, mass: f64) {
    let probability = probabilities(kept);
    let entropy = entropy(&probability);
    let distance: Vec<f64> = probability.iter().map(|p| (-p.ln() - entropy).abs()).collect();
    let mut order: Vec<usize> = (0..kept.len()).collect();
    order.sort_by(|&a, &b| distance[a].total_cmp(&distance[b]));
    let mut together = 0.0;
    let enough = order.iter().position(|&i| {
        together += probability[i];
        together >= mass
    });
    let farthest = distance[order[enough.unwrap_or(order.len() - 1)]];
    remove(kept, |i| distance[i] > farthest);
}

/// Removes the candidates at the places of which `goes` says so.
fn remove(kept: &mut Vec<Candidate>, goes: impl Fn(usize) -> bool) {
    let mut at = 0..;
    kept.retain(|_| at.next().is_some_and(|i| !goes(i)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token 1 of the prompt does not count; token 2 was written twice, token 3 once.
    #[test]
    fn presence_counts_once_and_frequency_each_time() {
        let rules = SamplingRules { presence_penalty: 0.5, frequency_penalty: 0.25, ..SamplingRules::default() };
        let mut logits = [1.0f32; 5];
        rules.penalise(&mut logits, TokensSoFar { ids: &[1, 2, 2, 3], num_prompt: 1, eos: &[] });
        assert_eq!(logits.map(|logit| (logit * 4.0) as i32), [4, 4, 0, 1, 4]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let rules = SamplingRules { do_sample: true, top_k: 0, ..SamplingRules::default() };
        let logits: Vec<f32> = (0..12).map(|id| (id % 5) as f32 * 0.7).collect();
        let expected = probabilities(&rules.candidates(&logits));
        let (mut counts, draws) = ([0usize; 12], 100_000);
        for step in 0..draws {
            let so_far = TokensSoFar { ids: &[], num_prompt: 0, eos: &[] };
            counts[rules.choose(&mut logits.clone(), so_far, DrawPlace { seed: 7, sample: 1, step }).unwrap() as usize] += 1;
        }
        let chi: f64 =
            counts.iter().zip(&expected).map(|(&n, p)| (n as f64 - draws as f64 * p).powi(2) / (draws as f64 * p)).sum();
        // 11 degrees of freedom: p > 1e-4 below 37.4.
        assert!(chi < 37.4, "χ² = {chi:.1}");
    }

    #[test]
    fn top_p_keeps_what_a_sort_of_all_keeps() {
        for (seed, p) in (0..).zip([0.0, 0.3, 0.9, 0.999, 1.0 - 1e-12]) {
            // All alike, many alike, and next to none of them likely.
            for spread in [0.0, 0.5, 4.0] {
                let logit = |step| (DrawPlace { seed, sample: 0, step }.unit() * 12.0).floor() as f32 * spread;
                let logits: Vec<f32> = (0..300).map(logit).collect();
                let rules = SamplingRules { top_p: p, top_k: 0, temperature: 1.0, ..SamplingRules::default() };
                let found: Vec<u32> = rules.candidates(&logits).iter().map(|candidate| candidate.id).collect();
                let all = SamplingRules { top_p: 1.0, ..rules }.candidates(&logits);
                let (probability, mut together) = (probabilities(&all), 0.0);
                let mut order: Vec<usize> = (0..all.len()).collect();
                order.sort_by(|&a, &b| descending(all[b], all[a]));
                let goes = order[..299].iter().take_while(|&&i| {
                    together += probability[i];
                    together <= 1.0 - p
                });
                let mut expected: Vec<u32> = order[goes.count()..].iter().map(|&i| i as u32).collect();
                expected.sort_unstable();
                assert_eq!(found, expected, "{p}, {spread}");
            }
        }
    }

    #[test]
    fn next_to_no_temperature_is_none() {
        for temperature in [1e-6, 1e-40, 1e-300] {
            let rules = SamplingRules { do_sample: true, temperature, ..SamplingRules::default() };
            let so_far = TokensSoFar { ids: &[], num_prompt: 0, eos: &[] };
            assert_eq!(rules.choose(&mut [1.0, 3.0, 2.0], so_far, DrawPlace { seed: 7, sample: 1, step: 0 }), Some(1));
        }
    }

    #[test]
    fn a_place_has_its_own_number() {
        let place = DrawPlace { seed: 3, sample: 0, step: 0 };
        assert!((place.unit() - place.unit()).abs() == 0.0);
        let others = [DrawPlace { seed: 4, ..place }, DrawPlace { sample: 1, ..place }, DrawPlace { step: 1, ..place }];
        assert!(others.iter().all(|other| (other.unit() - place.unit()).abs() > 0.0));
    }
}
