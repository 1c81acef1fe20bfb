//! Frozen weights in few bits, unpacked on the CPU.

use std::ffi::c_int;

use tch::{Device, Kind, Tensor};

use super::autograd::{Raw, or_panic, pointer, written};
use super::kernels::made_one;

unsafe extern "C" {
    fn kvtune_codes_product(x: Raw, parts: *const Raw, layout: *const CodesLayout, result: *mut Raw) -> c_int;
    fn kvtune_first_bad_block(packed: Raw, id: i64, result: *mut i64) -> c_int;
    fn kvtune_packed_product(x: Raw, packed: Raw, id: i64, result: *mut Raw) -> c_int;
    fn kvtune_unpack_codes(parts: *const Raw, layout: *const CodesLayout, like: Raw, result: *mut Raw) -> c_int;
    fn kvtune_unpack(packed: Raw, id: i64, like: Raw, result: *mut Raw) -> c_int;
}

/// The numbers of rows that lie in ggml's blocks of the type with this number, made in f32 and rounded to `kind`.
///
/// # Shapes
/// `packed (…, bytes)`, u8, whole blocks; result `(…, D)`, f32, f64 or bf16.
pub fn unpack(packed: &Tensor, id: u32, kind: Kind) -> Tensor {
    let like = Tensor::empty([0], (kind, Device::Cpu));
    // SAFETY: both are live tensors; one result is written.
    made_one(|result| unsafe { kvtune_unpack(pointer(packed), id.into(), pointer(&like), result) })
}

/// The first block with a scale or a minimum that is infinite or not a number, counted from 0.
///
/// # Shapes
/// As in [`unpack`].
pub fn first_bad_block(packed: &Tensor, id: u32) -> Option<usize> {
    // SAFETY: it is a live tensor; one number is written.
    usize::try_from(or_panic(written(-1, |found| unsafe { kvtune_first_bad_block(pointer(packed), id.into(), found) }))).ok()
}

/// `x Wᵀ` of a few rows with packed ones, none of which is unpacked as a whole matrix.
///
/// # Shapes
/// `x (n, D)`, f32, `packed (o, bytes)` as in [`unpack`]; result `(n, o)`, f32.
pub fn packed_product(x: &Tensor, packed: &Tensor, id: u32) -> Tensor {
    // SAFETY: both are live tensors; one result is written.
    made_one(|result| unsafe { kvtune_packed_product(pointer(x), pointer(packed), id.into(), result) })
}

/// Rows of codes of 1, 2, 3, 4 or 8 bits: a number is `(table[code] − zero) · scale · factor`, each operation rounded to f32.
#[derive(Debug)]
pub struct Codes<'a> {
    /// `(rows, bytes)`, u8.
    pub codes: &'a Tensor,
    /// The value of each code, f32: 2, 4, 8, 16 or 256 of them.
    pub table: &'a Tensor,
    /// `(R, C)`, f32, those of a block of rows and columns each.
    pub scales: &'a Tensor,
    /// `(R, C)` of 8 bits, or as bytes of two 4-bit ones each, u8.
    pub zeros: Option<&'a Tensor>,
    /// In which of the C groups each column is, `(width)`, int64, where they do not follow one another.
    pub columns: Option<&'a Tensor>,
    pub layout: CodesLayout,
}

/// How codes lie, and which scale is whose.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CodesLayout {
    /// Numbers of a row.
    pub width: i64,
    pub block_rows: i64,
    pub block_columns: i64,
    /// The place of the first row in its block.
    pub first_row: i64,
    /// Bits of a zero, 4 or 8.
    pub zero_bits: i64,
    pub factor: f32,
    /// Whether the first of a byte's codes is in its upper bits.
    pub is_high_nibble_first: bool,
}

impl Codes<'_> {
    /// The numbers `(rows, width)`, rounded to `kind`: f32, f64 or bf16.
    pub fn unpack(&self, kind: Kind) -> Tensor {
        let like = Tensor::empty([0], (kind, Device::Cpu));
        // SAFETY: all are live tensors, or undefined ones; one result is written.
        self.with(|parts, layout| made_one(|result| unsafe { kvtune_unpack_codes(parts, layout, pointer(&like), result) }))
    }

    /// The product `x Wᵀ (n, rows)` of a few rows `x (n, width)`, f32, none of the matrix as a whole.
    pub fn product(&self, x: &Tensor) -> Tensor {
        // SAFETY: all are live tensors, or undefined ones; one result is written.
        self.with(|parts, layout| made_one(|result| unsafe { kvtune_codes_product(pointer(x), parts, layout, result) }))
    }

    fn with(&self, run: impl FnOnce(*const Raw, *const CodesLayout) -> Tensor) -> Tensor {
        let none = Tensor::new();
        let parts =
            [self.codes, self.table, self.scales, self.zeros.unwrap_or(&none), self.columns.unwrap_or(&none)].map(pointer);
        run(parts.as_ptr(), &raw const self.layout)
    }
}
