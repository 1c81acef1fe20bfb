//! What computes: a device with its memory and its speed, here or elsewhere.

use tch::Device;

use super::ProcessBaseline;
use super::baseline::resident_now;
use crate::native::{attainable_memory, cuda};
use crate::recipe::Dtype;
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

/// What a step is planned for.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub device: Device,
    pub threads: usize,
    /// What the process takes in addition to tensors.
    pub baseline: ProcessBaseline,
    pub limits: Limits,
    /// Ranks that train together, each with a machine or a part of one.
    pub ranks: usize,
    /// Operations a second of a product of two matrices; `None` where that was not measured.
    pub rate: Option<f64>,
    /// Alike processes that share it.
    pub processes: u64,
}

impl Machine {
    /// This machine, of which only the speed is not known yet. Call it before a model is loaded: what is resident by then counts as
    /// baseline.
    pub fn here(dtype: Dtype, device: Device) -> Self {
        let baseline = ProcessBaseline::rehearsed(dtype, device);
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        let on_device = if let Device::Cuda(index) = device { cuda::free_device_memory(index) } else { None };
        // Of the host's memory as much as the process may get; where files would be is not known here.
        let limits = Limits { device: on_device.map(Bytes), host: attainable_memory().map(Bytes), files: None };
        Self { device, threads, baseline, limits, ranks: 1, rate: None, processes: 1 }
    }

    /// What one of `all` ranks may have of it, `here` of which run on it, each with a device of its own: a part of the host's memory and of
    /// its disk.
    pub fn of_ranks(mut self, here: usize, all: usize) -> Self {
        (self.processes, self.ranks) = (here.max(1) as u64, all);
        let part = |bytes: Bytes| Bytes(bytes.0 / self.processes);
        (self.limits.host, self.limits.files) = (self.limits.host.map(part), self.limits.files.map(part));
        self
    }

    /// With so much room for scratch files, where that is known.
    pub fn with_disk(mut self, files: Option<Bytes>) -> Self {
        self.limits.files = files.map(|files| Bytes(files.0 / self.processes));
        self
    }

    /// Counts as baseline, too, what `load` leaves resident: data, say.
    pub fn including<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let before = resident_now();
        let loaded = load();
        self.baseline.resident.0 += resident_now().saturating_sub(before);
        loaded
    }
}
