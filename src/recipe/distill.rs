//! `head.distill`: how much of the loss is the divergence from what the model predicts without its adapter and with a full cache.

use serde::{Deserialize, Serialize};
use toml::Value;

use super::diagnose::Checked;
use super::tree::Document;
use super::value::{COUNT, KeyRule, RecipeValue, positive};

/// The loss `(1 − weight) · CE + weight · T² · KL`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DistillRecipe {
    pub weight: f64,
    /// What the logits of both are divided by, T.
    pub temperature: f64,
    /// Number of the likeliest tokens that are kept of each prediction; all others count as one.
    pub top_k: usize,
}

impl Default for DistillRecipe {
    fn default() -> Self {
        Self { weight: 0.5, temperature: 1.0, top_k: 64 }
    }
}

const WEIGHT: KeyRule = KeyRule {
    takes: "0 < number ≤ 1",
    expected: "more than 0 and at most 1",
    hint: "write the part of the loss that is distilled, as 0.5; without one, leave `head.distill` out",
    is_fine: |number| number > 0.0 && number <= 1.0,
};

const TEMPERATURE: KeyRule = positive("write 1 for the probabilities as they are, or 2 to weigh the unlikely ones more");

impl RecipeValue for DistillRecipe {
    fn takes(_: Option<&str>) -> String {
        let Self { weight, temperature, top_k } = Self::default();
        format!(
            "table: `weight`, {} (`{weight}`); `temperature`, number > 0 (`{temperature}`); `top_k`, {} (`{top_k}`)",
            WEIGHT.takes, COUNT.takes
        )
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        let name = |part: &str| format!("{key}.{part}");
        WEIGHT.check(document, &name("weight"), &Value::Float(self.weight))?;
        TEMPERATURE.check(document, &name("temperature"), &Value::Float(self.temperature))?;
        COUNT.check(document, &name("top_k"), &Value::Integer(self.top_k as i64))?;
        Ok(self)
    }
}
