//! An answer with its scores, and the means over several.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::SampleGroups;
use crate::metrics::{LongBenchV2, Metric};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoredAnswer {
    /// Index of the sample in its file, counted from 0.
    pub sample: u64,
    /// A hash of the prompt's token ids.
    pub prompt_hash: String,
    /// What was generated before the answer was asked for, where the question asks for thoughts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thoughts: Option<String>,
    pub prediction: String,
    pub references: Vec<String>,
    pub token_ids: Vec<u32>,
    /// Why the text ended, as other programs write it.
    pub finish_reason: String,
    /// Scores from 0 to 1, by metric.
    pub scores: BTreeMap<String, f64>,
    /// What the sample is reported under.
    #[serde(flatten)]
    pub groups: Option<SampleGroups>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AnswerScores {
    pub samples: usize,
    /// Scores from 0 to 1, by metric.
    pub means: BTreeMap<String, f64>,
    /// What `LongBench` v2 reports, where its metric is asked for and the data say what samples are reported under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longbench_v2: Option<LongBenchV2>,
}

impl AnswerScores {
    /// Sums up some answers with the same metrics.
    pub fn of(answers: &[ScoredAnswer]) -> Self {
        let mut means = BTreeMap::new();
        for (name, score) in answers.iter().flat_map(|answer| &answer.scores) {
            *means.entry(name.clone()).or_insert(0.0) += score;
        }
        for sum in means.values_mut() {
            *sum /= answers.len() as f64;
        }
        let mut longbench_v2 = None;
        for answer in answers {
            if let (Some(groups), Some(&credit)) = (&answer.groups, answer.scores.get(Metric::LongBenchV2.name())) {
                longbench_v2.get_or_insert_with(LongBenchV2::default).add_credit(groups.by(), credit);
            }
        }
        Self { samples: answers.len(), means, longbench_v2 }
    }
}
