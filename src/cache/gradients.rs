//! The gradient of a cache: one buffer pair in the layout of the current chunk, unwound together with the cache.

use tch::{Device, Kind, Tensor};

use super::Undo;
use super::buffer::slots_of;
use super::moves::move_back;
use crate::store::bytes_of;
use crate::units::Bytes;

/// dK and dV of one layer, `(B, G, C, D)`, in the accumulation kind.
#[derive(Debug)]
pub struct CacheGrads {
    dk_bgcd: Tensor,
    dv_bgcd: Tensor,
}

impl CacheGrads {
    /// Zeros for a cache of shape `(B, G, C, D)`.
    pub fn zeros(size: &[i64], kind: Kind, device: Device) -> Self {
        Self { dk_bgcd: Tensor::zeros(size, (kind, device)), dv_bgcd: Tensor::zeros(size, (kind, device)) }
    }

    pub fn bytes(&self) -> Bytes {
        bytes_of([&self.dk_bgcd, &self.dv_bgcd])
    }

    /// Adds one chunk's attention gradients.
    ///
    /// # Shapes
    /// `own`: of the region `(B, G, n, D)`; `past`: of the slots below it, part by part `(B, G, ·, D)`. B may be smaller than the cache's:
    /// those that come first.
    pub fn add(&mut self, own: (&Tensor, &Tensor), past: &[(Tensor, Tensor)]) {
        let mut start = 0;
        for (dk, dv) in past.iter().map(|(dk, dv)| (dk, dv)).chain([own]) {
            let (sequences, len) = (dk.size()[0], dk.size()[2]);
            let here = |total: &Tensor| slots_of(total, sequences, (start, len));
            let _ = here(&self.dk_bgcd).g_add_(dk);
            let _ = here(&self.dv_bgcd).g_add_(dv);
            start += len;
        }
    }

    /// Takes the chunk's own gradients out and moves the rest to where the entries stood before the chunk was written: an
    /// evicted entry has no later gradient, a retained one takes its column's along.
    ///
    /// # Shapes
    /// Two `(B, G, n, D)`, by columns of the region.
    pub fn unwind(&mut self, undo: &Undo) -> (Tensor, Tensor) {
        (unwind_one(&self.dk_bgcd, undo), unwind_one(&self.dv_bgcd, undo))
    }
}

fn unwind_one(total: &Tensor, undo: &Undo) -> Tensor {
    let mut region = slots_of(total, undo.at.batch, (undo.at.region(), undo.at.len));
    let own = region.copy();
    #[cfg(test)]
    let not_zeroed = undo.moves.as_ref().map(|moves| super::moves::take(total, &moves.to));
    let _ = region.zero_();
    let Some(moves) = &undo.moves else { return own };
    let evicted = moves.retained.as_ref().map(|retained| {
        let kept = own.where_self(&retained.mask_b1n.unsqueeze(-1), &own.zeros_like()).reshape([-1, own.size()[3]]);
        Tensor::zeros([moves.to.size()[0], own.size()[3]], (own.kind(), own.device())).index_add_(0, &retained.saved, &kept)
    });
    #[cfg(test)]
    let evicted = evicted.or(not_zeroed.filter(|_| crate::sabotage::is_active(crate::sabotage::Sabotage::GradientNotZeroed)));
    move_back(total, moves, evicted.as_ref());
    own
}
