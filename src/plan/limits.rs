//! How much memory there is.

use tch::Device;

use crate::native::cuda::free_device_memory;
use crate::report::memory::attainable;
use crate::units::Bytes;

/// What a step may take at most; `None` where nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The tensors of a device that has a memory of its own.
    pub device: Option<Bytes>,
    /// The process, all of it.
    pub host: Option<Bytes>,
    pub files: Option<Bytes>,
}

impl Limits {
    /// What this machine has: of the host's memory as much as the process may get. Where files would be is not known here.
    pub fn of_machine(device: Device) -> Self {
        let device = if let Device::Cuda(index) = device { free_device_memory(index) } else { None };
        Self { device: device.map(Bytes), host: attainable(), files: None }
    }
}
