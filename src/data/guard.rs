//! A crafted file must not end the program: a panic inside its parser becomes a message, and what a few bytes can ask for is bounded.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::native::{Bounds, panic_text, within};
use crate::units::abridged;

/// What work on a foreign file may take: so much at first, and so much for each byte that it is given.
#[derive(Clone, Debug)]
pub(super) struct WorkLimits {
    subject: Arc<str>,
    bytes_per_byte: usize,
    micros_per_byte: f64,
}

/// What work may take that is given next to nothing.
const BASE_MEMORY: usize = 192 << 20;
const BASE_TIME: Duration = Duration::from_secs(5);

impl WorkLimits {
    /// For work on a file, called as messages call it: `` tokenizer `a/tokenizer.json` ``.
    pub(super) fn of(what: &str, path: &Path, bytes_per_byte: usize, micros_per_byte: f64) -> Self {
        let subject = format!("{what} `{}`", abridged(path.display())).into();
        Self { subject, bytes_per_byte, micros_per_byte }
    }

    /// Runs `work`, which was given so many bytes; an error or a panic in it becomes its message. Beyond its bounds the process ends.
    pub(super) fn guarded<T, E: std::fmt::Display>(
        &self,
        given: usize,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, String> {
        let bounds = Bounds {
            subject: Arc::clone(&self.subject),
            bytes: BASE_MEMORY.saturating_add(given.saturating_mul(self.bytes_per_byte)),
            time: BASE_TIME + Duration::from_micros((given as f64 * self.micros_per_byte) as u64),
        };
        within(&bounds, || guarded(work))
    }
}

pub(super) fn guarded<T, E: std::fmt::Display>(work: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("its reader broke down ({})", panic_text(&*panic).unwrap_or("no message"))),
    }
}
