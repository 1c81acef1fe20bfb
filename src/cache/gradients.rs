//! The gradient of a cache: one buffer pair in the layout of the current chunk, unwound together with the cache.

use tch::{Kind, Tensor};

use super::buffer::slots_of;
use super::moves::move_back;
use super::{LayerCache, Undo};
use crate::ops::attention::KvBlock;
use crate::store::bytes_of;
use crate::units::Bytes;

/// The gradient of one layer's entries, plane by plane `(B, G, C, ·)`, in the accumulation kind.
#[derive(Debug)]
pub struct CacheGrads(KvBlock);

impl LayerCache {
    /// The gradient of a cache of this size, in which nothing has been added up.
    pub fn zero_gradients(&self, kind: Kind) -> CacheGrads {
        let widths = [self.shape.head_dim; 2].into_iter().chain(self.shape.further_widths());
        CacheGrads(KvBlock::of_planes(widths.map(|width| self.zeros(width, kind))))
    }

    /// Sums of so many numbers for each entry, in which nothing has been added up: `(B, G, C, width)`.
    pub fn zeros(&self, width: i64, kind: Kind) -> Tensor {
        Tensor::zeros([self.shape.batch, self.shape.groups, self.buffer.slots(), width], (kind, self.shape.device))
    }
}

impl CacheGrads {
    pub fn bytes(&self) -> Bytes {
        bytes_of(self.0.planes())
    }

    /// Adds one chunk's gradients; planes behind the last that a block has get none.
    ///
    /// # Shapes
    /// `own`: of the region `(B, G, n, ·)`; `past`: of the slots below it, block by block `(B, G, ·, ·)`. B may be smaller than the
    /// cache's: those that come first.
    pub fn add(&mut self, own: &KvBlock, past: &[KvBlock]) {
        let mut start = 0;
        for block in past.iter().chain([own]) {
            let (sequences, len) = (block.k.size()[0], block.slots());
            for (total, part) in self.0.planes().zip(block.planes()) {
                let _ = slots_of(total, sequences, start, len).g_add_(part);
            }
            start += len;
        }
    }

    /// Takes the chunk's own gradients out, as [`Undo::unwind_sums`] does, plane by plane.
    pub fn unwind(&mut self, undo: &Undo) -> KvBlock {
        self.0.map(|total| undo.unwind_sums(total))
    }
}

impl Undo {
    /// Takes the sums of the chunk's own entries, which are complete, out of sums that travel with the entries of a layer as their gradient
    /// does, and moves the rest in place to where the entries stood before the chunk was written. The sum of an evicted entry begins at zero; a
    /// retained one takes its slot's along.
    ///
    /// # Shapes
    /// `(B, G, C, ·)` in; `(B, G, n, ·)` out, by slot of the region.
    pub fn unwind_sums(&self, sums: &Tensor) -> Tensor {
        let mut region = slots_of(sums, self.at.batch, self.at.region(), self.at.len);
        let own = region.copy();
        #[cfg(test)]
        let not_zeroed = self.overwritten.as_ref().map(|(moves, ..)| super::moves::take(sums, &moves.to));
        let _ = region.zero_();
        let Some((moves, ..)) = &self.overwritten else { return own };
        let evicted = moves.retained.as_ref().map(|retained| {
            let kept = own.where_self(&retained.mask_b1n.unsqueeze(-1), &own.zeros_like()).reshape([-1, own.size()[3]]);
            Tensor::zeros([moves.to.size()[0], own.size()[3]], (own.kind(), own.device())).index_add_(0, &retained.saved, &kept)
        });
        #[cfg(test)]
        let evicted = evicted
            .or(not_zeroed.filter(|_| crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::GradientNotZeroed)));
        move_back(sums, moves, evicted.as_ref());
        own
    }
}
