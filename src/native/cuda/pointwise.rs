//! The kernels for norms, gates and rotations of bf16 and f16: one pass each, where libtorch's operations would go over f32 copies several
//! times. Each function gives `None` where its kernel does not serve, and operations on tensors do its work.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use super::attention_mass::{aligned, strides};
use super::built::{self, KernelSource, Setting};
use super::driver::launch_stream;
use crate::native::RotationDirection;

pub(super) static SOURCE: KernelSource = KernelSource {
    name: "pointwise",
    text: include_str!("kernels/pointwise.cu"),
    kernels: &["norm_rows", "norm_rows_back", "gated", "gated_back", "turned"],
};

/// Threads of a block.
const THREADS: usize = 256;
/// Numbers of a row below which a block of threads would be too large for it.
const MIN_WIDTH: i64 = 512;
/// Numbers that are read at once.
const PIECE: i64 = 8;
/// Threads, or rows, above which the kernels' own numbers would not hold an index.
const INDEX_LIMIT: i64 = 1 << 31;

/// The parameter of `norm_rows` and `norm_rows_back`, as the kernels' text has it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Norm {
    /// x, weight, dy, rstd and out, null where a kernel has none.
    tensors: [*mut c_void; 5],
    width: c_int,
    eps: f32,
}

/// The parameter of `gated` and `gated_back`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Gated {
    /// gate, up, dy, out and dup, null where a kernel has none.
    tensors: [*mut c_void; 5],
    pieces: i64,
}

/// The parameter of `turned`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Turned {
    /// x, cos, sin and out.
    tensors: [*mut c_void; 4],
    x_strides: [i64; 3],
    out_strides: [i64; 3],
    angle_batch: i64,
    count: u32,
    heads: c_int,
    tokens: c_int,
    half: c_int,
    sign: f32,
}

/// What the kernels are compiled with for a tensor's kind, if it is on a device.
fn settings(x: &Tensor) -> Option<[Setting; 1]> {
    if x.device().is_cuda() { Some([built::of_half(x.kind())?]) } else { None }
}

/// Starts a kernel for tensors like `x`; `None` where it does not serve.
///
/// # Safety
/// `P` must be the kernel's parameter; what it points to must be on the device of `x`, as large as the kernel takes it to be.
unsafe fn launch<P: Copy>(x: &Tensor, kernel: &str, blocks: usize, params: &P) -> Option<()> {
    let Device::Cuda(device) = x.device() else { return None };
    built::with(device, &SOURCE, &settings(x)?, |module| {
        // SAFETY: the caller's promises. Tensors that are dropped before the kernel has run give their memory to operations behind it in the
        // same stream.
        unsafe { module.launch(kernel, [blocks, 1, 1], THREADS, params, launch_stream(device)?) }
    })
}

/// In one piece, and beginning where 16 bytes can be read at once.
fn dense(x: &Tensor) -> Tensor {
    let x = x.contiguous();
    if (x.data_ptr() as usize).is_multiple_of(16) { x } else { x.copy() }
}

fn is_like(x: &Tensor, other: &Tensor) -> bool {
    x.kind() == other.kind() && x.device() == other.device()
}

/// The norm and one over the root of each row, as in [`crate::native::rms_norm`].
pub fn rms_norm(x: &Tensor, weight_e: &Tensor, eps: f64) -> Option<(Tensor, Tensor)> {
    let (rows, width) = rows_of(x, weight_e)?;
    let (x, weight) = (dense(x), dense(weight_e));
    let mut size = x.size();
    *size.last_mut()? = 1;
    let (y, rstd) = (x.empty_like(), Tensor::empty(size, (Kind::Float, x.device())));
    let tensors = [x.data_ptr(), weight.data_ptr(), null_mut(), rstd.data_ptr(), y.data_ptr()];
    let params = Norm { tensors, width, eps: eps as f32 };
    // SAFETY: the parameter is the kernel's; all tensors are in one piece, on this device, and of `rows` rows.
    unsafe { launch(&x, "norm_rows", rows, &params)? };
    Some((y, rstd))
}

/// The gradient of x alone, as [`crate::native::rms_norm_backward`] has it.
pub fn rms_norm_backward(dy: &Tensor, [x, weight_e, rstd]: [&Tensor; 3]) -> Option<Tensor> {
    let (rows, width) = rows_of(x, weight_e)?;
    if !is_like(x, dy) || x.size() != dy.size() || rstd.kind() != Kind::Float {
        return None;
    }
    let (x, weight, dy, rstd) = (dense(x), dense(weight_e), dense(dy), rstd.contiguous());
    let dx = x.empty_like();
    let tensors = [&x, &weight, &dy, &rstd, &dx].map(Tensor::data_ptr);
    let params = Norm { tensors, width, eps: 0.0 };
    // SAFETY: as above; `rstd` has a number for each row.
    unsafe { launch(&x, "norm_rows_back", rows, &params)? };
    Some(dx)
}

/// How many rows there are, and how wide they are, if the kernels can read them.
fn rows_of(x: &Tensor, weight_e: &Tensor) -> Option<(usize, c_int)> {
    settings(x)?;
    let width = *x.size().last()?;
    let rows = x.numel() as i64 / width.max(1);
    let fits = rows > 0
        && rows < INDEX_LIMIT
        && width >= MIN_WIDTH
        && width % PIECE == 0
        && weight_e.numel() as i64 == width
        && is_like(x, weight_e);
    fits.then_some((rows as usize, c_int::try_from(width).ok()?))
}

/// The gate and what it lets through, as in [`crate::native::swiglu`].
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Option<Tensor> {
    let pieces = gates(gate, &[up])?;
    let (gate, up) = (dense(gate), dense(up));
    let y = gate.empty_like();
    let tensors = [gate.data_ptr(), up.data_ptr(), null_mut(), y.data_ptr(), null_mut()];
    let params = Gated { tensors, pieces };
    // SAFETY: the parameter is the kernel's; all tensors are in one piece, on this device, and of `pieces` pieces.
    unsafe { launch(&gate, "gated", (pieces as usize).div_ceil(THREADS), &params)? };
    Some(y)
}

/// The gradients of gate and up, as in [`crate::native::swiglu_backward`].
pub fn swiglu_backward(dy: &Tensor, gate: &Tensor, up: &Tensor) -> Option<(Tensor, Tensor)> {
    let pieces = gates(gate, &[up, dy])?;
    let (gate, up, dy) = (dense(gate), dense(up), dense(dy));
    let (dgate, dup) = (gate.empty_like(), gate.empty_like());
    let tensors = [&gate, &up, &dy, &dgate, &dup].map(Tensor::data_ptr);
    let params = Gated { tensors, pieces };
    // SAFETY: as above.
    unsafe { launch(&gate, "gated_back", (pieces as usize).div_ceil(THREADS), &params)? };
    Some((dgate, dup))
}

/// Pieces of 16 bytes that each tensor has, if the kernels can read them all.
fn gates(gate: &Tensor, others: &[&Tensor]) -> Option<i64> {
    settings(gate)?;
    let count = gate.numel() as i64;
    let fits = count > 0 && count % PIECE == 0 && count / PIECE < INDEX_LIMIT;
    let all_alike = others.iter().all(|other| is_like(gate, other) && other.size() == gate.size());
    (fits && all_alike).then_some(count / PIECE)
}

/// The turned heads, as in [`crate::native::rotate`]: what is turned back is laid out as a projection is, (B, n, heads, D).
pub fn rotate(x_bhnd: &Tensor, [cos, sin]: [&Tensor; 2], direction: RotationDirection) -> Option<Tensor> {
    let (batch, heads, tokens, width) = x_bhnd.size4().ok()?;
    let (pieces, rows) = (width / 2 / PIECE, cos.size()[0]);
    let count = batch * heads * tokens * pieces;
    let has_angles = [cos, sin].iter().all(|x| is_like(x_bhnd, x) && x.numel() as i64 == rows * tokens * (width / 2));
    let fits = width % (2 * PIECE) == 0 && count > 0 && count < INDEX_LIMIT && has_angles && (rows == 1 || rows == batch);
    settings(x_bhnd).filter(|_| fits)?;
    let (x, cos, sin) = (aligned(x_bhnd), dense(cos), dense(sin));
    let options = (x.kind(), x.device());
    let out = match direction {
        RotationDirection::Forth => Tensor::empty([batch, heads, tokens, width], options),
        RotationDirection::Back => Tensor::empty([batch, tokens, heads, width], options).transpose(1, 2),
    };
    let params = Turned {
        tensors: [&x, &cos, &sin, &out].map(Tensor::data_ptr),
        x_strides: strides(&x).map(|stride| stride / PIECE),
        out_strides: strides(&out).map(|stride| stride / PIECE),
        angle_batch: if rows == 1 { 0 } else { tokens * pieces },
        count: u32::try_from(count).ok()?,
        heads: c_int::try_from(heads).ok()?,
        tokens: c_int::try_from(tokens).ok()?,
        half: c_int::try_from(pieces).ok()?,
        sign: if direction == RotationDirection::Back { -1.0 } else { 1.0 },
    };
    // SAFETY: the parameter is the kernel's; the tensors are on this device, of these sizes, with channels that are neighbours.
    unsafe { launch(&x, "turned", (count as usize).div_ceil(THREADS), &params)? };
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::super::nvrtc::tests::spills_nothing;
    use super::*;

    #[test]
    fn parameters_are_as_large_as_the_kernels_have_them() {
        for (size, text) in [
            (size_of::<Norm>(), format!("sizeof(Norm) == {}", size_of::<Norm>())),
            (size_of::<Gated>(), format!("sizeof(Gate) == {}", size_of::<Gated>())),
            (size_of::<Turned>(), format!("sizeof(Turn) == {}", size_of::<Turned>())),
        ] {
            assert!(SOURCE.text.contains(&text), "{size}");
        }
        for constant in [format!("THREADS = {THREADS};"), "Narrow at[8];".to_owned()] {
            assert!(SOURCE.text.contains(&constant), "{constant}");
        }
    }

    #[test]
    fn elsewhere_than_on_cuda_they_do_not_serve() {
        let x = Tensor::ones([2, 3, 4, 16], (Kind::BFloat16, Device::Cpu));
        let weight = Tensor::ones([16], (Kind::BFloat16, Device::Cpu));
        let angle = Tensor::ones([1, 1, 4, 8], (Kind::BFloat16, Device::Cpu));
        assert!(rms_norm(&x, &weight, 1e-6).is_none() && swiglu(&x, &x).is_none());
        assert!(rotate(&x, [&angle, &angle], RotationDirection::Forth).is_none());
    }

    #[test]
    fn they_compile_for_ampere_hopper_and_blackwell_and_spill_no_register() {
        spills_nothing(&SOURCE, &[0, 1].map(|is_f16| [("KVTUNE_F16", is_f16)]));
    }
}
