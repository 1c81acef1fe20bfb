//! Which backend computes a chunk's attention.

use std::collections::BTreeSet;
use std::sync::Mutex;

#[cfg(test)]
use super::backend::forced;
use super::backend::{Backend, WHOLE};
use super::by_backend::all_parts;
use super::chunk::{KvBlock, Qkv};
use super::tried::backend_of;
use crate::native::locked;

/// The kernel for whole chunks attends to so many pairs of lengths at most: libtorch keeps a plan for each as long as the process lives, and
/// the past of a cache that grows is longer with every chunk.
const MAX_PLANS: usize = 64;

/// Lengths of a chunk and of what it attends to, for which there are plans.
static PLANNED: Mutex<BTreeSet<(i64, i64)>> = Mutex::new(BTreeSet::new());

/// Whether a chunk and the parts that it attends to are multiples of [`WHOLE`], and have plans or may have them: from then on they do.
fn are_planned(planned: &mut BTreeSet<(i64, i64)>, tokens: i64, parts: impl Iterator<Item = i64>) -> bool {
    let pairs: BTreeSet<(i64, i64)> = parts.map(|slots| (tokens, slots)).collect();
    let is_whole = tokens % WHOLE == 0 && pairs.iter().all(|(_, slots)| slots % WHOLE == 0);
    let serves = is_whole && planned.union(&pairs).count() <= MAX_PLANS;
    if serves {
        planned.extend(pairs);
    }
    serves
}

/// How the chunk attends to itself and to its past.
pub(super) fn backend_for(chunk: &Qkv, past: &[KvBlock]) -> Backend {
    #[cfg(test)]
    if let Some(backend) = forced::backend() {
        return backend;
    }
    #[cfg(test)]
    if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::MergeMissing) {
        return Backend::Blocks;
    }
    let q = &chunk.q_bhnd;
    // No kernel of libtorch caps scores or leaves out slots.
    let is_plain = chunk.rule.soft_cap.is_none() && !past.iter().chain([&chunk.own]).any(KvBlock::is_masked);
    let is_whole = || {
        let planned = &mut locked(&PLANNED);
        is_plain && are_planned(planned, chunk.num_tokens(), all_parts(chunk, past).into_iter().map(KvBlock::slots))
    };
    let backend = backend_of(q.device(), q.kind(), q.size()[3], is_whole);
    if backend.is_of_libtorch() && !is_plain { Backend::Blocks } else { backend }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_have_plans_keep_them_and_new_ones_get_none_when_there_are_many() {
        let mut planned = BTreeSet::new();
        let mut asked = |tokens, past: i64| are_planned(&mut planned, tokens, [past, tokens].into_iter());
        assert!(!asked(4096, 100) && !asked(100, 4096), "no multiples");
        // Its own length and 63 pasts.
        assert!((1..=63).all(|chunk| asked(4096, 8192 + 4096 * chunk)));
        assert!(!asked(4096, 1 << 20) && !asked(2048, 12_288), "no room");
        assert!(asked(4096, 12_288), "as before");
    }
}
