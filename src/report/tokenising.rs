//! How far the tokenising of data is: a line that changes on a terminal, now and then one in a log.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::console;

/// Between lines in a log, the first one included: what takes less says nothing.
const INTERVAL: Duration = Duration::from_secs(20);

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
        if std::io::stderr().is_terminal() && !console::is_quiet() {
            let style =
                || ProgressStyle::with_template("{spinner} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
            self.bar.get_or_insert_with(|| ProgressBar::new_spinner().with_style(style())).set_message(words);
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
