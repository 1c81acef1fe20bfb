//! Where the tokens of a column stand, made ready once for all layers.

use tch::Tensor;

use super::causal_lm::Model;
use crate::ops::rope::Rotation;

/// Positions, and the rotations of queries and keys there.
#[derive(Debug)]
pub struct Positions {
    pub(super) position_bn: Tensor,
    pub(super) rotation: Rotation,
}

impl Positions {
    /// Others of the same number, which are nowhere yet.
    pub(super) fn empty_like(&self) -> Self {
        Self { position_bn: self.position_bn.empty_like(), rotation: self.rotation.empty_like() }
    }

    /// Takes over others, in the memory that it has.
    pub(super) fn copy_(&mut self, from: &Self) {
        self.position_bn.copy_(&from.position_bn);
        self.rotation.copy_(&from.rotation);
    }
}

impl Model {
    /// Tokens at their true positions.
    ///
    /// # Shapes
    /// `(B, n)`, or `(1, n)` or `(n)` where all sequences share their positions; int64.
    pub fn positions(&self, position_bn: Tensor) -> Positions {
        let rotation = Rotation::at(&position_bn, self.config().head_dim, self.config().rope_theta, self.kind());
        Positions { position_bn, rotation }
    }
}
