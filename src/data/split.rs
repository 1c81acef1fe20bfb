//! Which samples are held out for validation when one file serves both purposes.

use rand::SeedableRng;
use rand::rngs::ChaCha12Rng;
use rand::seq::SliceRandom;

use super::dataset::Piece;

/// Divides pieces into training and validation, each in its old order; all windows of a sample go the same way.
pub(super) fn split(pieces: Vec<Piece>, fraction: f64, seed: u64) -> (Vec<Piece>, Vec<Piece>) {
    let samples: Vec<usize> = pieces.chunk_by(|a, b| a.sample == b.sample).map(|windows| windows[0].sample).collect();
    let held_out = held_out(&samples, fraction, seed);
    pieces.into_iter().partition(|piece| held_out.binary_search(&piece.sample).is_err())
}

/// The samples that are held out of those that are run, in order: of two or more at least one, if the fraction is positive, and never all.
pub(super) fn held_out(samples: &[usize], fraction: f64, seed: u64) -> Vec<usize> {
    let most = samples.len().saturating_sub(1);
    let count = if fraction > 0.0 { ((samples.len() as f64 * fraction).round() as usize).clamp(most.min(1), most) } else { 0 };
    let mut drawn = samples.to_vec();
    drawn.shuffle(&mut ChaCha12Rng::seed_from_u64(seed));
    drawn.truncate(count);
    drawn.sort_unstable();
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split_samples(samples: &[usize], fraction: f64, seed: u64) -> (Vec<usize>, Vec<usize>) {
        let held_out = held_out(samples, fraction, seed);
        (samples.iter().copied().filter(|sample| !held_out.contains(sample)).collect(), held_out)
    }

    proptest! {
        #[test]
        fn each_sample_is_on_one_side(n in 1usize..200, fraction in 0.0f64..1.0, seed: u64) {
            let samples: Vec<usize> = (0..n).map(|i| i * 3).collect();
            let (train, validation) = split_samples(&samples, fraction, seed);
            prop_assert!(!train.is_empty());
            prop_assert!(train.is_sorted() && validation.is_sorted());
            let mut all = [train.clone(), validation].concat();
            all.sort_unstable();
            prop_assert_eq!(&all, &samples);
            prop_assert_eq!(train, split_samples(&samples, fraction, seed).0);
        }
    }

    #[test]
    fn sizes_follow_the_fraction() {
        let samples: Vec<usize> = (0..100).collect();
        assert_eq!(split_samples(&samples, 0.1, 1).1.len(), 10);
        assert_eq!(split_samples(&samples, 0.0, 1).1.len(), 0);
        assert_eq!(split_samples(&samples[..2], 0.1, 1).1.len(), 1);
        assert_eq!(split_samples(&samples[..1], 0.5, 1), (vec![0], vec![]));
        assert_ne!(split_samples(&samples, 0.1, 1).1, split_samples(&samples, 0.1, 2).1);
    }
}
