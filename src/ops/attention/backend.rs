//! How a chunk's attention is computed: which kernel, and past and chunk at once or in parts.

use std::fmt;

use tch::{Device, Kind};

use crate::native;
use crate::native::cuda::{Gpu, TorchKernel};

/// Tokens of which whole chunks and their pasts are multiples. cuDNN makes a plan for every new pair of lengths, so the last chunks of samples, and
/// tokens that are generated, are left to other kernels.
pub(super) const WHOLE: i64 = 64;

/// A backend of attention; forward and backward use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// kvtune's own kernel for the CPU.
    Own,
    /// Keys of past and chunk at once, where they lie side by side; else in parts.
    Joined(TorchKernel),
    /// Past and chunk apart, merged.
    Parts(TorchKernel),
    /// Tensor operations on blocks of queries, past and chunk apart: for any device and kind, and the only one beside the CPU's that leaves out
    /// slots and caps scores.
    Blocks,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("kvtune's CPU kernel"),
            Self::Joined(vendor) => f.write_str(vendor.name()),
            Self::Parts(vendor) => write!(f, "{} in parts", vendor.name()),
            Self::Blocks => f.write_str("blockwise"),
        }
    }
}

impl Backend {
    /// What attends on a device with heads of so many channels, where nothing is capped or left out.
    pub fn preferred(device: Device, kind: Kind, head_dim: i64) -> Self {
        // Kernels of CUDA read 16 bytes at a time.
        let is_aligned = device.is_cuda() && head_dim % 8 == 0;
        match kind {
            _ if native::computes(device, kind) => Self::Own,
            Kind::BFloat16 | Kind::Half if is_aligned && head_dim <= 256 => Self::Joined(TorchKernel::Flash),
            Kind::BFloat16 | Kind::Half | Kind::Float if is_aligned => Self::Parts(TorchKernel::Efficient),
            _ => Self::Blocks,
        }
    }

    /// What may attend where the chunk and each part of its past are multiples of [`WHOLE`]: cuDNN, in parts, on the GPUs on which it was
    /// measured to be faster.
    pub(super) fn of_whole_chunks(device: Device, kind: Kind, head_dim: i64) -> Option<Self> {
        let Device::Cuda(index) = device else { return None };
        let has_half = matches!(kind, Kind::BFloat16 | Kind::Half) && head_dim % 8 == 0 && head_dim <= 128;
        let serves = has_half && Gpu::at(index).is_ok_and(|gpu| gpu.capability.0 == 9);
        serves.then_some(Self::Parts(TorchKernel::Cudnn))
    }

    /// Whether it is a kernel that comes with libtorch.
    pub(super) fn is_of_libtorch(self) -> bool {
        matches!(self, Self::Joined(_) | Self::Parts(_))
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
