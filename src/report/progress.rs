//! Where a run is, and how far the tokenising of its data: a line on a terminal that changes, and lines above it or in a log.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::console;
use super::metrics::StepMetrics;
use crate::native::terminal_width;
use crate::units::{Bytes, Seconds};

/// Below so many columns a line has no words that can be spared.
const NARROW: usize = 60;

/// Between lines in a log, the first one included: what takes less says nothing.
const INTERVAL: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    interval: u64,
    began: Instant,
    done_before: u64,
    last: Option<(StepMetrics, Seconds)>,
}

impl Progress {
    /// A run of `total` steps of which `done` are behind it; a log line every `interval` steps.
    pub fn new(total: u64, done: u64, interval: u64) -> Self {
        let bar = (terminal_width(&io::stderr()).is_some() && !console::is_quiet()).then(|| spinner("{wide_msg}"));
        let interval = if console::speech().is_verbose { 1 } else { interval.max(1) };
        Self { bar, total, interval, began: Instant::now(), done_before: done, last: None }
    }

    /// Where the current step is: phase, row, cell.
    pub fn inside(&self, place: &str) {
        if let Some(bar) = &self.bar {
            let width = terminal_width(&io::stderr()).unwrap_or(NARROW);
            let steps = format!("{}/{}", self.last.as_ref().map_or(self.done_before, |(m, _)| m.step), self.total);
            let figures =
                self.last.as_ref().map(|(m, left)| if width < NARROW { briefly(m, *left) } else { described(m, *left) });
            bar.set_message(fitted([steps].into_iter().chain(figures.into_iter().flatten()).collect(), place, width));
        }
    }

    pub fn stepped(&mut self, m: &StepMetrics) {
        let made = m.step.saturating_sub(self.done_before).max(1);
        let left = self.began.elapsed().as_secs_f64() / made as f64 * self.total.saturating_sub(m.step) as f64;
        if m.step.is_multiple_of(self.interval) || m.step == self.total || m.eval_loss.is_some() {
            self.note(&format!("step {}/{} · {}", m.step, self.total, described(m, Seconds(left)).join(" · ")));
        }
        self.last = Some((m.clone(), Seconds(left)));
        self.inside("");
    }

    pub fn warning(&self, text: &str) {
        self.above(|| console::warning(text));
    }

    pub fn note(&self, text: &str) {
        self.above(|| console::note(text));
    }

    /// Says something while the line that changes is away.
    pub fn above<T>(&self, say: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }
}

fn spinner(template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner());
    ProgressBar::new_spinner().with_style(style)
}

/// A line of so many columns: what does not fit is left out from the end, the place of the step before its last figure but three.
fn fitted(mut parts: Vec<String>, place: &str, width: usize) -> String {
    // Step, loss, speed and time left.
    const FIRST: usize = 4;
    let separator = if width < NARROW { " " } else { " · " };
    parts.extend(Some(place.to_owned()).filter(|place| !place.is_empty()));
    loop {
        let line = parts.join(separator);
        if line.chars().count() <= width || parts.len() < 2 {
            return line;
        }
        let is_figure_left = !place.is_empty() && parts.len() > FIRST + 1;
        parts.remove(parts.len() - if is_figure_left { 2 } else { 1 });
    }
}

/// The first figures of a step, without their names.
fn briefly(m: &StepMetrics, left: Seconds) -> Vec<String> {
    let Some(loss) = m.loss else { return m.skipped.iter().map(|_| "left out".to_owned()).collect() };
    vec![format!("loss {loss:.3}"), format!("{:.0}/s", m.tokens_per_second), left.to_string()]
}

/// The figures of a step, what matters most first.
fn described(m: &StepMetrics, left: Seconds) -> Vec<String> {
    let mut parts = Vec::new();
    let mut add = |name: &str, value: Option<String>| parts.extend(value.map(|v| format!("{name}{v}")));
    add("left out: ", m.skipped.clone());
    add("loss ", m.loss.map(|v| format!("{v:.4}")));
    add("", m.loss.map(|_| format!("{:.0} tok/s", m.tokens_per_second)));
    add("ETA ", m.loss.map(|_| left.to_string()));
    add("eval loss ", m.eval_loss.map(|v| format!("{v:.4}")));
    for (metric, mean) in &m.eval_answers {
        add(metric, Some(format!(" {mean:.4}")));
    }
    add("evicted ", m.evicted.map(|v| format!("{:.0} %", 100.0 * v)));
    add("lr ", m.learning_rate.map(|v| format!("{v:.2e}")));
    add("|g| ", m.grad_norm.map(|v| format!("{v:.3}")));
    add("idle ", m.idle.map(|v| format!("{:.0} %", 100.0 * v)));
    add("peak ", Some(Bytes(m.peak_memory).to_string()));
    parts
}

/// The progress of tokenising on standard error. It says nothing before it is told something.
#[derive(Debug)]
pub struct Tokenising {
    bar: Option<ProgressBar>,
    began: Instant,
    said: Instant,
}

impl Tokenising {
    pub fn begin() -> Self {
        Self { bar: None, began: Instant::now(), said: Instant::now() }
    }

    /// So many samples of a file are done, of so many tokens.
    pub fn at(&mut self, path: &Path, samples: usize, tokens: usize) {
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let (tokens, rate) = (tokens as f64 / 1e6, tokens as f64 / 1e6 / seconds);
        let words = format!("tokenising `{}`: {samples} samples, {tokens:.1} M tokens, {rate:.2} M a second", path.display());
        if io::stderr().is_terminal() && !console::is_quiet() {
            self.bar.get_or_insert_with(|| spinner("{spinner} {wide_msg}")).set_message(words);
        } else if self.said.elapsed() >= INTERVAL {
            self.said = Instant::now();
            console::note(&words);
        }
    }
}

impl Drop for Tokenising {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepMetrics {
        StepMetrics {
            step: 1003,
            loss: Some(1.25),
            learning_rate: Some(2e-4),
            grad_norm: Some(0.5),
            evicted: Some(0.345),
            tokens_per_second: 123_456.0,
            peak_memory: 1 << 30,
            ..StepMetrics::default()
        }
    }

    #[test]
    fn a_line_says_what_a_person_wants_to_know_first() {
        let expected = "loss 1.2500 · 123456 tok/s · ETA 2 m 05 s · evicted 34 % · lr 2.00e-4 · |g| 0.500 · peak 1.0 GiB";
        assert_eq!(described(&step(), Seconds(125.0)).join(" · "), expected);
    }

    #[test]
    fn a_line_fits_its_terminal() {
        let line = |width| {
            let figures = if width < NARROW { briefly(&step(), Seconds(3720.0)) } else { described(&step(), Seconds(3720.0)) };
            fitted(["1003/2000".to_owned()].into_iter().chain(figures).collect(), "forward, column 3 of 9", width)
        };
        assert_eq!(line(40), "1003/2000 loss 1.250 123456/s 1 h 02 m");
        assert_eq!(line(80), "1003/2000 · loss 1.2500 · 123456 tok/s · ETA 1 h 02 m · forward, column 3 of 9");
        let whole = line(200);
        assert!(whole.contains(" · peak 1.0 GiB · forward, column 3 of 9"), "{whole}");
        assert!((10..200).all(|width| line(width).chars().count() <= width && line(width).starts_with("1003/2000")));
    }
}
