//! What the shim has made and Rust owns.

use std::ffi::{c_int, c_void};

use super::autograd::{BackwardError, written};

/// An object of the shim's, which is given back when this is dropped.
#[derive(Debug)]
pub(super) struct ShimObject {
    object: *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
}

impl ShimObject {
    /// What `make` writes.
    ///
    /// # Safety
    /// Where it succeeds it writes an object that nobody else owns, and that `free` takes.
    pub(super) unsafe fn made(
        free: unsafe extern "C" fn(*mut c_void),
        make: impl FnOnce(*mut *mut c_void) -> c_int,
    ) -> Result<Self, BackwardError> {
        written(std::ptr::null_mut(), make).map(|object| Self { object, free })
    }

    /// The object, which is alive as long as this is.
    pub(super) fn get(&self) -> *mut c_void {
        self.object
    }
}

impl Drop for ShimObject {
    fn drop(&mut self) {
        // SAFETY: it was made for `free`, and is given back once.
        unsafe { (self.free)(self.object) };
    }
}
