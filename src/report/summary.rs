//! `summary.md`: a run on one page.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::metrics::Evicted;
use super::table::Table;
use crate::files::{self, FileKind};
use crate::units::{Bytes, Seconds};

pub const SUMMARY: &str = "summary.md";

/// Before the state, on the first line of the page.
const HEADING: &str = "# kvtune run: ";

/// How a run ended, as its page says; `None` where it has none.
pub fn state(run: &Path) -> Option<String> {
    let page = files::read_text(&run.join(SUMMARY), FileKind::Record).ok()?;
    page.lines().next()?.strip_prefix(HEADING).map(str::to_owned)
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunSummary {
    /// `finished`, or `interrupted after step 12`.
    pub state: String,
    pub steps: (u64, u64),
    pub tokens: u64,
    /// Tokens divided by the time of all steps.
    pub tokens_per_second: f64,
    /// Training loss of the first and of the last step.
    pub train_loss: Option<(f64, f64)>,
    /// Validation loss: first and last known.
    pub eval_loss: Option<(f64, f64)>,
    /// The last validation loss by data set, where there are several.
    pub eval_loss_by_set: BTreeMap<String, f64>,
    /// Best value of the watched metric, and its step.
    pub best: Option<(String, f64, u64)>,
    pub evicted: Evicted,
    pub seconds: f64,
    pub peak_memory: u64,
    pub planned_memory: u64,
    /// The memory of the heaviest steps by part, where it was watched.
    pub memory_by_part: Option<String>,
    /// What the model, the cache and the data were.
    pub setting: Vec<(String, String)>,
}

impl RunSummary {
    pub fn to_markdown(&self) -> String {
        let mut table = Table::new(&["figure", "value"]);
        let ends = |ends: Option<(f64, f64)>| ends.map(|(first, last)| format!("{first:.4} → {last:.4}"));
        table.row(&["steps", &format!("{} of {}", self.steps.0, self.steps.1)]);
        table.row(&["tokens", &self.tokens.to_string()]);
        table.figure("training loss, first and last step", ends(self.train_loss));
        table.figure("validation loss, first and last", ends(self.eval_loss));
        for (name, loss) in &self.eval_loss_by_set {
            table.row(&[&format!("validation loss of {name}, last"), &format!("{loss:.4}")]);
        }
        if let Some((metric, value, step)) = &self.best {
            table.row(&[&format!("best {metric}"), &format!("{value:.4} (step {step})")]);
        }
        table.figure("entries evicted in training", self.evicted.words());
        table.row(&["time of this start", &Seconds(self.seconds).to_string()]);
        table.row(&["peak memory", &Bytes(self.peak_memory).to_string()]);
        table.row(&["peak memory, as planned", &Bytes(self.planned_memory).to_string()]);
        self.setting.iter().for_each(|(name, value)| table.row(&[name, value]));
        let memory = self.memory_by_part.as_ref().map(|text| format!("\n## Memory by part\n\n{text}\n")).unwrap_or_default();
        format!("{HEADING}{}\n\n{table}\n{memory}", self.state)
    }

    pub fn words(&self) -> String {
        let mut parts = vec![format!("{} of {} steps in {}", self.steps.0, self.steps.1, Seconds(self.seconds))];
        let mut add = |name: &str, value: Option<String>| parts.extend(value.map(|value| format!("{name} {value}")));
        add("loss", self.train_loss.map(|(_, last)| format!("{last:.4}")));
        add("validation loss", self.eval_loss.map(|(_, last)| format!("{last:.4}")));
        add("best", self.best.as_ref().map(|(metric, value, step)| format!("{metric} {value:.4} at step {step}")));
        add("speed", Some(format!("{:.0} tok/s", self.tokens_per_second)));
        add("entries evicted", self.evicted.words());
        parts.join(" · ")
    }

    pub fn to_json(&self) -> Value {
        let best = self.best.as_ref().map(|(metric, value, step)| json!({ "metric": metric, "value": value, "step": step }));
        json!({
            "state": self.state, "step": self.steps.0, "num_steps": self.steps.1, "total_tokens": self.tokens,
            "loss": self.train_loss.map(|(_, last)| last), "eval_loss": self.eval_loss.map(|(_, last)| last), "best": best,
            "seconds": self.seconds, "tokens_per_second": self.tokens_per_second, "evicted": self.evicted.share(),
            "mean_stay": self.evicted.mean_stay(), "peak_memory": self.peak_memory,
        })
    }
}
