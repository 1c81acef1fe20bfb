//! How a chunk's attention is computed: which kernel, and past and chunk at once or in parts.

use std::fmt;

use tch::{Device, Kind};

use super::part::PartKernel;
use crate::native;
use crate::native::cuda::{Driver, Numerics, TorchKernel};

/// Tokens of which whole chunks and their pasts are multiples.
pub(super) const WHOLE: i64 = 64;

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

impl Backend {
    /// What attends on a device with heads of so many channels, where nothing is capped or left out.
    pub fn preferred(device: Device, kind: Kind, head_dim: i64) -> Self {
        // Kernels of CUDA read 16 bytes at a time.
        let is_aligned = device.is_cuda() && head_dim % 8 == 0;
        match kind {
            _ if native::computes(device, kind) => Self::Own,
            Kind::BFloat16 | Kind::Half if is_aligned && head_dim <= 256 => Self::Joined(TorchKernel::Flash),
            Kind::BFloat16 | Kind::Half | Kind::Float if is_aligned => {
                Self::Parts(PartKernel::TorchKernel(TorchKernel::Efficient))
            }
            _ => Self::Parts(PartKernel::Blocks),
        }
    }

    /// What attends where the chunk and each part of its past are [whole](Self::is_whole): cuDNN, in parts, on the GPUs for which it has kernels of
    /// its own. Its backward sums in no fixed order, so deterministic runs do without.
    pub(super) fn of_whole_chunks(device: Device, kind: Kind, head_dim: i64) -> Option<Self> {
        let Device::Cuda(index) = device else { return None };
        let has_half = matches!(kind, Kind::BFloat16 | Kind::Half) && head_dim % 8 == 0 && head_dim <= 128;
        let has_kernels =
            || Driver::ask().is_ok_and(|driver| driver.gpus.get(index).is_some_and(|gpu| matches!(gpu.capability.0, 9 | 10)));
        let serves = has_half && !Numerics::now().0.is_deterministic && has_kernels();
        serves.then_some(Self::Parts(PartKernel::TorchKernel(TorchKernel::Cudnn)))
    }

    /// Whether a length is one of few: cuDNN makes a plan for each pair of lengths, which takes as long as hundreds of chunks.
    pub(super) fn is_whole(length: i64) -> bool {
        length % WHOLE == 0
    }

    /// Whether it is a kernel that comes with libtorch.
    pub(super) fn is_of_libtorch(self) -> bool {
        matches!(self, Self::Joined(_) | Self::Parts(PartKernel::TorchKernel(_)))
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
