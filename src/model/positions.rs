//! Where the tokens of a column stand, made ready once for all layers, and what dropout depends on.

use tch::Tensor;

use crate::ops::rope::Rotation;
use crate::units::StepKey;

/// Positions, and the rotations of queries and keys there.
#[derive(Debug)]
pub struct Positions {
    pub(super) position_bn: Tensor,
    pub(super) rotations: Vec<Rotation>,
}

impl Positions {
    /// Others of the same number, which are nowhere yet.
    pub(super) fn empty_like(&self) -> Self {
        Self { position_bn: self.position_bn.empty_like(), rotations: self.rotations.iter().map(Rotation::empty_like).collect() }
    }

    /// Takes over others, in the memory that it has.
    pub(super) fn copy_(&mut self, from: &Self) {
        self.position_bn.copy_(&from.position_bn);
        self.rotations.iter_mut().zip(&from.rotations).for_each(|(own, from)| own.copy_(from));
    }
}

/// What tells tokens apart, for randomness that is the same for every chunking, batching and recomputation.
#[derive(Clone, Copy, Debug, Default)]
pub struct DropoutContext<'a> {
    /// What masks depend on beside sample, layer, linear and position; `None` switches dropout off.
    pub dropout: Option<StepKey>,
    /// For each sequence of the batch the number of its sample; not looked at without dropout.
    pub samples: &'a [u64],
}

/// The tokens that run through a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenContext<'a> {
    pub(super) position_bn: &'a Tensor,
    pub(super) dropout: &'a DropoutContext<'a>,
}
