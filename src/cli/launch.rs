//! `kvtune launch`: several ranks on this machine, each a process of this binary.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use clap::Args;
use rand::TryRng;
use rand::rngs::SysRng;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::options::SharedOptions;
use super::world::{alone, launched};
use crate::native::usable_cpus;
use crate::report::console;
use crate::units::{Exit, Fault};

/// Tells a rank which process has started it, and is to take it along when it ends.
const LAUNCHER: &str = "KVTUNE_LAUNCHER";

const PASSED_ON: [(i32, Signal); 4] =
    [(SIGINT, Signal::INT), (SIGTERM, Signal::TERM), (SIGUSR1, Signal::USR1), (SIGHUP, Signal::TERM)];

/// How often the ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How long the others may take to see by themselves that a rank is gone, and to end when they are told to.
const GRACE: Duration = Duration::from_secs(3);
const LAST_GRACE: Duration = Duration::from_secs(10);
/// A line that is longer is shown in parts.
const MAX_LINE: u64 = 1 << 20;

/// Start several ranks of a command on this machine, as torchrun does.
#[derive(Debug, Args)]
pub(super) struct LaunchRanks {
    /// The number of ranks to start.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    nproc: u16,
    /// What each of them does: a command of kvtune with its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Ends this process with the one that has launched it, if one has.
pub(super) fn follow_launcher() {
    let Some(launcher) = std::env::var(LAUNCHER).ok().and_then(|pid| pid.parse::<i32>().ok()) else { return };
    let parent = || getppid().map(Pid::as_raw_nonzero).map(i32::from);
    // What this process starts in turn has no such variable's meaning: the parent is another one there.
    if parent() == Some(launcher) {
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        // It may have ended in between.
        if parent() != Some(launcher) {
            signal_hook::low_level::exit(1);
        }
    } else if parent() == Some(1) && launcher != 1 {
        signal_hook::low_level::exit(1);
    }
}

/// The commands whose work ranks share: those that say how ranks meet.
fn shared(parser: &clap::Command) -> Vec<&str> {
    let joins = |verb: &&clap::Command| verb.get_arguments().any(|argument| argument.get_id() == "dist_timeout");
    parser.get_subcommands().filter(joins).map(clap::Command::get_name).collect()
}

/// Whether several ranks may begin a command: they share its work, or it starts others.
pub(super) fn is_for_ranks(verb: &str, parser: &clap::Command) -> bool {
    verb == "launch" || shared(parser).contains(&verb)
}

impl LaunchRanks {
    /// Starts them, with `options` before the command, whose own win, and waits; returns the exit code of the first that failed.
    pub(super) fn run(&self, options: &SharedOptions, parser: fn() -> clap::Command) -> Result<i32, Fault> {
        let command = [options.words(), self.command.clone()].concat();
        check(&command, &parser())?;
        let mut signals = Signals::new(PASSED_ON.map(|(number, _)| number)).map_err(|error| {
            Fault::new(Exit::Memory, format!("can't watch for signals: {error}")).with_hint("look at the limits of this process")
        })?;
        let mut ranks = Ranks { processes: Vec::new(), readers: Vec::new() };
        let port = free_port()?;
        let random = SysRng.try_next_u64().map_err(|error| unstarted(0, &error.into()))?;
        let run_id = format!("{random:016x}");
        for rank in 0..self.nproc {
            ranks.start(&mut self.process_of(&command, rank, port, &run_id)?)?;
        }
        Ok(ranks.supervise(&mut signals))
    }

    fn process_of(&self, words: &[String], rank: u16, port: u16, run_id: &str) -> Result<Command, Fault> {
        let binary = std::env::current_exe().map_err(|error| unstarted(rank, &error))?;
        let mut command = Command::new(binary);
        command.args(words);
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", self.nproc), ("LOCAL_WORLD_SIZE", self.nproc)]
        {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string()).env("TORCHELASTIC_RUN_ID", run_id);
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE").env_remove("TORCHELASTIC_RESTART_COUNT");
        command.env(LAUNCHER, std::process::id().to_string());
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", (usable_cpus() / usize::from(self.nproc)).max(1).to_string());
        }
        // A group of its own: a Ctrl-C of the terminal comes once, from here.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }
}

/// Refuses what would fail on every rank alike, or start ranks of ranks.
fn check(command: &[String], parser: &clap::Command) -> Result<(), Fault> {
    let usage = |message: String, hint: &str| Err(Fault::usage(message, hint));
    if let Some(message) = refused_by_all(command, parser) {
        return usage(message, &format!("ranks share `{}`; start other commands without `launch`", shared(parser).join("`, `")));
    }
    match launched()? {
        Some(launch) if launch.size > 1 => usage(
            format!("this process is rank {} of {} already, started by {}", launch.rank, launch.size, launch.by),
            "start the command itself there, without `launch`; or unset these variables",
        ),
        _ => Ok(()),
    }
}

/// Why each of several ranks would refuse a command.
fn refused_by_all(words: &[String], parser: &clap::Command) -> Option<String> {
    match parser.clone().try_get_matches_from(std::iter::once("kvtune").chain(words.iter().map(String::as_str))) {
        Ok(matches) => match matches.subcommand_name() {
            Some("launch") => Some("a launched rank can't launch ranks".to_owned()),
            verb => verb.filter(|verb| !is_for_ranks(verb, parser)).map(alone),
        },
        Err(error) if error.use_stderr() => {
            // What is missing stands on lines of its own, up to an empty one.
            let text = error.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            Some(lines.join(" ").trim_start_matches("error: ").to_owned())
        }
        Err(_) => None,
    }
}

fn free_port() -> Result<u16, Fault> {
    let found = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    found.map(|at| at.port()).map_err(|error| {
        Fault::new(Exit::Memory, format!("no port of 127.0.0.1 can be had: {error}"))
            .with_hint("the ranks meet at one: see whether the loopback interface is up")
    })
}

fn unstarted(rank: u16, error: &std::io::Error) -> Fault {
    Fault::new(Exit::Memory, format!("rank {rank} can't be started: {error}"))
        .with_hint("start fewer ranks, or raise the limits of processes and memory")
}

/// The processes that were started; whatever happens here, none of them stays.
struct Ranks {
    processes: Vec<Child>,
    readers: Vec<JoinHandle<()>>,
}

impl Ranks {
    fn start(&mut self, command: &mut Command) -> Result<(), Fault> {
        let rank = self.processes.len();
        let mut process = command.spawn().map_err(|error| unstarted(rank as u16, &error))?;
        let (out, err) = (process.stdout.take(), process.stderr.take());
        self.processes.push(process);
        if let Some(out) = out {
            self.show(rank, out, |line| drop(console::result(line)))?;
        }
        if let Some(err) = err {
            self.show(rank, err, console::say)?;
        }
        Ok(())
    }

    fn show(&mut self, rank: usize, stream: impl Read + Send + 'static, show: fn(&str)) -> Result<(), Fault> {
        let reader = thread::Builder::new().name("lines of a rank".to_owned());
        let reader = reader.spawn(move || pass_on(rank, stream, show)).map_err(|error| unstarted(rank as u16, &error))?;
        self.readers.push(reader);
        Ok(())
    }

    /// Waits until all have ended; returns the exit code of the first that failed.
    fn supervise(mut self, signals: &mut Signals) -> i32 {
        let mut ended: Vec<Option<ExitStatus>> = vec![None; self.processes.len()];
        let mut first: Option<(usize, ExitStatus, Instant)> = None;
        let (mut told, mut was_asked) = (false, false);
        while ended.iter().any(Option::is_none) {
            for (rank, process) in self.processes.iter_mut().enumerate() {
                if ended[rank].is_some() {
                    continue;
                }
                // A status that can't be had is that of a process that is gone.
                ended[rank] = process.try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(1 << 8)));
                if let Some(status) = ended[rank].filter(|status| !status.success() && first.is_none()) {
                    first = Some((rank, status, Instant::now()));
                }
            }
            for (_, signal) in signals.pending().filter_map(|came| PASSED_ON.iter().find(|(number, _)| *number == came)) {
                was_asked |= *signal != Signal::USR1;
                self.send(&ended, *signal);
            }
            if let Some((_, _, since)) = first {
                if since.elapsed() >= GRACE && !told {
                    told = true;
                    self.send(&ended, Signal::TERM);
                } else if since.elapsed() >= GRACE + LAST_GRACE {
                    self.send(&ended, Signal::KILL);
                }
            }
            sleep(LOOK);
        }
        self.readers.drain(..).for_each(|reader| drop(reader.join()));
        let Some((rank, status, _)) = first else { return 0 };
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        if !was_asked {
            let how = status.signal().map_or_else(|| format!("exit code {code}"), |signal| format!("signal {signal}"));
            console::say(&format!("error: rank {rank} was the first to fail, with {how}; its lines begin with `[rank {rank}]`"));
        }
        code
    }

    fn send(&self, ended: &[Option<ExitStatus>], signal: Signal) {
        for (process, _) in self.processes.iter().zip(ended).filter(|(_, ended)| ended.is_none()) {
            // It was not waited for, so its number is still its own.
            let _ = kill_process(Pid::from_child(process), signal);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Shows the lines of a rank with its number in front; results in JSON are for programs, and stay as they are.
fn pass_on(rank: usize, stream: impl Read, show: fn(&str)) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
            Ok(count) if count > 0 => {
                let text = String::from_utf8_lossy(&line);
                let text = text.trim_end();
                let is_json = serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object() || value.is_array());
                show(&if is_json { text.to_owned() } else { format!("[rank {rank}] {text}") });
            }
            _ => return,
        }
    }
}
