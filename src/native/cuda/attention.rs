//! The attention kernels that come with libtorch: one part of keys at a time, with its log-sum-exp.

use std::ffi::c_int;

use tch::Tensor;

use crate::native::BackwardError;
use crate::native::autograd::{Raw, pointer, tensors};

unsafe extern "C" {
    fn kvtune_vendor_attend(kernel: c_int, q: Raw, k: Raw, v: Raw, mask: c_int, scale: f64, results: *mut Raw) -> c_int;
    fn kvtune_vendor_attend_backward(kernel: c_int, inputs: &[Raw; 6], mask: c_int, scale: f64, results: *mut Raw) -> c_int;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TorchKernel {
    /// `FlashAttention` 2: half precision, heads of up to 256; with deterministic algorithms its backward is so.
    Flash = 0,
    /// The memory-efficient one: single precision too, and no groups, so that keys are repeated for their query heads.
    Efficient = 1,
    /// cuDNN's, in half precision. It makes a plan for every new shape, and its backward sums in no fixed order.
    Cudnn = 2,
    /// The one for the CPU, for tests of what is made of parts.
    #[cfg(test)]
    Cpu = 3,
}

impl TorchKernel {
    pub fn name(self) -> &'static str {
        match self {
            Self::Flash => "FlashAttention",
            Self::Efficient => "memory-efficient",
            Self::Cudnn => "cuDNN",
            #[cfg(test)]
            Self::Cpu => "libtorch's for the CPU",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TorchKernelMask {
    All = 0,
    /// A square of which each query sees the keys up to its own.
    Causal = 1,
    /// The queries are those of the last keys, and see the keys up to their own.
    CausalFromEnd = 2,
}

/// Output and log-sum-exp of one part; an error where the kernel does not serve such tensors on their device.
///
/// # Shapes
/// `q_bhnd (B, H, n, D)`, `k_bgpd` and `v_bgpd (B, G, P, D)` with `P > 0`; out `(B, H, n, D)` in the kind of the queries, and
/// `(B, H, n)` in f32 (f64 for f64).
pub fn vendor_attend(
    vendor: TorchKernel,
    q_bhnd: &Tensor,
    k_bgpd: &Tensor,
    v_bgpd: &Tensor,
    mask: TorchKernelMask,
    scale: f64,
) -> Result<(Tensor, Tensor), BackwardError> {
    let [q, k, v] = [q_bhnd, k_bgpd, v_bgpd].map(pointer);
    // SAFETY: all are live tensors; two results are written.
    let made = tensors(|results| unsafe { kvtune_vendor_attend(vendor as c_int, q, k, v, mask as c_int, scale, results) })?;
    Ok(made.map(Option::unwrap_or_default).into())
}

/// Gradients `(dq, dk, dv)` of one part, from an output and log-sum-exps that may be those of several parts.
///
/// # Shapes
/// `dout_bhnd` and `out_bhnd (B, H, n, D)`, `lse_bhn (B, H, n)`; the rest, and the results, as in [`vendor_attend`].
pub fn vendor_attend_backward(
    vendor: TorchKernel,
    dout_bhnd: &Tensor,
    [q_bhnd, k_bgpd, v_bgpd]: [&Tensor; 3],
    [out_bhnd, lse_bhn]: [&Tensor; 2],
    mask: TorchKernelMask,
    scale: f64,
) -> Result<(Tensor, Tensor, Tensor), BackwardError> {
    let inputs = [dout_bhnd, q_bhnd, k_bgpd, v_bgpd, out_bhnd, lse_bhn].map(pointer);
    // SAFETY: all are live tensors; three results are written.
    let made =
        tensors(|results| unsafe { kvtune_vendor_attend_backward(vendor as c_int, &inputs, mask as c_int, scale, results) })?;
    Ok(made.map(Option::unwrap_or_default).into())
}
