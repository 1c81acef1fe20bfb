//! Which checkpoints go when a new one is safely on disk.

use super::SaveKind;

/// A checkpoint of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedCheckpoint {
    pub step: u64,
    pub kind: SaveKind,
}

/// The intermediate saves beyond the last `keep`. Regular ones, best and final stay; so does the newest of all.
pub fn superseded(saved: &[SavedCheckpoint], keep: usize) -> Vec<SavedCheckpoint> {
    let newest = saved.iter().map(|s| s.step).max();
    let mut intermediate: Vec<SavedCheckpoint> = saved.iter().filter(|s| s.kind == SaveKind::Intermediate).copied().collect();
    intermediate.sort_by_key(|s| std::cmp::Reverse(s.step));
    intermediate.into_iter().skip(keep).filter(|s| Some(s.step) != newest).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_newest_and_every_regular_one_stay(
            steps in prop::collection::btree_map(1u64..40, any::<bool>(), 0..12), keep in 0usize..4,
        ) {
            let kind = |regular| if regular { SaveKind::Regular } else { SaveKind::Intermediate };
            let saved: Vec<SavedCheckpoint> = steps.iter().map(|(&step, &regular)| SavedCheckpoint { step, kind: kind(regular) }).collect();
            let gone = superseded(&saved, keep);
            prop_assert!(gone.iter().all(|s| s.kind == SaveKind::Intermediate));
            prop_assert!(gone.iter().all(|s| Some(s.step) != steps.keys().max().copied()));
            let left = saved.iter().filter(|s| s.kind == SaveKind::Intermediate && !gone.contains(s)).count();
            prop_assert!(left <= keep.max(1));
            let oldest_left = saved.iter().filter(|s| s.kind == SaveKind::Intermediate && !gone.contains(s)).map(|s| s.step).min();
            prop_assert!(gone.iter().all(|s| oldest_left.is_none_or(|oldest| s.step < oldest)));
        }
    }
}
