//! The one door to the terminal: results on standard output, everything else on standard error.

use std::error::Error;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use super::ReportError;
use crate::units::printable;

/// Whether nothing is said but errors.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on says nothing but errors: of several processes that do the same one speaks for all.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether nothing is said but errors.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// A result, which may be piped on. It matters: one that can't be written is an error, unless the reader has seen enough.
pub fn result(text: &str) -> Result<(), ReportError> {
    if is_quiet() {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(ReportError::Output { source }),
        _ => Ok(()),
    }
}

/// A part of a result that comes bit by bit.
pub fn part(text: &str) -> Result<(), ReportError> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(ReportError::Output { source }),
        _ => Ok(()),
    }
}

/// A remark.
pub fn note(text: &str) {
    if !is_quiet() {
        say(text);
    }
}

/// Something to look at.
pub fn warning(text: &str) {
    note(&format!("warning: {text}"));
}

/// An error with its chain of causes and its hint.
pub fn error(error: &dyn Error, hint: Option<&str>) {
    let mut lines = vec![format!("error: {error}")];
    let mut cause = error.source();
    while let Some(inner) = cause {
        lines.push(format!("cause: {inner}"));
        cause = inner.source();
    }
    lines.extend(hint.map(|hint| format!("\nhint: {hint}")));
    say(&lines.join("\n"));
}

/// A run goes on where nobody can read its remarks, so a failure is let pass.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", printable(text));
}
