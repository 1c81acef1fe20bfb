//! What computes: a device with its memory and its speed, here or elsewhere.

use tch::{Device, Kind};

use super::rates::Rates;
use super::{Limits, ProcessBaseline};
use crate::model::ModelConfig;
use crate::native::give_free_memory_back;
use crate::recipe::Dtype;
use crate::report::memory::resident;
use crate::units::Bytes;

/// What a step is planned for.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Where it computes.
    pub device: Device,
    /// Threads on a CPU.
    pub threads: usize,
    /// What the process takes beside tensors.
    pub baseline: ProcessBaseline,
    /// What there is.
    pub limits: Limits,
    /// How fast the device is; `None` where it was not measured.
    pub rates: Option<Rates>,
}

impl Machine {
    /// This machine, of which only the speed is not known yet. Call it before a model is loaded: what is resident by then counts as
    /// baseline.
    pub fn here(dtype: Dtype, device: Device) -> Self {
        let baseline = ProcessBaseline::rehearsed(dtype, device);
        let threads = usize::try_from(tch::get_num_threads()).unwrap_or(1);
        Self { device, threads, baseline, limits: Limits::of_machine(device), rates: None }
    }

    /// With so much room for scratch files, where that is known.
    pub fn with_disk(mut self, files: Option<Bytes>) -> Self {
        self.limits.files = files;
        self
    }

    /// Counts as baseline, too, what `load` leaves resident: data, say.
    pub fn beside<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let before = resident_now();
        let loaded = load();
        self.baseline.0.0 += resident_now().saturating_sub(before);
        loaded
    }

    /// With its speed at a model's shapes in `kind`, for so many sequences, tokens of a chunk and slots.
    pub fn timed(mut self, config: &ModelConfig, kind: Kind, shape: (usize, usize, usize)) -> Self {
        let before = resident_now();
        self.rates = Some(Rates::measured(config, (kind, self.device), shape));
        // What stays are the kernels of these shapes, and their buffers.
        self.baseline.0.0 += resident_now().saturating_sub(before);
        self
    }
}

/// What is resident, without free memory that the allocator keeps.
pub(super) fn resident_now() -> u64 {
    give_free_memory_back();
    resident().map_or(0, |resident| resident.all.0)
}
