//! What a cache, its statistics and its undo log take, from shapes alone: for who plans a step before there is a tensor.

use tch::{Device, Kind, Tensor, no_grad};

use super::policy::{ChunkAttention, NewEntries, Observed, Policy};
use super::{BudgetRule, CacheShape, ChunkSpan, Queries};
use crate::recipe::{BufferKind, StoreForm};
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UndoBytes {
    pub waiting: Bytes,
    pub at_hand: Bytes,
}

impl CacheShape {
    /// The slots after all of `spans`, and the largest that was copied when they grew, which is there twice meanwhile. Where budgets differ by
    /// head, the most that one may get.
    pub fn growth(&self, spans: &[ChunkSpan], budgets: Option<BudgetRule>) -> (usize, Bytes) {
        let first = self.allocated.max(1);
        let slots = match budgets {
            // All entries of a head are in the better half: it has its floor, and twice what that leaves.
            Some(rule) if self.groups > 1 || rule.across_layers => 2 * first - rule.least(first),
            _ => first,
        };
        spans.iter().fold((slots, Bytes(0)), |(before, copied), span| {
            let slots = self.grown(before as i64, (span.start + span.len).min(self.cache_length) as i64) as usize;
            let is_copied = slots > before && !self.is_paged;
            (slots, if is_copied { self.slot_bytes(before) } else { copied })
        })
    }

    /// Keys, values and positions of so many slots.
    pub fn slot_bytes(&self, slots: usize) -> Bytes {
        let of_plane = |(_, width, kind): (String, i64, Kind)| width as u64 * kind.elt_size_in_bytes() as u64;
        let planes = self.planes().into_iter().map(of_plane).sum::<u64>();
        Bytes(self.heads() * slots as u64 * planes + self.position_bytes(slots).0)
    }

    /// Positions of so many slots, which stay where the cache computes.
    pub fn position_bytes(&self, slots: usize) -> Bytes {
        Bytes(8 * self.heads() * slots as u64)
    }

    /// Keys and values of so many slots as attention reads them, where they must be restored first.
    pub fn restored_bytes(&self, slots: usize) -> Bytes {
        let is_restored = self.buffer != BufferKind::Plain;
        let entry = 2 * self.head_dim as u64 * self.kind.elt_size_in_bytes() as u64;
        Bytes(if is_restored { self.heads() * slots as u64 * entry } else { 0 })
    }

    /// What is overwritten when `span` is written into a cache that holds `filled` entries.
    pub fn undo_bytes(&self, span: &ChunkSpan, filled: usize, form: StoreForm) -> UndoBytes {
        let evicted = span.evictions(filled, self.cache_length) as i64;
        if evicted == 0 {
            return UndoBytes::default();
        }
        let sequences = span.num_sequences() as i64;
        let entries = sequences * self.groups * evicted;
        let planes = self.planes().into_iter().map(|(_, width, kind)| ([entries, width], kind));
        let retained = (span.is_ragged() && span.retained(filled, self.cache_length).iter().any(|&r| r > 0))
            .then(|| (sequences * span.len as i64, sequences * self.groups * span.len as i64));
        let index = |count: i64| form.bytes_of(&[count], Kind::Int).0;
        let (mut waiting, mut at_hand) = (3 * index(entries), 3 * 8 * entries as u64);
        for (size, kind) in planes {
            waiting += form.bytes_of(&size, kind).0;
            at_hand += (size[0] * size[1]) as u64 * kind.elt_size_in_bytes() as u64;
        }
        if let Some((mask, saved)) = retained {
            waiting += form.bytes_of(&[mask], Kind::Bool).0 + index(saved);
            at_hand += (mask + 8 * saved) as u64;
        }
        UndoBytes { waiting: Bytes(waiting), at_hand: Bytes(at_hand) }
    }

    fn heads(&self) -> u64 {
        (self.batch * self.groups) as u64
    }
}

/// How many numbers in f32 a policy keeps beside each entry, from a piece of the prefill span or a later chunk on: it is shown an entry,
/// and asked.
pub fn stats_per_entry(policy: &dyn Policy, is_prefill: bool) -> usize {
    let entry = Tensor::ones([1, 1, 1, 2], (Kind::Float, Device::Cpu));
    no_grad(|| {
        let stored = || (entry.shallow_clone(), entry.shallow_clone());
        let features = policy.describe(&NewEntries {
            k_bgnd: &entry,
            v_bgnd: &entry,
            model_feature_bgn: policy.traits().model_feature.map(|_| entry.select(-1, 0)),
            stored: &stored,
        });
        let features_bgcf = (!features.is_empty()).then(|| Tensor::stack(&features, -1));
        let observed = policy.observe(&Observed {
            attention: &OneEntry(&entry),
            position_bgc: &Tensor::zeros([1, 1, 1], (Kind::Int64, Device::Cpu)),
            previous_bgc: None,
            features_bgcf: features_bgcf.as_ref(),
            num_queries: 1,
            next_position: 1,
            is_prefill,
        });
        features.len() + usize::from(observed.is_some())
    })
}

/// A token that attends to itself.
struct OneEntry<'a>(&'a Tensor);

impl ChunkAttention for OneEntry<'_> {
    fn mass(&self, _: Queries) -> Tensor {
        Tensor::ones([1, 1, 1], (Kind::Float, Device::Cpu))
    }

    fn weights(&self, _: usize) -> Tensor {
        Tensor::ones([1, 1, 1, 1], (Kind::Float, Device::Cpu))
    }

    fn queries(&self) -> (Tensor, f64) {
        (self.0.shallow_clone(), 1.0)
    }

    fn entries(&self) -> (Tensor, Tensor) {
        (self.0.shallow_clone(), self.0.shallow_clone())
    }
}
