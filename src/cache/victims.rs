//! The slots that leave, in the order of their score, and how they are found.

use std::ops::Range;

use tch::{Device, Kind, TchError, Tensor};

use super::budget::order_empty;
use super::policy::Agreement;
use super::{Entries, EvictionOrder, Policy, PolicyTraits};
use crate::native::cuda::on_device;
use crate::native::or_panic;
use crate::store::{Waiting, copies_are_async};
use crate::units::Bytes;

/// Slots to evict, lowest score first: who needs fewer takes them from the front. On the host, in integers of the smallest width that serves.
#[derive(Debug)]
pub struct Victims {
    /// `(1, 1, e)` where all sequences and heads agree, `(B, 1, e)` where the heads of a sequence do, else `(B, G, e)`.
    packed: Waiting<Tensor>,
    /// The packed slots on the CUDA device that has chosen, until the chunk is written: the host need not know them before.
    fresh: Option<Tensor>,
    /// The slots in i64, where the host has chosen, until the chunk is written.
    unpacked: Option<Tensor>,
}

impl Victims {
    /// Packs slots below `capacity` that the host has chosen or read: `(1 or B, 1 or G, e)`, i64.
    pub(super) fn of_host(slot_bge: &Tensor, capacity: usize) -> Self {
        let packed = Waiting::here(&pack(slot_bge, Self::kind(capacity)));
        Self { packed, fresh: None, unpacked: None }
    }

    /// Packs slots below `capacity`, and keeps them unpacked until the chunk is written.
    ///
    /// # Shapes
    /// `(1 or B, 1 or G, e)`, i64.
    pub fn new(slot_bge: &Tensor, capacity: usize) -> Self {
        let packed = pack(slot_bge, Self::kind(capacity));
        let fresh = copies_are_async(packed.device()).then(|| packed.shallow_clone());
        let is_here = fresh.is_none() && slot_bge.device() == Device::Cpu;
        Self { packed: Waiting::send(&packed), fresh, unpacked: is_here.then(|| slot_bge.shallow_clone()) }
    }

    /// The chunk is written: from now on the host has the slots, and nobody else.
    pub fn release_device(&mut self) {
        (self.fresh, self.unpacked) = (None, None);
    }

    #[cfg(test)]
    pub(super) fn packed(&self) -> Tensor {
        self.packed.on_host()
    }

    /// Sequences that chose for themselves: 1 where one choice serves all.
    pub(super) fn num_sequences(&self) -> usize {
        self.packed.size()[0] as usize
    }

    /// Heads that chose for themselves: 1 where one choice serves all of a sequence.
    pub(super) fn num_heads(&self) -> usize {
        self.packed.size()[1] as usize
    }

    pub(super) fn width(&self) -> usize {
        self.packed.kind().elt_size_in_bytes()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.packed.bytes()
    }

    /// The slots on the host, those of each sequence and head together.
    pub(super) fn flat(&self) -> Vec<i64> {
        Vec::try_from(self.unpacked().reshape([-1])).unwrap_or_default()
    }

    /// The narrowest integers for slots below `capacity`: bytes, 16 bits (counted from −32768), or 32.
    pub fn kind(capacity: usize) -> Kind {
        match capacity {
            0..=0x100 => Kind::Uint8,
            0x101..=0x1_0000 => Kind::Int16,
            _ => Kind::Int,
        }
    }

    /// How many slots leave per sequence and head.
    pub fn count(&self) -> usize {
        self.packed.size()[2] as usize
    }

    /// The slots on the host, where all sequences and heads agree on them; of a choice that a device has just made the host knows nothing.
    pub fn shared(&self) -> Option<Vec<i64>> {
        let agreed = self.packed.size()[..2] == [1, 1] && self.fresh.is_none();
        agreed.then(|| self.flat())
    }

    /// The slots as one tensor `(B, G, e)`, i64.
    pub fn slots(&self, batch: i64, groups: i64, device: Device) -> Tensor {
        let unpacked = match (&self.unpacked, &self.fresh) {
            (Some(slots), _) => slots.shallow_clone(),
            (None, Some(fresh)) => unpack(fresh),
            (None, None) => unpack(&or_panic(self.packed.fetch(device))),
        };
        unpacked.to_device(device).expand([batch, groups, self.count() as i64], false)
    }

    /// The slots of one sequence and head, on the host.
    pub fn of_head(&self, sequence: usize, head: usize) -> Result<Vec<i64>, TchError> {
        let size = self.packed.size();
        let at = |index: usize, dim: usize| (index as i64).min(size[dim] - 1);
        let part = |all: &Tensor| all.get(at(sequence, 0)).get(at(head, 1)).contiguous();
        Vec::try_from(self.unpacked.as_ref().map_or_else(|| unpack(&part(&self.packed.on_host())), part))
    }

    fn unpacked(&self) -> Tensor {
        self.unpacked.as_ref().map_or_else(|| unpack(&self.packed.on_host()), Tensor::shallow_clone)
    }
}

fn pack(slots: &Tensor, kind: Kind) -> Tensor {
    (slots - offset(kind)).to_kind(kind).contiguous()
}

fn unpack(packed: &Tensor) -> Tensor {
    packed.to_kind(Kind::Int64) + offset(packed.kind())
}

impl Clone for Victims {
    /// The slots are never written to, so that both may lie in the same memory.
    fn clone(&self) -> Self {
        let shallow = |slots: &Option<Tensor>| slots.as_ref().map(Tensor::shallow_clone);
        Self { packed: self.packed.clone(), fresh: shallow(&self.fresh), unpacked: shallow(&self.unpacked) }
    }
}

/// What a packed zero stands for.
fn offset(kind: Kind) -> i64 {
    if kind == Kind::Int16 { 0x8000 } else { 0 }
}

pub(super) fn choose_victims(policy: &dyn Policy, entries: &Entries<'_>) -> Victims {
    let score = policy.score(entries);
    if let Some(victims) = on_host(policy, entries, &score) {
        return victims;
    }
    let mut key = keys(policy, entries, &score);
    if let Some(budget) = entries.budget {
        let empty_first = budget.empty_first(key.size()[0], entries.num_evicted, key.device());
        key = order_empty(&key, entries.position_bgc, &empty_first);
    }
    Victims::new(&key.topk(entries.num_evicted as i64, 2, false, true).1, entries.capacity)
}

/// The choice where only positions count and the host knows them all.
fn on_host(policy: &dyn Policy, entries: &Entries<'_>, score: &EvictionOrder) -> Option<Victims> {
    let (EvictionOrder::ByPosition { keep_first }, Agreement::All(positions)) = (score, entries.agreement) else { return None };
    if entries.initial_parts.windows(2).any(|pair| pair[0] != pair[1]) {
        return None;
    }
    let may_leave = entries.between_sinks_and_grace(policy);
    let initial_part = entries.initial_parts.first().map_or(0..0, |part| part.start as i64..part.end as i64);
    let rank = |position: i64| if position < *keep_first as i64 { LAST - position } else { position };
    let slots = (0..).zip(positions).filter(|(_, position)| may_leave.contains(position) && !initial_part.contains(position));
    let slots: Vec<i64> = lowest_first(slots.map(|(slot, position)| (rank(*position), slot)), entries.num_evicted);
    let slots = Tensor::from_slice(&slots).view([1, 1, -1]);
    Some(Victims { unpacked: Some(slots.shallow_clone()), ..Victims::of_host(&slots, entries.capacity) })
}

/// The slots of the `count` lowest of some ranks, lowest first.
fn lowest_first(ranked: impl Iterator<Item = (i64, i64)>, count: usize) -> Vec<i64> {
    // While a text is written, that is one for each token.
    if count == 1 {
        return ranked.min().into_iter().map(|(_, slot)| slot).collect();
    }
    let mut ranked: Vec<(i64, i64)> = ranked.collect();
    if count < ranked.len() {
        ranked.select_nth_unstable(count);
        ranked.truncate(count);
    }
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, slot)| slot).collect()
}

/// The order of the entries as integers, lowest first; what may not leave has the largest. `(B, G, filled)`, or `(B, 1, filled)` where one
/// choice serves all heads of a sequence.
pub(super) fn keys(policy: &dyn Policy, entries: &Entries<'_>, score: &EvictionOrder) -> Tensor {
    let heads = if matches!(entries.agreement, Agreement::Nothing) { entries.position_bgc.size()[1] } else { 1 };
    let (key, position) = match score {
        EvictionOrder::ByPosition { keep_first } => {
            let position = entries.position_bgc.narrow(1, 0, heads);
            let kept = position.ge(0).logical_and(&position.lt(*keep_first as i64));
            ((position.neg() + LAST).where_self(&kept, &position), position)
        }
        EvictionOrder::ByEntry(score_bgc) => {
            let position = entries.position_bgc.narrow(1, 0, heads.max(score_bgc.size()[1]));
            (ordered(score_bgc).bitwise_left_shift_tensor_scalar(32) + position.clamp_min(0), position)
        }
    };
    // An ended sequence may hold -1: its candidates are all retained, so that any slot serves.
    let may_leave = entries.may_leave(policy, &position).logical_or(&position.lt(0));
    key.masked_fill(&may_leave.logical_not(), i64::MAX)
}

impl Entries<'_> {
    /// Which entries may leave `(B, G, filled)`, bool: none that are young by the policy's `grace`, sinks or of an initial part that stays, and
    /// no empty slots.
    pub fn candidates(&self, policy: &dyn Policy) -> Tensor {
        self.may_leave(policy, self.position_bgc)
    }

    /// Which entries may leave, by their positions. A slot that holds nothing has −1.
    fn may_leave(&self, policy: &dyn Policy, position_bgc: &Tensor) -> Tensor {
        let Range { start, end } = self.between_sinks_and_grace(policy);
        let is_between = position_bgc.ge(start).logical_and(&position_bgc.lt(end));
        if self.initial_parts.iter().all(Range::is_empty) {
            return is_between;
        }
        let bounds = |of: fn(&Range<usize>) -> usize| {
            let all: Vec<i64> = self.initial_parts.iter().map(|part| of(part) as i64).collect();
            on_device(&all, position_bgc.device()).view([-1, 1, 1])
        };
        let is_outside =
            position_bgc.lt_tensor(&bounds(|part| part.start)).logical_or(&position_bgc.ge_tensor(&bounds(|part| part.end)));
        is_between.logical_and(&is_outside)
    }

    /// The positions that may leave unless an initial part holds them: behind the sinks, and older than the youngest tokens, which stay.
    fn between_sinks_and_grace(&self, policy: &dyn Policy) -> Range<i64> {
        let PolicyTraits { grace, sinks, .. } = policy.traits();
        sinks as i64..self.next_position as i64 - grace as i64
    }
}

const LAST: i64 = 1 << 40;

/// Maps f32 to i64 so that order is kept, and with 32 bits to spare below for the position: comparing keys compares scores
/// first and positions second, and all keys differ. Example: 1.0 has the bits 0x3f800000, 2.0 has 0x40000000; a negative
/// number has the sign bit set and grows downwards, so its other 31 bits are flipped.
fn ordered(score_bgc: &Tensor) -> Tensor {
    // Adding zero turns -0.0 into 0.0, which would otherwise rank below it. The sign of a NaN is an accident.
    let score = (score_bgc.to_kind(Kind::Float) + 0.0).nan_to_num(f64::INFINITY, f64::INFINITY, f64::NEG_INFINITY);
    let bits = score.contiguous().view_dtype(Kind::Int).to_kind(Kind::Int64);
    bits.bitwise_xor_tensor(&bits.bitwise_right_shift_tensor_scalar(63).bitwise_and(0x7fff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_scores_first_and_positions_second() {
        let scores = [f32::NEG_INFINITY, -2.0f32, -1.0, -0.0, 0.0, 1e-30, 0.5, 2.0, 1e30, -f32::NAN];
        let keys = Vec::<i64>::try_from(ordered(&Tensor::from_slice(&scores))).unwrap();
        assert!(keys.windows(2).all(|w| w[0] <= w[1]), "{keys:?}");
        assert_eq!(keys[3], keys[4]);
        let score = Tensor::from_slice(&[1.0f32, 0.5, 0.5, 3.0]).view([1, 1, 4]);
        let position = Tensor::from_slice(&[4i64, 9, 2, 0]).view([1, 1, 4]);
        let key = ordered(&score).bitwise_left_shift_tensor_scalar(32) + position;
        assert_eq!(Victims::new(&key.topk(3, 2, false, true).1, 4).shared().unwrap(), [2, 1, 0]);
    }

    /// The rule is [`EvictionOrder::ByEntry`]'s, and what may not leave comes last.
    #[test]
    fn the_lowest_leave_in_the_order_of_a_plain_sort() {
        #[derive(Debug)]
        struct Scored(Tensor);

        impl Policy for Scored {
            fn score(&self, _entries: &Entries<'_>) -> EvictionOrder {
                EvictionOrder::ByEntry(self.0.shallow_clone())
            }

            fn traits(&self) -> PolicyTraits<'_> {
                PolicyTraits { grace: 3, sinks: 2, ..PolicyTraits::default() }
            }
        }

        let scores = [0.5f32, -0.0, f32::NAN, 0.0, f32::INFINITY, 0.5, -1e-45, f32::NEG_INFINITY, 0.5, -f32::NAN, 0.0, 1e-45];
        let positions = [11i64, 5, 3, 4, 20, 8, 0, 9, 7, 2, 12, 1];
        let policy = Scored(Tensor::from_slice(&scores).view([1, 1, 12]));
        let position_bgc = Tensor::from_slice(&positions).view([1, 1, 12]);
        let keys = || Tensor::zeros([1, 1, 12, 4], (Kind::Float, Device::Cpu));
        let entries = Entries {
            capacity: 12,
            num_evicted: 8,
            prefill: 12,
            next_position: 21,
            position_bgc: &position_bgc,
            observed_bgc: None,
            features_bgcf: None,
            query_statistics: None,
            keys: &keys,
            agreement: &Agreement::Nothing,
            initial_parts: std::slice::from_ref(&(4..5)),
            budget: None,
        };
        let of_nan = |score: f32| if score.is_nan() { f32::INFINITY } else { score };
        let stays = |p: i64| !(2..18).contains(&p) || p == 4;
        let mut sorted: Vec<usize> = (0..12).filter(|&slot| !stays(positions[slot])).collect();
        // By value, so that -0 and 0 are the same.
        sorted.sort_by(|&a, &b| of_nan(scores[a]).partial_cmp(&of_nan(scores[b])).unwrap().then(positions[a].cmp(&positions[b])));
        let left = choose_victims(&policy, &entries).shared().unwrap();
        assert_eq!(left.iter().map(|&slot| slot as usize).collect::<Vec<_>>(), sorted);
    }

    /// Promises that its order does not keep by itself.
    #[derive(Debug)]
    struct Careless;

    impl Policy for Careless {
        fn score(&self, _entries: &Entries<'_>) -> EvictionOrder {
            EvictionOrder::ByPosition { keep_first: 0 }
        }

        fn traits(&self) -> PolicyTraits<'_> {
            PolicyTraits { grace: 1, sinks: 2, ..PolicyTraits::default() }
        }
    }

    #[test]
    fn an_order_by_position_spares_the_sinks_that_are_promised() {
        let positions = [5i64, 1, 4, 0, 3, 2];
        let position_bgc = Tensor::from_slice(&positions).view([1, 1, 6]);
        let keys = || Tensor::zeros([1, 1, 6, 4], (Kind::Float, Device::Cpu));
        let agreements = [Agreement::All(positions.to_vec()), Agreement::Heads, Agreement::Nothing];
        for (agreement, num_evicted) in agreements.iter().flat_map(|agreement| [1, 3].map(|count| (agreement, count))) {
            let entries = Entries {
                capacity: 6,
                num_evicted,
                prefill: 6,
                next_position: 6,
                position_bgc: &position_bgc,
                observed_bgc: None,
                features_bgcf: None,
                query_statistics: None,
                keys: &keys,
                agreement,
                initial_parts: &[],
                budget: None,
            };
            let left = choose_victims(&Careless, &entries).shared().unwrap();
            let left: Vec<i64> = left.iter().map(|&slot| positions[slot as usize]).collect();
            assert_eq!(left, [2, 3, 4][..num_evicted], "{agreement:?}");
        }
    }

    #[test]
    fn slots_are_packed_into_the_narrowest_integers() {
        for (capacity, kind) in [(256, Kind::Uint8), (257, Kind::Int16), (65_536, Kind::Int16), (65_537, Kind::Int)] {
            let slots = [0, capacity as i64 / 2, capacity as i64 - 1];
            let victims = Victims::of_host(&Tensor::from_slice(&slots).view([1, 1, 3]), capacity);
            assert_eq!((victims.packed().kind(), victims.shared().unwrap()), (kind, slots.to_vec()));
        }
    }
}
