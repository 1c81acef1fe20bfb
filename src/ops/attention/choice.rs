//! Which backend computes a chunk's attention.

#[cfg(test)]
use super::backend::forced;
use super::backend::{AttendShape, Backend, is_for_torch_kernels};
use super::calibrate::chosen;
use super::chunk::{KvBlock, Qkv};
use super::part::PartKernel;

/// How the chunk attends to itself and to its past.
pub(super) fn backend_for(chunk: &Qkv, past: &[KvBlock]) -> Backend {
    let (device, kind) = (chunk.q_bhnd.device(), chunk.q_bhnd.kind());
    #[cfg(test)]
    if let Some(backend) = forced::backend() {
        return backend;
    }
    #[cfg(test)]
    if crate::sabotage::is_active(crate::sabotage::Sabotage::MergeMissing) {
        return Backend::Parts(PartKernel::Blocks);
    }
    if !is_for_torch_kernels(device, kind) {
        return Backend::unmeasured(device, kind);
    }
    // Of these kernels none caps scores, and none leaves out slots.
    let is_capped = chunk.rule.soft_cap.is_some();
    if is_capped || past.iter().any(KvBlock::is_masked) || chunk.own.is_masked() {
        return Backend::Parts(PartKernel::Blocks);
    }
    let shape = AttendShape::of(chunk, past);
    chosen(&shape.rounded()).map_or_else(|| Backend::unmeasured(device, kind), |choice| choice.of(&shape))
}
