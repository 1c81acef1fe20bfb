//! What a step took, and what some steps took in the middle.

use serde::Serialize;
use serde_json::{Value, json};

use super::{GemmRate, MemoryProfile, Spent};
use crate::plan::{Flops, StepPart};
use crate::units::{Bytes, Seconds};

/// One step. With several ranks the figures are the first rank's; tokens, loss and `idle` are those of all ranks.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Counted from 1, warm-up steps first.
    pub step: usize,
    /// Whether the step is left out of the summary.
    pub is_warm_up: bool,
    /// The step whole, by its own reading of the clocks.
    pub whole: Spent,
    /// The time of each part, in the order of [`StepPart::ALL`].
    pub parts: [Spent; 6],
    /// Tokens of all sequences of all ranks.
    pub tokens: usize,
    /// Tokens with the pads that were run: of a sequence at most those that fill the chunk in which it ends.
    pub tokens_run: usize,
    pub flops: Flops,
    /// The rate of a product of two square matrices, measured just before the step.
    pub gemm: GemmRate,
    /// The largest resident size of the process; `None` where it can't be read.
    pub peak: Option<Bytes>,
    /// Whether that is of the step alone, and not of all before it, too.
    pub peak_is_of_step: bool,
    /// The most that the device's allocator had out; `None` on a CPU.
    pub device_peak: Option<Bytes>,
    /// Memory by part, where it is wanted: one table for each memory.
    pub memory: Vec<MemoryProfile>,
    pub copies: CopyCost,
    pub loss: f64,
    /// The part of their time that ranks have waited for the slowest; `None` for one alone.
    pub idle: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CopyCost {
    /// The time that a CPU has copied into stores and out of them.
    Made(Seconds),
    /// The time that a device which copies while it computes has waited for copies.
    WaitedFor(Seconds),
}

impl CopyCost {
    pub fn seconds(self) -> f64 {
        let (Self::Made(Seconds(seconds)) | Self::WaitedFor(Seconds(seconds))) = self;
        seconds
    }

    /// What its share of a step is called in tables, and how its keys begin.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Made(_) => ("in stores", "store_copy"),
            Self::WaitedFor(_) => ("for copies", "copy_wait"),
        }
    }
}

impl StepRecord {
    /// The figures that a summary is made of, by their keys.
    pub fn figures(&self) -> Vec<(String, f64)> {
        let of = |name: &str, spent: Spent| {
            [(format!("{name}_seconds"), spent.seconds), (format!("{name}_cpu_seconds"), spent.cpu_seconds)]
        };
        let mut figures: Vec<_> =
            StepPart::ALL.into_iter().zip(self.parts).flat_map(|(part, spent)| of(part.name(), spent)).collect();
        figures.extend(of("step", self.whole));
        let (rate, gemm) = (GemmRate::of(self.flops.total(), self.whole), self.gemm);
        let mut add = |key: &str, value| figures.push((key.to_owned(), value));
        add("tokens_per_second", self.tokens as f64 / self.whole.seconds);
        add("flops_per_second", rate.per_second);
        add("flops_per_cpu_second", rate.per_cpu_second);
        add("gemm_square_flops_per_second", gemm.per_second);
        add("gemm_square_flops_per_cpu_second", gemm.per_cpu_second);
        add("gemm_share", rate.per_second / gemm.per_second);
        add("gemm_cpu_share", rate.per_cpu_second / gemm.per_cpu_second);
        let key = self.copies.names().1;
        add(&format!("{key}_seconds"), self.copies.seconds());
        add(&format!("{key}_share"), self.copies.seconds() / self.whole.seconds);
        self.idle.into_iter().for_each(|idle| add("idle", idle));
        self.peak.into_iter().for_each(|peak| add("peak_resident_bytes", peak.0 as f64));
        self.device_peak.into_iter().for_each(|peak| add("peak_device_bytes", peak.0 as f64));
        figures
    }

    pub fn to_json(&self) -> Value {
        let mut line = json!({
            "kind": "step", "step": self.step, "is_warm_up": self.is_warm_up, "tokens": self.tokens, "tokens_run": self.tokens_run, "loss": self.loss,
            "flops": self.flops.total(), "flops_linear": self.flops.linear, "flops_attention": self.flops.attention,
            "flops_head": self.flops.head, "peak_is_of_step": self.peak_is_of_step,
        });
        self.figures().into_iter().for_each(|(key, value)| line[key] = json!(value));
        line
    }
}

/// Where the values of a figure lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Self { median: f64::midpoint(low, high), min: values[0], max: values[values.len() - 1] }
    }
}

/// Figures of all steps that count, by the keys of their lines.
#[derive(Clone, Debug)]
pub struct BenchSummary {
    pub steps: usize,
    figures: Vec<(String, Spread)>,
}

/// The summary of the steps that are no warm-up; `None` if there are none.
pub fn summarise(records: &[StepRecord]) -> Option<BenchSummary> {
    let counted: Vec<_> = records.iter().filter(|record| !record.is_warm_up).map(StepRecord::figures).collect();
    let first = counted.first()?;
    let spread = |key: &str| {
        let values = counted.iter().flatten().filter(|(k, _)| k == key).map(|(_, value)| *value).collect();
        (key.to_owned(), Spread::of(values))
    };
    Some(BenchSummary { steps: counted.len(), figures: first.iter().map(|(key, _)| spread(key)).collect() })
}

impl BenchSummary {
    pub fn get(&self, key: &str) -> Option<Spread> {
        self.figures.iter().find(|(k, _)| k == key).map(|(_, spread)| *spread)
    }

    pub fn to_json(&self) -> Value {
        let mut line = json!({ "kind": "summary", "steps": self.steps });
        self.figures.iter().for_each(|(key, spread)| line[key] = json!(spread));
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_a_middle() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(vec![3.0, 1.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
    }
}
