//! The statistics of libtorch's caching allocators, as PyTorch's `torch.cuda.memory_stats` gives them.

use std::ffi::c_int;

use tch::Device;

use crate::native::autograd::{check, written};

unsafe extern "C" {
    fn kvtune_device_stats(index: c_int, out: *mut i64) -> c_int;
    fn kvtune_device_reset_peak(index: c_int) -> c_int;
    fn kvtune_pinned_stats(out: *mut i64) -> c_int;
    fn kvtune_release_cached_memory() -> c_int;
}

/// Bytes that an allocator has handed out. What was allocated before the meter began, or is freed by another thread, is not counted, so that
/// `live` may be below zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Bytes of the tensors that there are now.
    pub live: i64,
    /// The largest `live` since [`AllocationMeter::reset_peak`](crate::native::AllocationMeter::reset_peak).
    pub peak: i64,
    /// The most that a caching allocator has held, for tensors that are and that were, since it began or, by its own statistics, since that
    /// reset; 0 where there is none.
    pub reserved: i64,
}

/// What the allocator of a CUDA device has done, for all threads, since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Bytes: handed out now, the most since [`reset_device_peak`], and the most that it has held since then.
    pub allocated: Allocated,
    /// How often it had to give all that it held free back to the driver before it got what it was asked for.
    pub retries: i64,
    pub failures: i64,
}

/// The statistics of `cuda:index`; `None` where no CUDA device was used.
pub fn device_stats(index: usize) -> Option<DeviceStats> {
    // SAFETY: there is room for the six numbers that are written.
    let out = written([0; 6], |out| unsafe { kvtune_device_stats(index as c_int, out.cast()) });
    let [live, peak, _, reserved, retries, failures] = out.ok()?;
    Some(DeviceStats { allocated: Allocated { live, peak, reserved }, retries, failures })
}

/// Lets the peaks begin at what is there now; whether there is such an allocator.
pub fn reset_device_peak(index: usize) -> bool {
    // SAFETY: takes a number.
    check(unsafe { kvtune_device_reset_peak(index as c_int) }).is_ok()
}

/// Gives the device back what no tensor uses, so that other sizes can be cut from it, and the system what is pinned for none; nothing on a CPU.
pub fn release_cached_memory(device: Device) {
    if device.is_cuda() {
        // SAFETY: takes nothing. Where it fails the next allocation says so.
        let _ = unsafe { kvtune_release_cached_memory() };
    }
}

/// Bytes of pinned memory that libtorch holds on the host, and the most that it has held; `None` where there is no CUDA.
pub fn pinned_stats() -> Option<(i64, i64)> {
    // SAFETY: there is room for the two numbers that are written.
    written([0; 2], |out| unsafe { kvtune_pinned_stats(out.cast()) }).ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_device_there_is_nothing_to_tell() {
        if tch::Cuda::is_available() {
            eprintln!("skipped: a CUDA device is there");
            return;
        }
        assert_eq!((device_stats(0), reset_device_peak(0)), (None, false));
        // CUDA's half of libtorch may be there without a device.
        assert!(pinned_stats().is_none_or(|held| held == (0, 0)), "{:?}", pinned_stats());
    }
}
