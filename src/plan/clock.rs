//! Two clocks: the one on the wall, and the time that the process' threads have computed.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tch::Device;

use crate::native::cuda;

/// Time on both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    /// On the wall.
    pub seconds: f64,
    /// Of all threads of the process together.
    pub cpu_seconds: f64,
}

impl Spent {
    /// Adds another time.
    pub(crate) fn add(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
    }
}

/// A reading of both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    wall: Instant,
    cpu: f64,
}

impl Reading {
    /// Now, after all that `device` was asked to do: a GPU works on while its host goes ahead.
    pub(crate) fn now(device: Device) -> Self {
        cuda::wait(device);
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        Self { wall: Instant::now(), cpu: cpu.tv_sec as f64 + cpu.tv_nsec as f64 * 1e-9 }
    }

    /// From `earlier` to here.
    pub(crate) fn since(self, earlier: Self) -> Spent {
        Spent { seconds: (self.wall - earlier.wall).as_secs_f64(), cpu_seconds: self.cpu - earlier.cpu }
    }
}

/// What `work` takes.
pub(crate) fn time_of(device: Device, work: impl FnOnce()) -> Spent {
    let began = Reading::now(device);
    work();
    Reading::now(device).since(began)
}
