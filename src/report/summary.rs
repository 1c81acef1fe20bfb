//! `summary.md`: a run on one page.

use std::path::Path;

use super::ReportError;
use super::evicted::Evicted;
use super::table::Table;
use crate::files::{self, FileKind};
use crate::units::{Bytes, Seconds};

/// The file's name in a run.
pub const SUMMARY: &str = "summary.md";

/// Before the state, on the first line of the page.
const HEADING: &str = "# kvtune run: ";

/// How a run ended, as its page says; `None` where it has none.
pub fn state(run: &Path) -> Option<String> {
    let page = files::read_text(&run.join(SUMMARY), FileKind::Record).ok()?;
    page.lines().next()?.strip_prefix(HEADING).map(str::to_owned)
}

/// The figures of a finished or interrupted run.
#[derive(Clone, Debug, Default)]
pub struct RunSummary {
    /// `finished`, or `interrupted after step 12`.
    pub state: String,
    /// Steps made and planned.
    pub steps: (u64, u64),
    /// Tokens trained on.
    pub tokens: u64,
    /// Training loss of the first and of the last step.
    pub train_loss: Option<(f64, f64)>,
    /// Validation loss: first and last known.
    pub eval_loss: Option<(f64, f64)>,
    /// Best value of the watched metric, and its step.
    pub best: Option<(String, f64, u64)>,
    /// What the caches evicted.
    pub evicted: Evicted,
    /// Duration of this start.
    pub seconds: f64,
    /// Peak memory of the process.
    pub peak_memory: u64,
    /// The same as planned.
    pub planned_memory: u64,
    /// The memory of the heaviest steps by part, where it was watched.
    pub memory_by_part: Option<String>,
    /// What the model, the cache and the data were.
    pub setting: Vec<(String, String)>,
}

impl RunSummary {
    /// The page.
    pub fn to_markdown(&self) -> String {
        let mut table = Table::new(&["figure", "value"]);
        let mut add = |name: &str, value: String| table.row(&[name, &value]);
        add("steps", format!("{} of {}", self.steps.0, self.steps.1));
        add("tokens", self.tokens.to_string());
        if let Some((first, last)) = self.train_loss {
            add("training loss, first and last step", format!("{first:.4} → {last:.4}"));
        }
        if let Some((first, last)) = self.eval_loss {
            add("validation loss, first and last", format!("{first:.4} → {last:.4}"));
        }
        if let Some((metric, value, step)) = &self.best {
            add(&format!("best {metric}"), format!("{value:.4} (step {step})"));
        }
        if let Some(words) = self.evicted.words() {
            add("entries evicted in training", words);
        }
        add("time of this start", Seconds(self.seconds).to_string());
        add("peak memory", Bytes(self.peak_memory).to_string());
        add("peak memory, as planned", Bytes(self.planned_memory).to_string());
        for (name, value) in &self.setting {
            add(name, value.clone());
        }
        let memory = self.memory_by_part.as_ref().map(|text| format!("\n## Memory by part\n\n{text}\n")).unwrap_or_default();
        format!("{HEADING}{}\n\n{table}\n{memory}", self.state)
    }

    /// Writes the page.
    pub fn write(&self, path: &Path) -> Result<(), ReportError> {
        Ok(files::write_atomic(path, self.to_markdown().as_bytes())?)
    }
}
