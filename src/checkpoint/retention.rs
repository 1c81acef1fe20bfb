//! Which checkpoints go when a new one is safely on disk.

use std::cmp::Reverse;
use std::path::PathBuf;

use super::SaveKind;

/// A checkpoint of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedCheckpoint {
    pub(super) dir: PathBuf,
    pub(super) step: u64,
    pub(super) kind: SaveKind,
}

/// The intermediate saves beyond the last `keep`. Regular ones, best and final stay; so does the newest of all.
pub(super) fn superseded(mut saved: Vec<SavedCheckpoint>, keep: usize) -> impl Iterator<Item = SavedCheckpoint> {
    let newest = saved.iter().map(|s| s.step).max();
    saved.retain(|s| s.kind == SaveKind::Intermediate);
    saved.sort_by_key(|s| Reverse(s.step));
    saved.into_iter().skip(keep).filter(move |s| Some(s.step) != newest)
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
            let one = |(&step, &regular): (&u64, &bool)| SavedCheckpoint { dir: PathBuf::new(), step, kind: kind(regular) };
            let saved: Vec<SavedCheckpoint> = steps.iter().map(one).collect();
            let gone: Vec<_> = superseded(saved.clone(), keep).collect();
            prop_assert!(gone.iter().all(|s| s.kind == SaveKind::Intermediate));
            prop_assert!(gone.iter().all(|s| Some(s.step) != steps.keys().max().copied()));
            let left = saved.iter().filter(|s| s.kind == SaveKind::Intermediate && !gone.contains(s)).count();
            prop_assert!(left <= keep.max(1));
            let oldest_left = saved.iter().filter(|s| s.kind == SaveKind::Intermediate && !gone.contains(s)).map(|s| s.step).min();
            prop_assert!(gone.iter().all(|s| oldest_left.is_none_or(|oldest| s.step < oldest)));
        }
    }
}
