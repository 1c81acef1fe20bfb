//! Which checkpoints go when a new one is safely on disk.

use std::cmp::Reverse;
use std::path::PathBuf;

use super::{SaveKind, TrainState};

/// The intermediate saves beyond the last `keep`. Regular ones, best and final stay; so does the newest of all.
pub(super) fn superseded(mut saved: Vec<(PathBuf, TrainState)>, keep: usize) -> impl Iterator<Item = (PathBuf, TrainState)> {
    let newest = saved.iter().map(|(_, state)| state.step).max();
    saved.retain(|(_, state)| state.kind == SaveKind::Intermediate);
    saved.sort_by_key(|(_, state)| Reverse(state.step));
    saved.into_iter().skip(keep).filter(move |(_, state)| Some(state.step) != newest)
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
            let one = |(&step, &regular): (&u64, &bool)| {
                (PathBuf::new(), TrainState { step, kind: kind(regular), ..TrainState::default() })
            };
            let saved: Vec<(PathBuf, TrainState)> = steps.iter().map(one).collect();
            let gone: Vec<_> = superseded(saved.clone(), keep).collect();
            prop_assert!(gone.iter().all(|s| s.1.kind == SaveKind::Intermediate));
            prop_assert!(gone.iter().all(|s| Some(s.1.step) != steps.keys().max().copied()));
            let left = saved.iter().filter(|s| s.1.kind == SaveKind::Intermediate && !gone.contains(s)).count();
            prop_assert!(left <= keep.max(1));
            let oldest_left = saved.iter().filter(|s| s.1.kind == SaveKind::Intermediate && !gone.contains(s)).map(|s| s.1.step).min();
            prop_assert!(gone.iter().all(|s| oldest_left.is_none_or(|oldest| s.1.step < oldest)));
        }
    }
}
