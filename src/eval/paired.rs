//! Differences between two evaluations of the same samples, with intervals from the bootstrap (Efron 1979).

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// How much a figure changes from one evaluation to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PairedDifference {
    pub samples: usize,
    pub difference: f64,
    /// Ends of the interval that 95 % of the resampled differences are in.
    pub low: f64,
    pub high: f64,
}

/// What a sample contributes to a figure of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct Contribution {
    /// Index of the sample in its file.
    pub sample: u64,
    /// The figure's sum over the sample.
    pub sum: f64,
    /// What the sum is divided by: how many targets, or 1.
    pub weight: f64,
}

const RESAMPLES: usize = 10_000;

impl PairedDifference {
    /// The other evaluation less the first: `Σ (other − first) / Σ weight`. Samples are resampled, always by the same draws; `None` where they
    /// are not the same with the same weights, or weigh nothing.
    pub fn of(firsts: &[Contribution], others: &[Contribution]) -> Option<Self> {
        // With another tokenizer a sample has other targets.
        let samples = |of: &[Contribution]| of.iter().map(|one| (one.sample, one.weight.to_bits())).collect::<Vec<_>>();
        if samples(firsts) != samples(others) {
            return None;
        }
        let mean = |chosen: &mut dyn Iterator<Item = &(&Contribution, &Contribution)>| {
            let (sum, weight) =
                chosen.fold((0.0, 0.0), |(sum, weight), (first, other)| (sum + other.sum - first.sum, weight + first.weight));
            sum / weight
        };
        let pairs: Vec<_> = firsts.iter().zip(others).filter(|(first, _)| first.weight > 0.0).collect();
        if pairs.is_empty() {
            return None;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let mut resampled: Vec<f64> =
            (0..RESAMPLES).map(|_| mean(&mut (0..pairs.len()).map(|_| &pairs[rng.random_range(0..pairs.len())]))).collect();
        resampled.sort_by(f64::total_cmp);
        let at = |part: f64| resampled[((RESAMPLES - 1) as f64 * part).round() as usize];
        Some(Self { samples: pairs.len(), difference: mean(&mut pairs.iter()), low: at(0.025), high: at(0.975) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples with these sums, which take turns in these weights.
    fn contributions(sums: impl Iterator<Item = f64>, weights: &[f64]) -> Vec<Contribution> {
        let one = |(at, sum): (usize, f64)| Contribution { sample: at as u64, sum, weight: weights[at % weights.len()] };
        sums.enumerate().map(one).collect()
    }

    #[test]
    fn the_interval_is_as_wide_as_the_standard_error_says() {
        let firsts = contributions((0..400).map(|_| 1.0), &[1.0]);
        let others = contributions((0..400).map(|at: usize| 1.5 + f64::from(at.is_multiple_of(2)) - 0.5), &[1.0]);
        let found = PairedDifference::of(&firsts, &others).unwrap();
        assert!((found.difference - 0.5).abs() < 1e-12 && found.samples == 400);
        // The standard deviation is a half, the standard error a fortieth.
        let half = 1.96 * 0.025;
        assert!((found.high - 0.5 - half).abs() < 0.005 && (0.5 - found.low - half).abs() < 0.005, "{found:?}");
        assert_eq!(PairedDifference::of(&firsts, &others), Some(found));
        assert_eq!(PairedDifference::of(&[], &[]), None);
        assert_eq!(PairedDifference::of(&firsts, &others[1..]), None);
    }

    #[test]
    fn samples_weigh_as_their_targets_do() {
        let [firsts, others] = [[10.0, 1.0], [20.0, 1.0]].map(|sums| contributions(sums.into_iter(), &[10.0, 90.0]));
        let found = PairedDifference::of(&firsts, &others).unwrap();
        assert!(
            (found.difference - 0.1).abs() < 1e-12 && found.low.abs() < 1e-12 && (found.high - 1.0).abs() < 1e-12,
            "{found:?}"
        );
    }
}
