//! The order of an epoch: samples of similar length share a micro-batch, the longest first, so that those that end leave it from behind.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::rngs::ChaCha12Rng;
use rand::seq::SliceRandom;

use crate::recipe::{BatchOrder, BatchSize};

/// The micro-batches of one epoch, as indices into `lengths`, of which each stands in one: the same for the same arguments, and as many in every
/// epoch. Another epoch gives another order, and other company for samples of equal length, with `LengthBuckets` also of a similar one. With
/// `LongestFirst` the batch of the longest samples leads (memory runs out early or never), with `ShortestFirst` that of the shortest; the rest is
/// shuffled.
pub fn epoch_batches(lengths: &[usize], size: BatchSize, order: BatchOrder, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    // A stream of its own for each epoch: no epoch's order depends on how many came before it in this process.
    rng.set_stream(epoch.wrapping_add(1));
    let mut samples: Vec<usize> = (0..lengths.len()).collect();
    samples.shuffle(&mut rng);
    // The incomplete batch holds the shortest samples: the batch of the longest is then the largest there is.
    let mut batches = if order == BatchOrder::LengthBuckets {
        bucketed(samples, lengths, size)
    } else {
        // Those of equal length stand in the reverse of the order that was drawn, as they always did.
        samples.reverse();
        samples.sort_by_key(|&sample| Reverse(lengths[sample]));
        consecutive(&samples, lengths, size)
    };
    if order != BatchOrder::LongestFirst {
        batches.reverse();
    }
    let has_leader = matches!(order, BatchOrder::LongestFirst | BatchOrder::ShortestFirst) && !batches.is_empty();
    batches[usize::from(has_leader)..].shuffle(&mut rng);
    batches
}

/// Batches of samples that follow each other, as large as may be; the last one has what is left.
pub fn consecutive(samples: &[usize], lengths: &[usize], size: BatchSize) -> Vec<Vec<usize>> {
    let most = match size {
        BatchSize::Sequences(count) => return samples.chunks(count.max(1)).map(<[usize]>::to_vec).collect(),
        BatchSize::Tokens(most) => most,
    };
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0_usize;
    for &sample in samples {
        tokens = tokens.saturating_add(lengths[sample]);
        if let Some(batch) = batches.last_mut().filter(|_| tokens <= most) {
            batch.push(sample);
        } else {
            batches.push(vec![sample]);
            tokens = lengths[sample];
        }
    }
    batches
}

/// The largest batches of any epoch that no other of them is as long and as wide as, as indices into `lengths`.
pub fn largest_batches(lengths: &[usize], size: BatchSize, order: BatchOrder) -> Vec<Vec<usize>> {
    let mut samples: Vec<usize> = (0..lengths.len()).collect();
    samples.sort_by_key(|&sample| Reverse(lengths[sample]));
    let mut batches = match (size, order) {
        (BatchSize::Tokens(most), BatchOrder::LengthBuckets) => {
            // Whichever samples of a bucket begin a batch, they are no longer than its longest.
            let starts = samples.chunk_by(|&a, &b| bucket(lengths[a]) == bucket(lengths[b])).scan(0, |start, bucket| {
                let first = *start;
                *start += bucket.len();
                Some(first)
            });
            let from = |start: usize| samples[start..].iter().take(width(lengths[samples[start]], most)).copied().collect();
            starts.map(from).collect()
        }
        _ => consecutive(&samples, lengths, size),
    };
    // They become shorter from batch to batch: one must be wider than those before to be the largest in anything.
    let mut widest = 0;
    batches.retain(|batch: &Vec<usize>| {
        let is_wider = batch.len() > widest;
        widest = widest.max(batch.len());
        is_wider
    });
    batches
}

/// Batches of samples from buckets of similar lengths, from the longest; within a bucket they keep their order.
fn bucketed(mut samples: Vec<usize>, lengths: &[usize], size: BatchSize) -> Vec<Vec<usize>> {
    samples.sort_by_cached_key(|&sample| Reverse(bucket(lengths[sample])));
    let mut longest: BTreeMap<usize, usize> = BTreeMap::new();
    for &sample in &samples {
        let longest = longest.entry(bucket(lengths[sample])).or_default();
        *longest = lengths[sample].max(*longest);
    }
    let (mut batches, mut start) = (Vec::new(), 0);
    while start < samples.len() {
        // By the longest of the bucket, not by those that happen to be drawn: so every epoch has as many batches.
        let width = match size {
            BatchSize::Sequences(count) => count.max(1),
            BatchSize::Tokens(most) => width(longest[&bucket(lengths[samples[start]])], most),
        };
        let mut batch = samples[start..samples.len().min(start + width)].to_vec();
        start += batch.len();
        batch.sort_by_key(|&sample| Reverse(lengths[sample]));
        batches.push(batch);
    }
    batches
}

/// Sequences of at most `longest` tokens that have at most `most` tokens together.
fn width(longest: usize, most: usize) -> usize {
    (most / longest.max(1)).max(1)
}

/// Which bucket a length is in: each reaches a quarter further than the one below.
fn bucket(length: usize) -> usize {
    let borders = std::iter::successors(Some(1_usize), |&border| Some((border + border / 4).max(border + 1)));
    borders.take_while(|&border| border < length).count()
}

/// Which batches each of several ranks runs, ascending; `weights` says how heavy each batch is. The heaviest is dealt first, and each to whom has
/// least so far (Graham 1969), so that none waits long for another. Where there are fewer batches than ranks, some have none.
pub fn share(weights: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    let mut heaviest_first: Vec<usize> = (0..weights.len()).collect();
    heaviest_first.sort_by_key(|&batch| Reverse(weights[batch]));
    let mut shares = vec![(0_usize, Vec::new()); ranks.max(1)];
    for batch in heaviest_first {
        if let Some((load, share)) = shares.iter_mut().min_by_key(|(load, share)| (*load, share.len())) {
            *load = load.saturating_add(weights[batch]);
            share.push(batch);
        }
    }
    let ascending = |(_, mut share): (usize, Vec<usize>)| {
        share.sort_unstable();
        share
    };
    shares.into_iter().map(ascending).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_order() -> impl Strategy<Value = BatchOrder> {
        prop::sample::select(BatchOrder::ALL)
    }

    /// The order of earlier versions, which their runs go on in.
    fn earlier(lengths: &[usize], size: usize, order: BatchOrder, seed: u64, epoch: u64) -> Vec<Vec<usize>> {
        let mut rng = ChaCha12Rng::seed_from_u64(seed);
        rng.set_stream(epoch.wrapping_add(1));
        let mut sorted: Vec<usize> = (0..lengths.len()).collect();
        sorted.shuffle(&mut rng);
        sorted.sort_by_key(|&sample| lengths[sample]);
        let first = sorted.len() % size;
        let longest_first = |batch: &[usize]| batch.iter().rev().copied().collect();
        let mut batches: Vec<Vec<usize>> =
            sorted[..first].chunks(size).chain(sorted[first..].chunks(size)).map(longest_first).collect();
        if order == BatchOrder::LongestFirst {
            batches.reverse();
        }
        match (order, &mut batches[..]) {
            (BatchOrder::LongestFirst | BatchOrder::ShortestFirst, [_, tail @ ..]) => tail.shuffle(&mut rng),
            (_, all) => all.shuffle(&mut rng),
        }
        batches
    }

    fn sorted(batches: &[Vec<usize>]) -> Vec<usize> {
        let mut all = batches.concat();
        all.sort_unstable();
        all
    }

    proptest! {
        #[test]
        fn each_sample_stands_in_exactly_one_batch(
            lengths in prop::collection::vec(1usize..50, 0..60), count in 1usize..9, order in any_order(), seed: u64, epoch in 0u64..5,
        ) {
            let size = BatchSize::Sequences(count);
            let batches = epoch_batches(&lengths, size, order, seed, epoch);
            prop_assert!(batches.iter().all(|batch| !batch.is_empty() && batch.len() <= count));
            prop_assert_eq!(batches.len(), lengths.len().div_ceil(count));
            prop_assert!(batches.iter().all(|batch| batch.is_sorted_by_key(|&i| Reverse(lengths[i]))));
            prop_assert_eq!(sorted(&batches), (0..lengths.len()).collect::<Vec<_>>());
            if order == BatchOrder::LengthBuckets {
                return Ok(());
            }
            prop_assert_eq!(&earlier(&lengths, count, order, seed, epoch), &batches);
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
        }

        #[test]
        fn batches_of_tokens_are_full_and_none_is_larger_than_planned(
            lengths in prop::collection::vec(1usize..300, 1..80), most in 1usize..600, order in any_order(), seed: u64,
        ) {
            let size = BatchSize::Tokens(most);
            let tokens = |batch: &[usize]| batch.iter().map(|&i| lengths[i]).sum::<usize>();
            let largest = largest_batches(&lengths, size, order);
            let mut counts = Vec::new();
            for epoch in 0..3 {
                let batches = epoch_batches(&lengths, size, order, seed, epoch);
                prop_assert_eq!(sorted(&batches), (0..lengths.len()).collect::<Vec<_>>());
                prop_assert!(batches.iter().all(|batch| batch.is_sorted_by_key(|&i| Reverse(lengths[i]))));
                prop_assert!(batches.iter().all(|batch| batch.len() == 1 || tokens(batch) <= most));
                let is_within = |batch: &Vec<usize>| largest.iter().any(|large| {
                    large.len() >= batch.len() && batch.iter().zip(large).all(|(&i, &j)| lengths[i] <= lengths[j])
                });
                prop_assert!(batches.iter().all(is_within));
                counts.push(batches.len());
            }
            prop_assert!(counts.iter().all(|&count| count == counts[0]));
            if order != BatchOrder::LengthBuckets {
                // A batch ends only where the next sample has no room.
                let mut batches = epoch_batches(&lengths, size, order, seed, 0);
                batches.sort_by_key(|batch| Reverse((lengths[batch[0]], lengths[batch[batch.len() - 1]])));
                prop_assert!(batches.windows(2).all(|pair| tokens(&pair[0]) + lengths[pair[1][0]] > most));
            }
        }

        #[test]
        fn ranks_have_each_batch_once_and_wait_little(tokens in prop::collection::vec(1usize..50, 0..40), ranks in 1usize..6) {
            let shares = share(&tokens, ranks);
            prop_assert_eq!(shares.len(), ranks);
            prop_assert!(shares.iter().all(|share| share.is_sorted()));
            prop_assert_eq!(sorted(&shares), (0..tokens.len()).collect::<Vec<_>>());
            // Whoever has most had no more than the mean before its last.
            let loads: Vec<usize> = shares.iter().map(|share| share.iter().map(|&batch| tokens[batch]).sum()).collect();
            let (most, all) = (loads.iter().max().unwrap(), tokens.iter().sum::<usize>());
            let heaviest = tokens.iter().max().unwrap_or(&0);
            prop_assert!(*most <= all / ranks + heaviest);
            prop_assert_eq!(&share(&tokens, 1)[0], &(0..tokens.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_heaviest_are_spread() {
        assert_eq!(share(&[2, 7, 3, 6], 2), [vec![0, 1], vec![2, 3]]);
        assert_eq!(share(&[5, 5, 5, 5], 2), [[0, 2], [1, 3]]);
        assert_eq!(share(&[9], 3), [vec![0], vec![], vec![]]);
    }

    #[test]
    fn epochs_differ_and_repeat() {
        let lengths: Vec<usize> = (0..64).collect();
        let order = |epoch| epoch_batches(&lengths, BatchSize::Sequences(4), BatchOrder::Shuffled, 7, epoch);
        assert_ne!(order(0), order(1));
        assert_eq!(order(1), order(1));
        let equal = vec![9; 64];
        let company = |epoch| {
            let mut batch = epoch_batches(&equal, BatchSize::Sequences(4), BatchOrder::Shuffled, 7, epoch)
                .into_iter()
                .find(|b| b.contains(&0))
                .unwrap();
            batch.sort_unstable();
            batch
        };
        assert_ne!(company(0), company(1));
    }

    #[test]
    fn the_longest_batch_is_full() {
        let lengths = [5, 1, 9, 7, 3];
        let mut first = epoch_batches(&lengths, BatchSize::Sequences(2), BatchOrder::LongestFirst, 0, 0).swap_remove(0);
        first.sort_unstable();
        assert_eq!(first, [2, 3]);
        assert_eq!(epoch_batches(&lengths, BatchSize::Sequences(2), BatchOrder::ShortestFirst, 0, 0)[0], [1]);
    }

    #[test]
    fn buckets_give_other_company_each_epoch() {
        let lengths: Vec<usize> = (0..64).map(|sample| 1000 + sample).collect();
        let batches = |epoch| epoch_batches(&lengths, BatchSize::Tokens(8000), BatchOrder::LengthBuckets, 7, epoch);
        let company = |epoch| batches(epoch).into_iter().find(|batch| batch.contains(&5)).unwrap();
        assert_ne!(company(0), company(1));
        assert_eq!(batches(0).len(), 64_usize.div_ceil(7));
    }
}
