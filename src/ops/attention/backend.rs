//! How a chunk's attention is computed: which kernel, and past and chunk at once or in parts.

use std::fmt;

use tch::{Device, Kind, Tensor};

use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv, Queries};
use super::merged;
use crate::native::cuda::{Gpu, TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
use crate::native::{self, or_panic};

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
    /// Tensor operations on blocks of queries, past and chunk apart, anywhere: the only one beside the CPU's that leaves out slots and caps scores.
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

    /// What may attend where the chunk and each part of its past are multiples of [`WHOLE`]: cuDNN, in parts, on GPUs that it is faster on.
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

/// A backend, or blocks in its place where it can't serve.
fn serving(backend: Backend, chunk: &Qkv, past: &[KvBlock]) -> Backend {
    if backend.is_of_libtorch() && !chunk.is_plain(past) { Backend::Blocks } else { backend }
}

/// Computes [`attend_and_sum`](super::attend_and_sum) with the kernels of `backend`.
pub(super) fn attend_by(backend: Backend, chunk: &Qkv, past: &[KvBlock], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    match (serving(backend, chunk, past), &chunk.joined) {
        (Backend::Own, _) => {
            let first = asked.map(|queries| queries.first(chunk.num_tokens()));
            let (out_bhnd, lse_bhn, sums) = native::attend(&chunk.q_bhnd, &all_parts(chunk, past), chunk.rule, first);
            (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
        }
        (Backend::Joined(vendor), Some(keys)) => (attend_joined(vendor, chunk, keys), None),
        (Backend::Joined(vendor) | Backend::Parts(vendor), _) => (merged::attend(Some(vendor), chunk, past), None),
        (Backend::Blocks, _) => (merged::attend(None, chunk, past), None),
    }
}

/// Computes [`attend_backward`](super::attend_backward) with the kernels of `backend`.
pub(super) fn attend_backward_by(
    backend: Backend,
    dout: &Tensor,
    chunk: &Qkv,
    past: &[KvBlock],
    attended: &Attended,
) -> AttentionGrads {
    match (serving(backend, chunk, past), &chunk.joined) {
        (Backend::Own, _) => {
            let (Attended { out_bhnd, lse_bhn }, parts) = (attended, all_parts(chunk, past));
            let (dq_bhnd, mut past) = native::attend_backward(dout, &chunk.q_bhnd, &parts, out_bhnd, lse_bhn, chunk.rule);
            let own = past.pop().unwrap_or_else(|| KvBlock::of_planes([]));
            AttentionGrads { dq_bhnd, own, past }
        }
        (Backend::Joined(vendor), Some(keys)) => joined_backward(vendor, dout, chunk, keys, attended),
        (Backend::Joined(vendor) | Backend::Parts(vendor), _) => {
            merged::attend_backward(Some(vendor), dout, chunk, past, attended)
        }
        (Backend::Blocks, _) => merged::attend_backward(None, dout, chunk, past, attended),
    }
}

/// Keys and values part by part, the chunk's own last.
pub(super) fn all_parts<'a>(chunk: &'a Qkv, past: &'a [KvBlock]) -> Vec<&'a KvBlock> {
    past.iter().chain([&chunk.own]).collect()
}

/// Past and chunk at once, where their keys lie side by side, `(B, G, P + n, D)`: the chunk's queries are those of the last keys, so a causal
/// mask that ends at the last key of the last query is all that they need, and nothing is merged.
fn attend_joined(vendor: TorchKernel, chunk: &Qkv, joined: &KvBlock) -> Attended {
    let mask = TorchKernelMask::CausalFromEnd;
    let attended = vendor_attend(vendor, &chunk.q_bhnd, &joined.k, &joined.v, mask, chunk.rule.scale);
    let (out_bhnd, lse_bhn) = or_panic(attended);
    Attended { out_bhnd, lse_bhn }
}

/// The backward of [`attend_joined`], of `dout_bhnd (B, H, n, D)`; what belongs to the past comes as one part.
fn joined_backward(
    vendor: TorchKernel,
    dout_bhnd: &Tensor,
    chunk: &Qkv,
    KvBlock { k, v, .. }: &KvBlock,
    attended: &Attended,
) -> AttentionGrads {
    let (of_forward, mask) = ([&attended.out_bhnd, &attended.lse_bhn], TorchKernelMask::CausalFromEnd);
    let grads = vendor_attend_backward(vendor, dout_bhnd, [&chunk.q_bhnd, k, v], of_forward, mask, chunk.rule.scale);
    let (dq_bhnd, dk, dv) = or_panic(grads);
    let (both, own) = (KvBlock::of_planes([dk, dv]), chunk.num_tokens());
    let past = both.slots() - own;
    let of_past = (past > 0).then(|| both.narrow(0, past));
    AttentionGrads { dq_bhnd, own: both.narrow(past, own), past: of_past.into_iter().collect() }
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
