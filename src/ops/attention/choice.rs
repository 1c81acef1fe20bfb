//! Which backend computes a chunk's attention.

#[cfg(test)]
use super::backend::forced;
use super::backend::{Backend, WHOLE};
use super::chunk::{KvBlock, Qkv};
use super::part::PartKernel;
use super::tried::backend_of;

/// How the chunk attends to itself and to its past.
pub(super) fn backend_for(chunk: &Qkv, past: &[KvBlock]) -> Backend {
    #[cfg(test)]
    if let Some(backend) = forced::backend() {
        return backend;
    }
    #[cfg(test)]
    if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::MergeMissing) {
        return Backend::Parts(PartKernel::Blocks);
    }
    let q = &chunk.q_bhnd;
    let is_whole = past.iter().map(KvBlock::slots).chain([chunk.num_tokens()]).all(|length| length % WHOLE == 0);
    let backend = backend_of(q.device(), q.kind(), q.size()[3], is_whole);
    // Of libtorch's kernels none caps scores, and none leaves out slots.
    let is_capped = chunk.rule.soft_cap.is_some();
    if backend.is_of_libtorch() && (is_capped || past.iter().any(KvBlock::is_masked) || chunk.own.is_masked()) {
        return Backend::Parts(PartKernel::Blocks);
    }
    backend
}
