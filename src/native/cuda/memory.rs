//! What libtorch's allocator for CUDA keeps for tensors to come.

use std::ffi::c_int;

use tch::Device;

unsafe extern "C" {
    fn kvtune_release_cached_memory() -> c_int;
}

/// Gives the device back what no tensor uses, so that other sizes can be cut from it. Nothing happens where the device is the CPU.
pub fn release_cached_memory(device: Device) {
    if device.is_cuda() {
        // SAFETY: takes nothing. Where it fails the next allocation says so.
        let _ = unsafe { kvtune_release_cached_memory() };
    }
}
