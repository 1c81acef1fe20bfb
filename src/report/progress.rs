//! Where a run is: a bar on a terminal, one line per step in a log.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::console;
use super::metrics::StepMetrics;
use crate::units::{Bytes, Seconds};

/// The progress of a run on standard error.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    interval: u64,
    began: Instant,
    done_before: u64,
    last: String,
}

impl Progress {
    /// A run of `total` steps of which `done` are behind it; a log line every `interval` steps.
    pub fn new(total: u64, done: u64, interval: u64) -> Self {
        let bar = (std::io::stderr().is_terminal() && !console::is_quiet()).then(|| {
            let bar = ProgressBar::new(total);
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} · {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_position(done);
            bar
        });
        Self { bar, total, interval: interval.max(1), began: Instant::now(), done_before: done, last: String::new() }
    }

    /// Where the current step is: phase, row, cell.
    pub fn inside(&self, place: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{place} · {}", self.last));
        }
    }

    /// A step is done.
    pub fn stepped(&mut self, m: &StepMetrics) {
        let made = m.step.saturating_sub(self.done_before).max(1);
        let left = self.began.elapsed().as_secs_f64() / made as f64 * self.total.saturating_sub(m.step) as f64;
        self.last = describe(m, Seconds(left));
        match &self.bar {
            Some(bar) => {
                bar.set_position(m.step);
                bar.set_message(self.last.clone());
            }
            None if m.step.is_multiple_of(self.interval) || m.step == self.total || m.eval_loss.is_some() => {
                console::note(&format!("step {}/{} · {}", m.step, self.total, self.last));
            }
            None => {}
        }
    }

    /// Something to look at.
    pub fn warning(&self, text: &str) {
        self.note(&format!("warning: {text}"));
    }

    /// Something worth a line of its own.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| console::note(text)),
            None => console::note(text),
        }
    }
}

fn describe(m: &StepMetrics, left: Seconds) -> String {
    let mut parts = Vec::new();
    let mut add = |name: &str, value: Option<String>| parts.extend(value.map(|v| format!("{name}{v}")));
    add("left out: ", m.skipped.clone());
    add("loss ", m.loss.map(|v| format!("{v:.4}")));
    add("eval loss ", m.eval_loss.map(|v| format!("{v:.4}")));
    for (metric, mean) in &m.eval_answers {
        add(metric, Some(format!(" {mean:.4}")));
    }
    add("lr ", m.learning_rate.map(|v| format!("{v:.2e}")));
    add("|g| ", m.grad_norm.map(|v| format!("{v:.3}")));
    add("", m.loss.map(|_| format!("{:.0} tok/s", m.tokens_per_second)));
    add("idle ", m.idle.map(|v| format!("{:.0} %", 100.0 * v)));
    add("peak ", Some(Bytes(m.peak_memory).to_string()));
    add("left ", m.loss.map(|_| left.to_string()));
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_a_person_wants_to_know() {
        let m = StepMetrics {
            step: 3,
            loss: Some(1.25),
            learning_rate: Some(2e-4),
            grad_norm: Some(0.5),
            tokens_per_second: 1234.0,
            peak_memory: 1 << 30,
            ..StepMetrics::default()
        };
        let expected = "loss 1.2500 · lr 2.00e-4 · |g| 0.500 · 1234 tok/s · peak 1.0 GiB · left 2 m 05 s";
        assert_eq!(describe(&m, Seconds(125.0)), expected);
    }
}
