//! The slots that leave, in the order of their rank, and how they are found.

use tch::{Kind, Tensor};

use super::{Entries, Policy, Rank};

/// Slots to evict, lowest rank first: a row that needs fewer takes them from the front.
#[derive(Debug)]
pub enum Victims {
    /// The same for all rows and heads, known on the host.
    Shared(Vec<i64>),
    /// `(B, G, e)`, i64.
    PerHead(Tensor),
}

impl Victims {
    /// How many slots leave per row and head.
    pub fn len(&self) -> usize {
        match self {
            Self::Shared(slots) => slots.len(),
            Self::PerHead(slots) => slots.size()[2] as usize,
        }
    }

    /// Whether nothing leaves.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slots as one tensor `(B, G, e)`, i64.
    pub fn slots(&self, batch: i64, groups: i64, device: tch::Device) -> Tensor {
        match self {
            Self::Shared(slots) => Tensor::from_slice(slots).to_device(device).expand([batch, groups, slots.len() as i64], false),
            Self::PerHead(slots) => slots.to_device(device).to_kind(Kind::Int64),
        }
    }
}

/// Chooses the victims of one layer. `host_positions` are the positions by slot where all rows and heads agree on them.
pub(super) fn choose(policy: &dyn Policy, entries: &Entries<'_>, host_positions: Option<&[i64]>) -> Victims {
    let (count, young) = (entries.num_evicted, entries.next_position as i64 - policy.grace() as i64);
    match (policy.rank(entries), host_positions) {
        (Rank::ByPosition { keep_first }, Some(positions)) => {
            let mut slots: Vec<i64> = (0..positions.len() as i64).filter(|&s| positions[s as usize] < young).collect();
            slots.sort_unstable_by_key(|&s| leaves_at(positions[s as usize], keep_first));
            slots.truncate(count);
            Victims::Shared(slots)
        }
        (Rank::ByPosition { keep_first }, None) => {
            let position = &entries.position_bgc;
            // An ended row may hold -1: its candidates are all retained, so that any slot serves.
            let kept = position.ge(0).logical_and(&position.lt(keep_first as i64));
            let key = (position.neg() + LAST).where_self(&kept, position);
            lowest(&key.masked_fill(&position.ge(young), i64::MAX), count)
        }
        (Rank::ByScore(score_bgc), _) => {
            let position = &entries.position_bgc;
            let sinks = position.ge(0).logical_and(&position.lt(policy.sinks() as i64));
            let key = ordered(&score_bgc).bitwise_left_shift_tensor_scalar(32) + position.clamp_min(0);
            lowest(&key.masked_fill(&sinks.logical_or(&position.ge(young)), i64::MAX), count)
        }
    }
}

/// Above every position.
const LAST: i64 = 1 << 40;

/// Where a position stands in the order of leaving, with `keep_first` = 2: 2, 3, 4, …, and when nothing else is left 1, 0.
fn leaves_at(position: i64, keep_first: usize) -> i64 {
    if position < keep_first as i64 { LAST - position } else { position }
}

fn lowest(key_bgc: &Tensor, count: usize) -> Victims {
    Victims::PerHead(key_bgc.topk(count as i64, 2, false, true).1)
}

/// Maps f32 to i64 so that order is kept, and with 32 bits to spare below for the position: comparing keys compares scores
/// first and positions second, and all keys differ. Example: 1.0 has the bits 0x3f800000, 2.0 has 0x40000000; a negative
/// number has the sign bit set and grows downwards, so its other 31 bits are flipped.
fn ordered(score_bgc: &Tensor) -> Tensor {
    // Adding zero turns -0.0 into 0.0, which would otherwise rank below it.
    let bits = (score_bgc.to_kind(Kind::Float) + 0.0).view_dtype(Kind::Int).to_kind(Kind::Int64);
    bits.bitwise_xor_tensor(&bits.bitwise_right_shift_tensor_scalar(63).bitwise_and(0x7fff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_scores_first_and_positions_second() {
        let scores = [-2.0f32, -1.0, -0.0, 0.0, 1e-30, 0.5, 2.0, 1e30];
        let keys = Vec::<i64>::try_from(ordered(&Tensor::from_slice(&scores))).unwrap();
        assert!(keys.windows(2).all(|w| w[0] <= w[1]), "{keys:?}");
        assert_eq!(keys[2], keys[3]);
        let score = Tensor::from_slice(&[1.0f32, 0.5, 0.5, 3.0]).view([1, 1, 4]);
        let position = Tensor::from_slice(&[4i64, 9, 2, 0]).view([1, 1, 4]);
        let key = ordered(&score).bitwise_left_shift_tensor_scalar(32) + position;
        let Victims::PerHead(slots) = lowest(&key, 3) else { panic!("per head") };
        assert_eq!(Vec::<i64>::try_from(slots.view(-1)).unwrap(), [2, 1, 0]);
    }
}
