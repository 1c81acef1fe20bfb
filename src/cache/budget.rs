//! Budgets of slots by sequence and KV head, of one layer or of all, chosen once, before the first entries leave (as in `AdaKV`,
//! arXiv 2407.11550).
//!
//! All heads have buffers as long as the largest share, which is at most twice the cache length: of the better half of a sequence's entries,
//! each head counts its own.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::ChunkSpan;
use crate::native::cuda::on_device;

/// How the slots of a layer are shared out.
#[derive(Clone, Debug)]
pub struct HeadBudgets {
    /// Index of the chunk before which the shares come into force.
    pub index: usize,
    /// Slots of the largest share, which all buffers have from then on.
    pub slots: usize,
    pub shares: Vec<Vec<usize>>,
    /// Which entries leave at once, as their head holds more than its share: those of each sequence and head together.
    pub leaving: Vec<bool>,
}

impl HeadBudgets {
    /// Budgets that were written down: `filled` entries a head when they come into force, of which `leaving` leave.
    pub(super) fn recorded(index: usize, filled: usize, shares: Vec<Vec<usize>>, leaving: Vec<bool>) -> Self {
        let slots = shares.iter().flatten().copied().max().unwrap_or(0).max(filled);
        Self { index, slots, shares, leaving }
    }

    /// The budgets of each of several layers with caches of the same length, from the keys of each: one budget over all their heads.
    pub fn across_layers(keys_bgc: &[Tensor], span: &ChunkSpan, cache_length: usize, floor: f64) -> Vec<Self> {
        let all = Self::new(&Tensor::cat(keys_bgc, 1), span, cache_length, floor);
        let mut first = 0;
        let of_layer = |key_bgc: &Tensor| {
            let (groups, filled) = (key_bgc.size()[1] as usize, key_bgc.size()[2] as usize);
            let shares: Vec<Vec<usize>> = all.shares.iter().map(|heads| heads[first..][..groups].to_vec()).collect();
            let of_sequence = all.leaving.chunks((all.leaving.len() / shares.len()).max(1));
            let leaving = of_sequence.flat_map(|heads| &heads[first * filled..][..groups * filled]).copied().collect();
            first += groups;
            Self::recorded(span.index, filled, shares, leaving)
        };
        keys_bgc.iter().map(of_layer).collect()
    }

    /// Shares out `cache_length` slots per head, each head keeping `floor` of its own whatever the scores. `key_bgc` orders a head's
    /// entries and those of different heads of a sequence.
    pub(super) fn new(key_bgc: &Tensor, span: &ChunkSpan, cache_length: usize, floor: f64) -> Self {
        let (batch, groups, filled) = key_bgc.size3().unwrap_or_default();
        let (groups, filled) = (groups as usize, filled as usize);
        let keys: Vec<i64> = Vec::try_from(key_bgc.to_device(Device::Cpu).contiguous().view(-1)).unwrap_or_default();
        let mut shares = Vec::with_capacity(batch as usize);
        let mut leaving = vec![false; keys.len()];
        for (sequence, keys) in keys.chunks(groups * filled).enumerate() {
            // Alone, a sequence that ends before its first eviction would lose nothing, and share out nothing.
            if filled + span.taken_by(sequence) <= cache_length {
                shares.push(vec![cache_length; groups]);
                continue;
            }
            let own = share_out(keys, groups, filled, cache_length, floor);
            for (head, keys) in keys.chunks(filled).enumerate() {
                let mut slots: Vec<usize> = (0..filled).collect();
                slots.sort_by_key(|&slot| keys[slot]);
                for &slot in &slots[..filled.saturating_sub(own[head])] {
                    leaving[(sequence * groups + head) * filled + slot] = true;
                }
            }
            shares.push(own);
        }
        Self::recorded(span.index, filled, shares, leaving)
    }
}

/// The shares of one sequence: `floor` of the cache length for each head, the rest by how many of the better half of all entries are its
/// own; together exactly `groups · cache_length`.
fn share_out(keys: &[i64], groups: usize, filled: usize, cache_length: usize, floor: f64) -> Vec<usize> {
    let mut entries: Vec<usize> = (0..keys.len()).collect();
    // Equal keys are taken from all heads in turn.
    entries.sort_by_key(|&i| (Reverse(keys[i]), i % filled, i / filled));
    let mut counts = vec![0usize; groups];
    let better = keys.len().div_ceil(2);
    entries[..better].iter().for_each(|&i| counts[i / filled] += 1);
    let (least, total) = ((floor * cache_length as f64) as usize, groups * cache_length);
    let free = total - groups * least;
    let mut shares: Vec<usize> = counts.iter().map(|&count| least + count * free / better.max(1)).collect();
    // Rounding down leaves a few; the heads that lost most by it get one each, in turns where there was nothing to count.
    let mut order: Vec<usize> = (0..groups).collect();
    order.sort_by_key(|&head| (Reverse(counts[head] * free % better.max(1)), head));
    let left = total - shares.iter().sum::<usize>();
    (0..left).for_each(|i| shares[order[i % groups]] += 1);
    shares
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BudgetState {
    pub(super) index: usize,
    pub(super) slots: usize,
    shares: Vec<Vec<usize>>,
    held: Vec<Vec<usize>>,
    pub(super) filled_before: usize,
    /// The positions `(B, G, filled)` of the slots that were filled before. They are not written: a saved cache has them as a tensor.
    #[serde(skip)]
    pub(super) before_bgc: Tensor,
}

impl BudgetState {
    pub(super) fn new(budgets: &HeadBudgets, filled: usize, position_bgc: &Tensor) -> Self {
        let HeadBudgets { index, slots, ref shares, .. } = *budgets;
        let held = shares.iter().map(|sequence| sequence.iter().map(|&share| share.min(filled)).collect()).collect();
        let before_bgc = position_bgc.narrow(2, 0, filled as i64).copy();
        Self { index, slots, shares: shares.clone(), held, filled_before: filled, before_bgc }
    }

    /// These budgets, with other positions of the slots that were filled before.
    pub(super) fn with_positions(&self, before_bgc: Tensor) -> Self {
        Self { shares: self.shares.clone(), held: self.held.clone(), before_bgc, ..*self }
    }

    /// Entries of a head, on average over all sequences and heads.
    pub(super) fn mean_held(&self) -> usize {
        let held = self.held.iter().flatten();
        held.clone().sum::<usize>() / held.count().max(1)
    }

    /// How many of the next `count` slots each head of the first `sequences` fills from empty ones, as its share lacks them `(B, G, 1)`.
    pub(super) fn empty_first(&self, sequences: i64, count: usize, device: Device) -> Tensor {
        let missing = |(shares, held): (&Vec<usize>, &Vec<usize>)| {
            shares.iter().zip(held).map(|(share, held)| (share - held).min(count) as i64).collect::<Vec<_>>()
        };
        let all: Vec<i64> = self.shares.iter().zip(&self.held).take(sequences as usize).flat_map(missing).collect();
        on_device(&all, device).view([sequences, -1, 1])
    }

    /// Records that every head has taken `count` more, or is full.
    pub(super) fn take(&mut self, count: usize) {
        let Self { shares, held, .. } = self;
        for (shares, held) in shares.iter().zip(held) {
            shares.iter().zip(held).for_each(|(share, held)| *held = (*held + count).min(*share));
        }
    }
}

/// Puts the empty slots which a chunk takes, `empty_first (B, G, 1)` of them, before everything else, and the other empty ones behind it.
pub(super) fn order_empty(key_bgc: &Tensor, position_bgc: &Tensor, empty_first: &Tensor) -> Tensor {
    let is_empty = position_bgc.lt(0);
    let number = is_empty.cumsum(2, Kind::Int64);
    let taken = is_empty.logical_and(&number.le_tensor(empty_first));
    let first = &number + i64::MIN;
    first.where_self(&taken, &key_bgc.masked_fill(&is_empty, i64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_head_with_all_the_better_entries_gets_twice_the_length() {
        let keys: Vec<i64> = (0..10).map(|i| if i < 5 { 100 + i } else { i }).collect();
        assert_eq!(share_out(&keys, 2, 5, 5, 0.0), [10, 0]);
        assert_eq!(share_out(&keys, 2, 5, 5, 0.2), [9, 1]);
        assert_eq!(share_out(&[7; 10], 2, 5, 5, 0.0), [6, 4]);
    }

    #[test]
    fn a_layer_with_the_better_entries_gets_what_another_gives_up() {
        let keys = [[[[0i64, 1, 2, 3]], [[4, 5, 6, 7]]], [[[10, 11, 12, 13]], [[14, 15, 16, 17]]]];
        let key = |layer: usize| Tensor::from_slice(&keys[layer].concat().concat()).view([1, 2, 4]);
        let span = ChunkSpan { index: 3, chunk: 1, start: 4, len: 1, real: vec![1], is_block: false };
        let [below, above] = &HeadBudgets::across_layers(&[key(0), key(1)], &span, 4, 0.25)[..] else { panic!("two layers") };
        assert_eq!((&below.shares, &above.shares), (&vec![vec![1, 1]], &vec![vec![7, 7]]));
        assert_eq!((below.index, below.slots, above.slots), (3, 4, 7));
        assert_eq!(below.leaving, [true, true, true, false, true, true, true, false]);
        assert!(above.leaving.iter().all(|leaves| !leaves));
    }

    proptest! {
        #[test]
        fn shares_add_up_and_keep_their_bounds(
            keys in prop::collection::vec(-50i64..50, 1..120), groups in 1usize..6, extra in 0usize..9, floor in 0.0f64..1.0,
        ) {
            let filled = keys.len().div_ceil(groups);
            let keys: Vec<i64> = keys.iter().copied().cycle().take(filled * groups).collect();
            let cache_length = filled + extra;
            let shares = share_out(&keys, groups, filled, cache_length, floor);
            prop_assert_eq!(shares.iter().sum::<usize>(), groups * cache_length);
            let least = (floor * cache_length as f64) as usize;
            // What the planner counts with.
            let most = if groups > 1 { 2 * cache_length - least } else { cache_length };
            prop_assert!(shares.iter().all(|share| (least..=most).contains(share)), "{:?}", shares);
        }
    }
}
