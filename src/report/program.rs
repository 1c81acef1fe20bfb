//! A program that gets each line of metrics on its standard input as it is written. It may lag, fail or hang: the run goes on.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::console;

const WAITING: usize = 1024;

/// How long the end of a run waits for the program to read the rest and to end.
const LAST: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct MetricsProgram {
    /// Gone once the program gets no more lines.
    lines: Option<SyncSender<String>>,
    child: Child,
}

impl MetricsProgram {
    /// Starts a command of the shell; where that fails, it is a warning.
    pub fn start(command: &str) -> Option<Self> {
        let started = Self::spawn(command);
        started.map_err(|error| console::warning(&format!("`report.command` is not started: {error}; the run goes on"))).ok()
    }

    fn spawn(command: &str) -> io::Result<Self> {
        // What it prints is no result of ours. A Ctrl-C is for the run, whose last lines it still gets.
        let errors = io::stderr().as_fd().try_clone_to_owned()?;
        let shell = &mut Command::new("sh");
        let mut child = shell.args(["-c", command]).stdin(Stdio::piped()).stdout(errors).process_group(0).spawn()?;
        let (lines, waiting) = sync_channel::<String>(WAITING);
        let input = child.stdin.take();
        let program = Self { lines: Some(lines), child };
        thread::Builder::new().name("report.command".to_owned()).spawn(move || {
            input.and_then(|mut input| waiting.iter().try_for_each(|line| input.write_all(line.as_bytes())).ok());
        })?;
        Ok(program)
    }

    /// Hands over a line, without waiting.
    pub fn send(&mut self, line: &str) {
        let Some(lines) = &self.lines else { return };
        let problem = match lines.try_send(format!("{line}\n")) {
            Ok(()) => return,
            Err(TrySendError::Full(_)) => "has left more than 1024 lines unread",
            Err(TrySendError::Disconnected(_)) => "has closed its standard input or ended",
        };
        console::warning(&format!("the program of `report.command` {problem}: it gets no more lines, and the run goes on"));
        self.lines = None;
    }
}

impl Drop for MetricsProgram {
    fn drop(&mut self) {
        self.lines = None;
        let began = Instant::now();
        while began.elapsed() < LAST && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(20));
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            // It was not waited for, so its number is still its own.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_reads_every_line_and_one_that_does_not_read_holds_nothing_up() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lines");
        let mut program = MetricsProgram::start(&format!("cat > '{}'", file.display())).unwrap();
        (0..3).for_each(|line| program.send(&line.to_string()));
        drop(program);
        assert_eq!(std::fs::read_to_string(file).unwrap(), "0\n1\n2\n");

        let began = Instant::now();
        let mut deaf = MetricsProgram::start("exec sleep 600").unwrap();
        let long = "x".repeat(1000);
        (0..3 * WAITING).for_each(|_| deaf.send(&long));
        assert!(deaf.lines.is_none() && began.elapsed() < Duration::from_secs(3), "the queue is full, and nobody waits");
        drop(deaf);
        assert!(began.elapsed() < Duration::from_secs(60), "it is ended with the run");

        let mut gone = MetricsProgram::start("exit 3").unwrap();
        gone.child.wait().unwrap();
        while gone.lines.is_some() {
            gone.send("line");
        }
    }
}
