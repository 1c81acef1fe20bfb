//! The time of a step: that of short steps which were made, scaled by the work that is counted.

use super::flops;
use super::{StepPart, StepSpec};
use crate::engine::{ChunkPlan, Schedule};

/// What takes time in a step, counted by part in the order of [`StepPart::ALL`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepWork {
    /// Floating point operations; of the optimiser, bytes of what is trained.
    operations: [f64; 6],
    /// How often a layer, or the head, is run on a column. Each time costs calls, nodes and locks in addition to its operations.
    runs: [f64; 6],
}

/// How long a part's work takes, in the order of [`StepPart::ALL`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTimes {
    /// Seconds of an operation.
    per_operation: [f64; 6],
    /// Seconds of a run, in addition.
    per_run: [f64; 6],
}

impl StepWork {
    /// The work of a step over `plan`, whose batch has so many tokens and targets.
    pub fn of(spec: &StepSpec<'_>, plan: &ChunkPlan, (tokens, targets): (usize, usize)) -> Self {
        let flops = flops::by_part(spec, plan, (tokens, targets));
        let (columns, schedule) = (plan.columns.len() as f64, Schedule::new(spec.settings, plan));
        let layers = columns * spec.config.num_layers() as f64;
        let again: usize = (0..spec.config.num_layers()).map(|layer| schedule.columns_again(layer)).sum();
        let of_part = |part| match part {
            StepPart::Forward => (flops.forward.linear + flops.forward.attention, layers),
            StepPart::Recompute => (flops.recompute.total(), again as f64),
            StepPart::Head => (flops.forward.head, columns),
            StepPart::Replay => (flops.replay.total(), columns * schedule.replayed_layers() as f64),
            StepPart::Backward => (flops.backward.total(), layers),
            StepPart::Optimizer => (spec.trained_bytes().0 as f64, 0.0),
        };
        let parts = StepPart::ALL.map(of_part);
        Self { operations: parts.map(|(operations, _)| operations), runs: parts.map(|(_, runs)| runs) }
    }

    /// The operations of all parts that compute.
    pub fn total_operations(&self) -> f64 {
        self.operations[..StepPart::Optimizer as usize].iter().sum()
    }
}

impl StepTimes {
    /// Of a large GPU, about: good to order tilings by where the device is not at hand.
    pub(super) const UNKNOWN: Self = Self { per_operation: [1e-14; 6], per_run: [2e-4; 6] };

    /// From the seconds by part of two steps of the same operations, one over narrow columns and one over wide ones.
    pub fn from_steps([narrow, wide]: [(StepWork, [f64; 6]); 2]) -> Self {
        let mut times = Self { per_operation: [0.0; 6], per_run: [0.0; 6] };
        for part in StepPart::ALL.map(|part| part as usize) {
            let [(runs, seconds), (fewer, wide_seconds)] = [narrow, wide].map(|(work, seconds)| (work.runs[part], seconds[part]));
            let saved = (seconds - wide_seconds) / (runs - fewer);
            // A machine that was busy during one of them makes the difference larger than the whole, or negative.
            let most = (seconds / runs).min(wide_seconds / fewer);
            let per_run = if runs > fewer { saved.clamp(0.0, most) } else { 0.0 };
            times.per_run[part] = per_run;
            times.per_operation[part] = (wide_seconds - per_run * fewer) / wide.0.operations[part].max(1.0);
        }
        // Steps of one layer band replay nothing. What is replayed is a forward again.
        let (forward, replay) = (StepPart::Forward as usize, StepPart::Replay as usize);
        if wide.0.operations[replay] == 0.0 {
            times.per_operation[replay] = times.per_operation[forward];
            times.per_run[replay] = times.per_run[forward];
        }
        times
    }

    /// Seconds of `work` by part.
    pub(super) fn seconds(&self, work: &StepWork) -> [f64; 6] {
        std::array::from_fn(|part| self.per_operation[part] * work.operations[part] + self.per_run[part] * work.runs[part])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(operations: f64, runs: f64) -> StepWork {
        StepWork { operations: [operations; 6], runs: [runs; 6] }
    }

    #[test]
    fn two_steps_tell_operations_and_runs_apart() {
        let times = StepTimes::from_steps([(work(100.0, 8.0), [10.0 + 4.0; 6]), (work(100.0, 2.0), [10.0 + 1.0; 6])]);
        assert_eq!(times, StepTimes { per_operation: [0.1; 6], per_run: [0.5; 6] });
        assert!(times.seconds(&work(1000.0, 4.0)).iter().all(|seconds| (seconds - 102.0).abs() < 1e-9), "{times:?}");
    }

    #[test]
    fn a_step_that_was_disturbed_makes_nothing_negative() {
        for (narrow, wide) in [(50.0, 1.0), (1.0, 50.0), (3.0, 3.0)] {
            let times = StepTimes::from_steps([(work(100.0, 8.0), [narrow; 6]), (work(100.0, 2.0), [wide; 6])]);
            let all = [times.per_operation, times.per_run].concat();
            assert!(all.iter().all(|&seconds| seconds >= 0.0), "{times:?}");
            assert!(times.seconds(&work(100.0, 2.0)).iter().all(|seconds| (seconds - wide).abs() < 1e-9), "{times:?}");
        }
    }

    #[test]
    fn what_was_not_replayed_takes_as_long_as_its_forward() {
        let [mut narrow, mut wide] = [work(100.0, 8.0), work(100.0, 2.0)];
        for work in [&mut narrow, &mut wide] {
            (work.operations[StepPart::Replay as usize], work.runs[StepPart::Replay as usize]) = (0.0, 0.0);
        }
        let times = StepTimes::from_steps([(narrow, [14.0; 6]), (wide, [11.0; 6])]);
        let replay = times.seconds(&work(1000.0, 4.0))[StepPart::Replay as usize];
        assert!((replay - 102.0).abs() < 1e-9, "{replay}");
    }
}
