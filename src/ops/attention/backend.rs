//! How a chunk's attention is computed: which kernel, and past and chunk at once or in parts.

use std::fmt;

use tch::{Device, Kind};

use super::chunk::{KvBlock, Qkv};
use super::part::PartKernel;
use crate::native;
use crate::native::cuda::TorchKernel;

/// A backend of attention; forward and backward use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// kvtune's own kernel for the CPU.
    Own,
    /// Keys of past and chunk at once, where they lie side by side; else in parts.
    Joined(TorchKernel),
    /// Past and chunk apart, merged.
    Parts(PartKernel),
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("kvtune's CPU kernel"),
            Self::Joined(vendor) => f.write_str(vendor.name()),
            Self::Parts(PartKernel::TorchKernel(vendor)) => write!(f, "{} in parts", vendor.name()),
            Self::Parts(PartKernel::Blocks) => f.write_str("blockwise"),
        }
    }
}

/// What decides which backend is the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Of queries, keys and values.
    pub kind: Kind,
    pub batch: i64,
    pub heads: i64,
    pub groups: i64,
    pub head_dim: i64,
    pub tokens: i64,
    pub past: i64,
}

impl AttendShape {
    pub(super) fn of(chunk: &Qkv, past: &[KvBlock]) -> Self {
        let (batch, heads, tokens, head_dim) = chunk.q_bhnd.size4().unwrap_or_default();
        let past = past.iter().map(KvBlock::slots).sum();
        Self { kind: chunk.q_bhnd.kind(), batch, heads, groups: chunk.num_kv_heads(), head_dim, tokens, past }
    }

    /// Shapes that agree in these use the same backend, whatever a process has seen before: numbers rounded up to powers of two.
    pub(super) fn rounded(self) -> Self {
        let up = |count: i64| if count > 0 { count.unsigned_abs().next_power_of_two() as i64 } else { 0 };
        Self { batch: up(self.batch), tokens: up(self.tokens), past: up(self.past), ..self }
    }
}

impl fmt::Display for AttendShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, batch, heads, groups, head_dim, tokens, past } = self;
        write!(f, "{batch} × {heads}/{groups} heads of {head_dim}, {tokens} tokens on {past} slots, {kind:?}")
    }
}

/// Whether a kernel that comes with libtorch may serve at all: the rest computes in blocks.
pub(super) fn is_for_torch_kernels(device: Device, kind: Kind) -> bool {
    device.is_cuda() && matches!(kind, Kind::BFloat16 | Kind::Half | Kind::Float)
}

impl Backend {
    /// Where no shape has been measured.
    pub(super) fn unmeasured(device: Device, kind: Kind) -> Self {
        match kind {
            _ if native::computes(device, kind) => Self::Own,
            _ if !is_for_torch_kernels(device, kind) => Self::Parts(PartKernel::Blocks),
            Kind::BFloat16 | Kind::Half => Self::Joined(TorchKernel::Flash),
            _ => Self::Parts(PartKernel::TorchKernel(TorchKernel::Efficient)),
        }
    }
}

/// What was found to be the fastest for a rounded shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackendChoice {
    pub(super) backend: Backend,
    /// Without cuDNN, which serves whole blocks only: it is known to fail at other lengths, and compiles a plan for each of them.
    pub(super) elsewhere: Backend,
}

/// Tokens and slots of a block of cuDNN's.
const BLOCK: i64 = 128;

impl BackendChoice {
    pub(super) fn of(self, shape: &AttendShape) -> Backend {
        let is_whole = shape.tokens % BLOCK == 0 && shape.past % BLOCK == 0;
        if self.backend == Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cudnn)) && !is_whole {
            self.elsewhere
        } else {
            self.backend
        }
    }
}

#[cfg(test)]
pub(crate) mod forced {
    //! A backend that tests go where the device would go another.
    use std::cell::Cell;

    use super::Backend;

    thread_local! { static WAY: Cell<Option<Backend>> = const { Cell::new(None) }; }

    pub(in crate::ops::attention) fn backend() -> Option<Backend> {
        WAY.get()
    }

    /// Runs `body`, on this thread, with all attention going `backend`.
    pub(crate) fn with<T>(backend: Backend, body: impl FnOnce() -> T) -> T {
        let before = WAY.replace(Some(backend));
        let result = body();
        WAY.set(before);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttendShape =
        AttendShape { kind: Kind::BFloat16, batch: 1, heads: 8, groups: 2, head_dim: 64, tokens: 2048, past: 14_336 };

    #[test]
    fn shapes_are_rounded_up_and_cudnn_gets_whole_blocks_alone() {
        let rounded = AttendShape { past: 16_384, ..SHAPE };
        assert_eq!(SHAPE.rounded(), rounded);
        assert_eq!(AttendShape { tokens: 1025, past: 8193, ..SHAPE }.rounded(), rounded);
        assert_eq!(AttendShape { past: 0, batch: 3, ..SHAPE }.rounded(), AttendShape { past: 0, batch: 4, ..SHAPE });
        let elsewhere = Backend::Joined(TorchKernel::Flash);
        let choice = BackendChoice { backend: Backend::Parts(PartKernel::TorchKernel(TorchKernel::Cudnn)), elsewhere };
        assert_eq!(choice.of(&SHAPE), choice.backend);
        for other in [AttendShape { tokens: 1, ..SHAPE }, AttendShape { past: 14_337, ..SHAPE }] {
            assert_eq!(choice.of(&other), elsewhere);
            assert_eq!(BackendChoice { backend: elsewhere, elsewhere }.of(&other), elsewhere);
        }
    }
}
