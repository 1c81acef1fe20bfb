//! Sizes of chunks drawn at random: a few for each step, and one of them for each chunk, without any state.
//!
//! What is drawn depends on the run's seed, the step and the number of the chunk alone: not on the batching, nor on where a run was resumed.

use std::ops::RangeInclusive;

use rand::rngs::ChaCha12Rng;
use rand::{Rng, SeedableRng};

use crate::units::StepKey;

/// Few, so that a step has few shapes.
const CANDIDATES: usize = 5;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RandomSizes {
    candidates: [usize; CANDIDATES],
    key: StepKey,
}

impl RandomSizes {
    /// Draws the candidates of a step around `chunk_size`; none is longer than the smallest cache.
    pub fn new(key: StepKey, chunk_size: usize, smallest_cache: usize) -> Self {
        let (lower, upper) = Self::range(chunk_size, smallest_cache).into_inner();
        let number = (upper - lower + 1) as u64;
        let candidates = std::array::from_fn(|i| lower + (draw(key, i) % number) as usize);
        Self { candidates, key }
    }

    /// The smallest and the largest size that can be drawn: half of `chunk_size` less or more.
    pub fn range(chunk_size: usize, smallest_cache: usize) -> RangeInclusive<usize> {
        let half = chunk_size / 2;
        let upper = chunk_size.saturating_add(half).min(smallest_cache);
        (chunk_size - half).clamp(1, upper.max(1))..=upper.max(1)
    }

    pub fn of_chunk(&self, chunk: usize) -> usize {
        self.candidates[(draw(self.key, CANDIDATES + chunk) % CANDIDATES as u64) as usize]
    }
}

/// The `index`-th number of a step.
fn draw(key: StepKey, index: usize) -> u64 {
    let mut rng = ChaCha12Rng::seed_from_u64(key.seed);
    // The order of an epoch is drawn from the lower half of the streams.
    rng.set_stream(key.step | 1 << 63);
    // A number takes two words.
    rng.set_word_pos(2 * index as u128);
    rng.next_u64()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sizes_are_in_range_and_a_function_of_seed_step_and_chunk(
            seed: u64, step in 0u64..1_000_000, chunk_size in 1usize..5000, cache in 1usize..9000,
        ) {
            let (lower, upper) = RandomSizes::range(chunk_size, cache).into_inner();
            prop_assert!(1 <= lower && lower <= upper && upper <= cache && upper <= chunk_size + chunk_size / 2);
            prop_assert!(lower == chunk_size - chunk_size / 2 || lower == upper);
            let key = StepKey { seed, step };
            let sizes = RandomSizes::new(key, chunk_size, cache);
            let all: Vec<usize> = (1..40).map(|chunk| sizes.of_chunk(chunk)).collect();
            prop_assert!(all.iter().all(|size| (lower..=upper).contains(size)));
            let again = RandomSizes::new(key, chunk_size, cache);
            prop_assert!((1..40).rev().zip(all.iter().rev()).all(|(chunk, &size)| again.of_chunk(chunk) == size));
        }
    }

    #[test]
    fn steps_seeds_and_chunks_differ_and_the_whole_range_is_used() {
        let of = |seed, step| RandomSizes::new(StepKey { seed, step }, 8, 100);
        assert_ne!(of(1, 1), of(1, 2));
        assert_ne!(of(1, 1).candidates, of(1, 2).candidates);
        assert_ne!(of(1, 1).candidates, of(2, 1).candidates);
        let mut seen = [0; 13];
        for step in 0..200 {
            let sizes = of(7, step);
            let picked: std::collections::BTreeSet<usize> = (1..60).map(|chunk| sizes.of_chunk(chunk)).collect();
            let drawn: std::collections::BTreeSet<usize> = sizes.candidates.into_iter().collect();
            assert_eq!(picked, drawn, "every candidate is picked");
            sizes.candidates.iter().for_each(|&size| seen[size] += 1);
        }
        // 1000 draws among 4 to 12: about 111 each.
        assert!(seen[..4].iter().all(|&n| n == 0) && seen[4..].iter().all(|&n| (70..=160).contains(&n)), "{seen:?}");
    }
}
