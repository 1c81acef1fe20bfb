//! What a step takes by part, on two clocks: the one on the wall, and the time that the process' threads have computed; and the rate of
//! plain matrix multiplication by both, on the same device and threads.

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tch::{Device, Kind, Tensor, no_grad};

use crate::native::{cuda, product};
use crate::plan::StepPart;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    pub seconds: f64,
    /// CPU time of all threads of the process together.
    pub cpu_seconds: f64,
}

impl Spent {
    pub(super) fn add(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
    }

    fn without(self, other: Self) -> Self {
        Self { seconds: self.seconds - other.seconds, cpu_seconds: self.cpu_seconds - other.cpu_seconds }
    }

    /// What both clocks say after all that `device` was asked to do: a GPU works on while its host goes ahead.
    fn by_now(device: Device) -> Self {
        cuda::wait(device);
        let [seconds, cpu_seconds] = [ClockId::Monotonic, ClockId::ProcessCPUTime].map(|clock| {
            let time = clock_gettime(clock);
            time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
        });
        Self { seconds, cpu_seconds }
    }
}

/// Splits the time of a step among its parts: it runs from its making on, and is told when the next part begins.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    device: Device,
    began: Spent,
    turned: Spent,
    part: StepPart,
    parts: [Spent; 6],
    left_out: Spent,
}

impl Stopwatch {
    /// Begins with the forward phase.
    pub(crate) fn start(device: Device) -> Self {
        let now = Spent::by_now(device);
        Self { device, began: now, turned: now, part: StepPart::Forward, parts: Default::default(), left_out: Spent::default() }
    }

    pub(crate) fn restart(&mut self) {
        *self = Self::start(self.device);
    }

    /// From now on it is `part` that the time is spent on.
    pub(crate) fn turn(&mut self, part: StepPart) {
        let now = Spent::by_now(self.device);
        self.parts[self.part as usize].add(now.without(self.turned));
        (self.turned, self.part) = (now, part);
    }

    /// Leaves the time since the last turn out of the step.
    pub(crate) fn leave_out(&mut self) {
        let now = Spent::by_now(self.device);
        self.left_out.add(now.without(self.turned));
        self.turned = now;
    }

    /// The whole, from the first reading of the clocks to the last, and its parts in the order of [`StepPart::ALL`].
    pub(crate) fn stop(mut self) -> (Spent, [Spent; 6]) {
        self.turn(StepPart::Optimizer);
        (self.turned.without(self.began).without(self.left_out), self.parts)
    }
}

/// The rate of matrix products in operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GemmRate {
    pub per_second: f64,
    pub per_cpu_second: f64,
}

impl GemmRate {
    pub(super) fn of(flops: f64, spent: Spent) -> Self {
        Self { per_second: flops / spent.seconds, per_cpu_second: flops / spent.cpu_seconds }
    }
}

/// Seconds that the measurement lasts, at least.
const SECONDS: f64 = 0.1;
/// Side of the matrices: large enough for the rate, small enough to leave memory as it was.
const SIDE_CPU: i64 = 1024;
const SIDE_CUDA: i64 = 4096;

/// The rate of a product of two square matrices of the kind, by the library that the projections use.
pub fn gemm_rate(kind: Kind, device: Device) -> GemmRate {
    let side = if device.is_cuda() { SIDE_CUDA } else { SIDE_CPU };
    // Drawn: where all numbers are the same, few wires change, and a GPU that is short of power computes faster than it ever would.
    let [x, w] = [(); 2].map(|()| Tensor::randn([side, side], (kind, device)));
    let multiply = || no_grad(|| drop(product(&x, &w)));
    multiply();
    let (mut flops, mut spent) = (0.0, Spent::default());
    while spent.seconds < SECONDS {
        let began = Spent::by_now(device);
        multiply();
        spent.add(Spent::by_now(device).without(began));
        flops += 2.0 * side.pow(3) as f64;
    }
    GemmRate::of(flops, spent)
}
