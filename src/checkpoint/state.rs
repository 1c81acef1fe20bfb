//! What a run knows of itself at a step, beside its tensors.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::native;

pub(super) const FORMAT_VERSION: u32 = 1;

pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
pub(super) const STATE: &str = "state.json";

pub(super) const BEST: &str = "best";
/// Directory of the last checkpoint of a run.
pub const FINAL: &str = "final";

/// More steps or tokens than any run has: what JSON's readers take for whole numbers.
const MAX_COUNT: u64 = 1 << 53;

pub(super) fn step_directory(step: u64) -> String {
    format!("step-{step:06}")
}

/// Why a checkpoint was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveKind {
    /// At the save interval: stays.
    #[default]
    Regular,
    /// At the interval of intermediate saves: only the last few stay.
    Intermediate,
    Best,
    /// The end of the run: what others load, without the optimiser's tensors.
    Final,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub metric: String,
    pub value: f64,
    pub step: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    pub train: usize,
    pub validation: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterInfo {
    pub name: String,
    pub shape: Vec<i64>,
    pub dtype: String,
}

/// `state.json`. The order of the data and all randomness are functions of the seed and the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    pub format_version: u32,
    pub step: u64,
    pub total_tokens: u64,
    pub seed: u64,
    pub kind: SaveKind,
    pub best: Option<Best>,
    /// Hash of the model directory.
    pub model_hash: String,
    /// Hash of the training file's content: the data position is one in this file.
    pub data_hash: String,
    /// Hash of the content of the file that the validation samples come from.
    pub validation_hash: Option<String>,
    /// The samples of the run; earlier versions did not say.
    #[serde(default)]
    pub samples: Option<SampleCounts>,
    /// Steps, counted from 1, that were left out as they came to nothing finite.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub skipped_steps: BTreeSet<u64>,
    /// Whether the validation after this step was given up, and is still to be made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub owes_validation: bool,
    /// Threads that computed: with another number sums have another order. Earlier versions did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<i32>,
    /// Lines of metrics at the beginning that an earlier version wrote; earlier versions did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unchecked_metrics: Option<u64>,
    /// The settings that may not change during a run, in TOML by dotted key. Earlier versions did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<BTreeMap<String, String>>,
    pub parameters: Vec<ParameterInfo>,
    pub kvtune_version: String,
    pub libtorch_version: String,
}

impl TrainState {
    pub fn new(step: u64, seed: u64, kind: SaveKind, parameters: &[(String, Tensor)]) -> Self {
        let info = |(name, t): &(String, Tensor)| ParameterInfo {
            name: name.clone(),
            shape: t.size(),
            dtype: format!("{:?}", t.kind()).to_lowercase(),
        };
        Self {
            format_version: FORMAT_VERSION,
            step,
            seed,
            kind,
            parameters: parameters.iter().map(info).collect(),
            kvtune_version: env!("CARGO_PKG_VERSION").to_owned(),
            libtorch_version: native::libtorch_version(),
            ..Self::default()
        }
    }

    /// What in it can't be, in a directory of this name.
    pub(super) fn contradiction(&self, name: &str) -> Option<String> {
        let is_other = |kind| self.kind != kind;
        let of_step = name.strip_prefix("step-").and_then(|digits| digits.parse::<u64>().ok());
        let wrong_kind = match name {
            BEST => is_other(SaveKind::Best),
            FINAL => is_other(SaveKind::Final),
            _ => of_step.is_some() && is_other(SaveKind::Regular) && is_other(SaveKind::Intermediate),
        };
        let most = [("step", self.step), ("total_tokens", self.total_tokens)].into_iter().find(|(_, value)| *value > MAX_COUNT);
        if let Some((key, value)) = most {
            return Some(format!("`{key}` is {value}, expected at most {MAX_COUNT}"));
        }
        if let Some(step) = of_step.filter(|step| *step != self.step) {
            return Some(format!("`step` is {}, and its directory's {step}", self.step));
        }
        if wrong_kind {
            return Some(format!("`kind` is {:?}, which belongs into another directory than `{name}`", self.kind).to_lowercase());
        }
        if let Some(best) = self.best.as_ref().filter(|best| best.step > self.step) {
            return Some(format!("`best.step` is {}, and `step` {}", best.step, self.step));
        }
        if let Some(threads) = self.threads.filter(|threads| *threads < 1) {
            return Some(format!("`threads` is {threads}, expected at least 1"));
        }
        None
    }

    pub(super) fn directory(&self) -> String {
        match self.kind {
            SaveKind::Regular | SaveKind::Intermediate => step_directory(self.step),
            SaveKind::Best => BEST.to_owned(),
            SaveKind::Final => FINAL.to_owned(),
        }
    }
}
