//! What libtorch's allocators hand out, as they count it themselves: the ground truth of a memory profile.

use std::ffi::{c_int, c_void};

use tch::Device;

use super::cuda::{Allocated, DeviceStats, device_stats, reset_device_peak};
use super::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_meter_start(out: *mut *mut c_void) -> c_int;
    fn kvtune_meter_read(handle: *const c_void, out: *mut i64);
    fn kvtune_meter_reset_peak(handle: *const c_void);
    fn kvtune_meter_stop(handle: *mut c_void);
    /// Gives what the binary's allocator keeps for later back to the system, so that what is resident is in use; another allocator's stays.
    #[link_name = "kvtune_give_free_memory_back"]
    pub safe fn give_free_memory_back();
}

/// Counts the allocations of the thread that started it, and of the backwards that this thread runs, until it is dropped.
#[derive(Debug)]
pub struct AllocationMeter {
    /// It ends on the thread on which it began, as a `ShimObject` goes to no other.
    handle: ShimObject,
    /// A CUDA device whose allocator has statistics of its own.
    device: Option<usize>,
}

impl AllocationMeter {
    /// Begins to count, beside the host for what computes on `device`; `None` if libtorch does not let us. The counts of a CUDA device
    /// are its caching allocator's own: of all threads, and in the blocks that it hands out.
    pub fn start(device: Device) -> Option<Self> {
        let device = if let Device::Cuda(index) = device { Some(index) } else { None };
        // SAFETY: a new meter is written.
        unsafe { ShimObject::made(kvtune_meter_stop, |out| kvtune_meter_start(out)) }.ok().map(|handle| Self { handle, device })
    }

    /// What the host has handed out, and the device.
    pub fn read(&self) -> (Allocated, Allocated) {
        let mut out = [0; 2];
        // SAFETY: the handle is alive until `drop`, and `out` has room for the two numbers that are written.
        unsafe { kvtune_meter_read(self.handle.get(), out.as_mut_ptr()) };
        let [live, peak] = out;
        let device = self.of_allocator().map_or_else(Allocated::default, |stats| stats.allocated);
        (Allocated { live, peak, reserved: 0 }, device)
    }

    pub fn of_allocator(&self) -> Option<DeviceStats> {
        self.device.and_then(device_stats)
    }

    /// Lets the peaks begin at what is live now.
    pub fn reset_peak(&self) {
        // SAFETY: the handle is alive until `drop`.
        unsafe { kvtune_meter_reset_peak(self.handle.get()) };
        if let Some(index) = self.device {
            reset_device_peak(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    #[test]
    fn tensors_are_counted_to_the_byte() {
        let before = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
        let meter = AllocationMeter::start(Device::Cpu).unwrap();
        let kept = Tensor::zeros([256, 4], (Kind::Float, Device::Cpu));
        drop(Tensor::zeros([1 << 16], (Kind::Double, Device::Cpu)));
        drop(before);
        let expected = Allocated { live: 4096, peak: 4096 + (8 << 16), reserved: 0 };
        assert_eq!(meter.read(), (expected, Allocated::default()));
        meter.reset_peak();
        assert_eq!(meter.read().0.peak, 4096);
        drop(kept);
        assert_eq!(meter.read().0.live, 0);
    }

    #[test]
    fn what_a_backward_keeps_is_counted() {
        let x = Tensor::ones([1 << 10], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let meter = AllocationMeter::start(Device::Cpu).unwrap();
        let y = (&x * 2.0).exp();
        // The product is gone, its exponential is saved.
        assert_eq!(meter.read().0.live, 4 << 10);
        y.sum(Kind::Float).backward();
        drop(y);
        assert_eq!((meter.read().0.live, x.grad().numel()), (4 << 10, 1 << 10), "the gradient alone");
    }
}
