//! How CUDA's libraries compute: TF32, sums of narrow numbers, the same every time.

use std::ffi::c_int;

use crate::native::autograd::{check, or_panic, written};

unsafe extern "C" {
    safe fn kvtune_set_numerics(allows_tf32: c_int, is_deterministic: c_int) -> c_int;
    fn kvtune_numerics(out: *mut c_int) -> c_int;
}

/// What is left open to CUDA's libraries. Products of bf16 and f16 are summed in f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numerics {
    /// Whether the factors of f32 products may be rounded to 10 bits of mantissa.
    pub allows_tf32: bool,
    /// Whether the same input gives the same bits every time; an operation that cannot fails.
    pub is_deterministic: bool,
}

impl Numerics {
    /// Holds for the process from here on. Call it before anything is computed on a GPU.
    pub fn set(self) {
        or_panic(check(kvtune_set_numerics(c_int::from(self.allows_tf32), c_int::from(self.is_deterministic))));
    }

    /// What holds now, and whether products of bf16 are summed in f32.
    pub fn now() -> (Self, bool) {
        // SAFETY: three numbers are written.
        let out: [c_int; 3] = or_panic(written([0; 3], |out| unsafe { kvtune_numerics(out.cast()) }));
        let [tf32, sums_in_f32, deterministic] = out.map(|number| number != 0);
        (Self { allows_tf32: tf32, is_deterministic: deterministic }, sums_in_f32)
    }
}
