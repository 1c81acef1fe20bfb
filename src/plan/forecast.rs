//! The peak of a step's memory before it is made, part by part.

use std::ops::Range;

use super::StepSpec;
use super::moment::{PlannedPeak, StepPart};
use super::step_memory::StepMemory;
use crate::data::{Batch, IGNORE, Sequence};
use crate::engine::{ChunkPlan, MemoryPlace};
use crate::units::Bytes;

/// Memory that a step would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Peak of the memory where the model computes; on a CPU, of the process' tensors.
    pub device: PlannedPeak,
    /// Peak of the host's memory, where the model computes elsewhere.
    pub host: Option<PlannedPeak>,
    /// What waits in files at most.
    pub files: Bytes,
}

impl Forecast {
    /// The step on `batch`, which is planned as `plan`, after the first: stores keep the room that they have had.
    pub fn of(spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> Self {
        let memory = StepMemory::new(spec, plan, &targets_by_column(plan, batch));
        let moments = memory.moments();
        let highest = |place: Option<MemoryPlace>| {
            let peaks = moments.iter().map(|moment| moment.peak(place));
            peaks.max_by_key(PlannedPeak::bytes).unwrap_or(PlannedPeak { part: StepPart::Forward, parts: Vec::new() })
        };
        let has_own_memory = spec.device.is_cuda();
        Self {
            device: highest(has_own_memory.then_some(MemoryPlace::Device)),
            host: has_own_memory.then(|| highest(Some(MemoryPlace::Host))),
            files: memory.in_files(),
        }
    }
}

fn targets_by_column(plan: &ChunkPlan, batch: &Batch) -> Vec<usize> {
    let of_column = |column: &Range<usize>| {
        let (start, len) = plan.tokens(column);
        let of_sequence = |sequence: &Sequence| match sequence.targets.labels() {
            Some(labels) => {
                let labels = labels.get(start..labels.len().min(start + len)).unwrap_or_default();
                labels.iter().filter(|label| **label != IGNORE).count()
            }
            None => usize::from((start..start + len).contains(&sequence.inputs.len().saturating_sub(1))),
        };
        batch.sequences.iter().map(of_sequence).sum()
    };
    plan.columns.iter().map(of_column).collect()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::super::fixtures::with_step;
    use super::super::moment::Moment;
    use super::*;
    use crate::engine::ColumnWidth;

    /// The moments of 14 tokens over 8 slots, in columns of 4, of two layer bands.
    fn moments(words: &str, device: Device) -> Vec<Moment> {
        let plan = ChunkPlan::new(&[14], 8, 4, ColumnWidth::Chunks(1));
        with_step(words, (Kind::Float, device), |spec| StepMemory::new(spec, &plan, &[4, 4, 4, 2]).moments())
    }

    fn most(moments: &[Moment], name: &str) -> u64 {
        let of = |moment: &Moment| moment.entries.iter().filter(|entry| entry.0 == name).map(|entry| entry.2).sum::<u64>();
        moments.iter().map(of).max().unwrap_or(0)
    }

    #[test]
    fn a_step_holds_what_its_sizes_say() {
        let of = moments("", Device::Cpu);
        // Two layers of 8 slots, in which a key and a value have 2 numbers each; and the hidden states' 4 numbers.
        assert_eq!((most(&of, "caches"), most(&of, "gradients of caches")), (2 * 8 * (16 + 8), 8 * 16));
        assert_eq!((most(&of, "travelling gradients"), most(&of, "tokens")), (14 * 4 * 4, 8 * 14));
        let kept = moments("grad.attention_outputs = 'keep'", Device::Cpu);
        assert_eq!((most(&of, "attention outputs"), most(&kept, "attention outputs")), (0, 2 * 14 * 2 * (2 + 1) * 4));
        assert!(most(&kept, "graph of the cell") == most(&of, "graph of the cell"));
    }

    #[test]
    fn copies_are_on_their_way_where_they_are_asynchronous() {
        assert_eq!(most(&moments("", Device::Cpu), "prefetched copies"), 0);
        assert!(most(&moments("", Device::Cuda(0)), "prefetched copies") > 0);
    }
}
