//! Where tokens stand, which is what dropout depends on.

use tch::Tensor;

/// What tells tokens apart, for randomness that is the same for every chunking, batching and recomputation.
#[derive(Clone, Copy, Debug, Default)]
pub struct DropoutContext<'a> {
    /// What masks depend on; `None` switches dropout off.
    pub dropout: Option<DropoutKey>,
    /// For each sequence of the batch the number of its sample; not looked at without dropout.
    pub samples: &'a [u64],
}

/// What a dropout mask depends on beside sample, layer, linear and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    pub seed: u64,
    pub step: u64,
}

/// The tokens that run through a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenContext<'a> {
    pub(super) position_bn: &'a Tensor,
    pub(super) dropout: &'a DropoutContext<'a>,
}
