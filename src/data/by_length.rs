//! The order of an epoch: samples of similar length share a micro-batch, the longest first, so that those that end leave it from behind.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha12Rng;

use crate::recipe::BatchOrder;

/// The micro-batches of one epoch, as indices into `lengths`; each sample stands in exactly one.
///
/// Another epoch gives another order, and other company for samples of equal length; the same arguments give the same
/// batches. With `LongestFirst` the batch of the longest samples leads (memory runs out early or never), with
/// `ShortestFirst` that of the shortest; the rest is shuffled.
pub fn epoch_batches(lengths: &[usize], micro_batch_size: usize, order: BatchOrder, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
    let size = micro_batch_size.max(1);
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    // A stream of its own for each epoch: no epoch's order depends on how many came before it in this process.
    rng.set_stream(epoch.wrapping_add(1));
    let mut sorted: Vec<usize> = (0..lengths.len()).collect();
    sorted.shuffle(&mut rng);
    sorted.sort_by_key(|&sample| lengths[sample]);
    // The incomplete batch holds the shortest samples: the batch of the longest is then the largest there is.
    let first = sorted.len() % size;
    let longest_first = |batch: &[usize]| batch.iter().rev().copied().collect();
    let mut batches: Vec<Vec<usize>> =
        sorted[..first].chunks(size).chain(sorted[first..].chunks(size)).map(longest_first).collect();
    match order {
        BatchOrder::Shuffled => batches.shuffle(&mut rng),
        BatchOrder::LongestFirst => {
            batches.reverse();
            shuffle_tail(&mut batches, &mut rng);
        }
        BatchOrder::ShortestFirst => shuffle_tail(&mut batches, &mut rng),
    }
    batches
}

fn shuffle_tail(batches: &mut [Vec<usize>], rng: &mut ChaCha12Rng) {
    if let Some((_, tail)) = batches.split_first_mut() {
        tail.shuffle(rng);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_order() -> impl Strategy<Value = BatchOrder> {
        prop_oneof![Just(BatchOrder::Shuffled), Just(BatchOrder::LongestFirst), Just(BatchOrder::ShortestFirst)]
    }

    proptest! {
        #[test]
        fn each_sample_stands_in_exactly_one_batch(
            lengths in prop::collection::vec(1usize..50, 0..60), size in 1usize..9, order in any_order(), seed: u64, epoch in 0u64..5,
        ) {
            let batches = epoch_batches(&lengths, size, order, seed, epoch);
            prop_assert!(batches.iter().all(|batch| !batch.is_empty() && batch.len() <= size));
            prop_assert_eq!(batches.len(), lengths.len().div_ceil(size));
            prop_assert!(batches.iter().all(|batch| batch.is_sorted_by_key(|&i| std::cmp::Reverse(lengths[i]))));
            // Batches are intervals of the sorted lengths: sorted by their ends they don't overlap.
            let mut ranges: Vec<(usize, usize)> = batches.iter().map(|batch| {
                let of = |i: &usize| lengths[*i];
                (batch.iter().map(of).min().unwrap(), batch.iter().map(of).max().unwrap())
            }).collect();
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            let longest = lengths.iter().max();
            if order == BatchOrder::LongestFirst && !lengths.is_empty() {
                prop_assert!(batches[0].iter().any(|i| Some(&lengths[*i]) == longest));
            }
            let mut all = batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
            prop_assert_eq!(epoch_batches(&lengths, size, order, seed, epoch), batches);
        }
    }

    #[test]
    fn epochs_differ_and_repeat() {
        let lengths: Vec<usize> = (0..64).collect();
        let order = |epoch| epoch_batches(&lengths, 4, BatchOrder::Shuffled, 7, epoch);
        assert_ne!(order(0), order(1));
        assert_eq!(order(1), order(1));
        let equal = vec![9; 64];
        let company = |epoch| {
            let mut batch =
                epoch_batches(&equal, 4, BatchOrder::Shuffled, 7, epoch).into_iter().find(|b| b.contains(&0)).unwrap();
            batch.sort_unstable();
            batch
        };
        assert_ne!(company(0), company(1));
    }

    #[test]
    fn the_longest_batch_is_full() {
        let lengths = [5, 1, 9, 7, 3];
        let mut first = epoch_batches(&lengths, 2, BatchOrder::LongestFirst, 0, 0).swap_remove(0);
        first.sort_unstable();
        assert_eq!(first, [2, 3]);
        assert_eq!(epoch_batches(&lengths, 2, BatchOrder::ShortestFirst, 0, 0)[0], [1]);
    }
}
