//! The one door to the terminal: results on standard output, everything else on standard error.

use std::collections::BTreeSet;
use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use serde_json::Value;

use super::table::Table;
use crate::native::{locked, terminal_width};
use crate::units::{Bytes, Exit, Fault, printable};

/// Whether nothing is said but errors.
static MUTE: AtomicBool = AtomicBool::new(false);

static SPEECH: OnceLock<Speech> = OnceLock::new();

#[derive(Clone, Copy, Debug, Default)]
pub struct Speech {
    /// Results, warnings and errors only.
    pub is_quiet: bool,
    /// Every step, whatever `log.interval` is, and every note as often as it comes.
    pub is_verbose: bool,
    /// Results as JSON, an object a line.
    pub is_json: bool,
}

/// From now on speaks so; once a process.
pub fn speak(speech: Speech) {
    let _ = SPEECH.set(speech);
}

pub fn speech() -> Speech {
    SPEECH.get().copied().unwrap_or_default()
}

/// From now on says nothing but errors: of several processes that do the same one speaks for all.
pub fn be_quiet() {
    MUTE.store(true, Ordering::Relaxed);
}

pub fn is_quiet() -> bool {
    MUTE.load(Ordering::Relaxed) || speech().is_quiet
}

/// A result, which may be piped on. It matters: one that can't be written is an error, unless the reader has seen enough.
pub fn result(text: &str) -> Result<(), Fault> {
    if MUTE.load(Ordering::Relaxed) { Ok(()) } else { part(&format!("{text}\n")) }
}

/// A result in words, or as JSON where that is asked for.
pub fn outcome(text: &str, json: &Value) -> Result<(), Fault> {
    if speech().is_json { result(&json.to_string()) } else { result(text) }
}

/// A table, which fits a terminal, or as JSON where that is asked for.
pub fn table(table: &Table) -> Result<(), Fault> {
    outcome(&fitted(table), &table.to_json())
}

/// A table as text that fits the terminal, where results go to one.
pub fn fitted(table: &Table) -> String {
    table.fitted(terminal_width(&io::stdout()))
}

/// A part of a result that comes bit by bit.
pub fn part(text: &str) -> Result<(), Fault> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Fault::new(Exit::Failed, "cannot write to standard output")
                .caused_by(error)
                .with_hint("look at where the output goes, as that disk may be full, and ask again"))
        }
        _ => Ok(()),
    }
}

pub fn note(text: &str) {
    if !is_quiet() {
        say(text);
    }
}

/// A remark that is made once, however often there is a reason for it.
pub fn note_once(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let is_new = locked(&SAID).insert(text.to_owned());
    if is_new || speech().is_verbose {
        note(text);
    }
}

pub fn warning(text: &str) {
    if !MUTE.load(Ordering::Relaxed) {
        say(&format!("warning: {text}"));
    }
}

/// An error with its chain of causes and its hint.
pub fn error(error: &Fault) {
    let mut lines = vec![format!("error: {error}")];
    let mut cause = error.source();
    while let Some(inner) = cause {
        lines.push(format!("cause: {inner}"));
        cause = inner.source();
    }
    lines.extend(error.hint().map(|hint| format!("\nhint: {hint}")));
    say(&lines.join("\n"));
}

pub fn has_colour(stream: &impl IsTerminal) -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_refused && std::env::var_os("TERM").is_none_or(|name| name != "dumb")
}

/// A line that is never left out, or of another process, which has left out what it should. A run goes on where nobody can read it.
pub fn say(text: &str) {
    let mut text = printable(text);
    if has_colour(&io::stderr()) {
        text = coloured(&text);
    }
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The words at the beginning of a message as clap shows its own.
fn coloured(text: &str) -> String {
    const STYLES: [(&str, &str); 4] = [("error:", "1;31"), ("warning:", "1;33"), ("cause:", "1"), ("hint:", "32")];
    let line = |line: &str| match STYLES.iter().find(|(word, _)| line.starts_with(word)) {
        Some((word, style)) => format!("\x1b[{style}m{word}\x1b[0m{}", &line[word.len()..]),
        None => line.to_owned(),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

pub fn planned_and_measured(planned: Bytes, measured: Bytes) -> String {
    let error = 100.0 * (planned.0 as f64 / measured.0.max(1) as f64 - 1.0);
    format!("peak memory of the process: planned {planned}, measured {measured} ({error:+.1} %)")
}

pub fn not_pinned(why: &str) -> String {
    format!("memory of the host is not pinned, so that copies to and from the device keep it waiting: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_of_a_message_has_clap_s_colour() {
        let expected = "\x1b[1;31merror:\x1b[0m `a` is no b\n\x1b[1mcause:\x1b[0m c\n\n\x1b[32mhint:\x1b[0m d: error: e";
        assert_eq!(coloured("error: `a` is no b\ncause: c\n\nhint: d: error: e"), expected);
        assert_eq!(coloured("an error: x"), "an error: x");
    }
}
