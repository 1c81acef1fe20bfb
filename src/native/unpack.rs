//! Frozen weights in few bits, unpacked on the CPU.

use std::ffi::c_int;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::autograd::{check, or_panic, pointer};
use super::kernels::made;

unsafe extern "C" {
    fn kvtune_first_bad_block(packed: *mut C_tensor, id: i64, result: *mut i64) -> c_int;
    fn kvtune_packed_product(x: *mut C_tensor, packed: *mut C_tensor, id: i64, result: *mut *mut C_tensor) -> c_int;
    fn kvtune_unpack(packed: *mut C_tensor, id: i64, like: *mut C_tensor, result: *mut *mut C_tensor) -> c_int;
}

/// The numbers of rows that lie in ggml's blocks of the type with this number, made in f32 and rounded to `kind`.
///
/// # Shapes
/// `packed (…, bytes)`, u8, whole blocks; result `(…, D)`, f32, f64 or bf16.
pub fn unpack(packed: &Tensor, id: u32, kind: Kind) -> Tensor {
    let like = Tensor::empty([0], (kind, Device::Cpu));
    // SAFETY: both are live tensors; one result is written.
    let [unpacked] = made(|result| unsafe { kvtune_unpack(pointer(packed), id.into(), pointer(&like), result) });
    unpacked
}

/// The first block with a scale or a minimum that is infinite or not a number, counted from 0.
///
/// # Shapes
/// As in [`unpack`].
pub fn first_bad_block(packed: &Tensor, id: u32) -> Option<usize> {
    let mut found = -1;
    // SAFETY: it is a live tensor; one number is written.
    or_panic(check(unsafe { kvtune_first_bad_block(pointer(packed), id.into(), &raw mut found) }));
    usize::try_from(found).ok()
}

/// `x Wᵀ` of a few rows with packed ones, none of which is unpacked as a whole matrix.
///
/// # Shapes
/// `x (n, D)`, f32, `packed (o, bytes)` as in [`unpack`]; result `(n, o)`, f32.
pub fn packed_product(x: &Tensor, packed: &Tensor, id: u32) -> Tensor {
    // SAFETY: both are live tensors; one result is written.
    let [product] = made(|result| unsafe { kvtune_packed_product(pointer(x), pointer(packed), id.into(), result) });
    product
}
