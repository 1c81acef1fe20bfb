//! The binary without its start: loading libtorch takes 0.17 s of a CPU, which is most of what a test of words takes. One process has loaded it
//! and waits (`starter.c`); what a test runs is a fork of it, which goes on in the binary's own `main`.
//!
//! A fork has its own arguments, variables, directory and output, no input, and the starter for a parent. Who needs more, or looks at the
//! start itself (signals, limits, libraries' variables), starts the binary.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;

use crate::binary::kvtune;

/// When a fork is given up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);

/// Says where the starter listens.
const VARIABLE: &str = "KVTUNE_STARTER";

/// A fork that may be running.
pub(crate) struct Fork {
    pid: i32,
    starter: UnixStream,
    has_ended: bool,
}

impl Drop for Fork {
    fn drop(&mut self) {
        if !self.has_ended {
            self.kill();
        }
    }
}

impl Fork {
    /// What `command` says of the binary, with its output in two files, and in so many bytes of addresses, if not 0.
    pub(crate) fn of(command: &Command, [out, err]: [&Path; 2], addresses: u64) -> Self {
        let dir = command.get_current_dir().unwrap_or(Path::new("."));
        let mut texts = Vec::new();
        let mut add = |text: &[&OsStr]| {
            texts.extend(text.iter().flat_map(|part| part.as_bytes()));
            texts.push(0);
        };
        for path in [out, err, dir] {
            add(&[path.as_os_str()]);
        }
        for argument in [command.get_program()].into_iter().chain(command.get_args()) {
            add(&[argument]);
        }
        let variables: Vec<_> = command.get_envs().filter_map(|(name, value)| Some((name, value?))).collect();
        for (name, value) in &variables {
            add(&[name, OsStr::new("="), value]);
        }
        let counts = [texts.len(), command.get_args().len() + 1, variables.len()].map(|count| (count as u64).to_ne_bytes());
        let request = [counts.as_flattened(), &addresses.to_ne_bytes(), &texts].concat();
        let mut starter = UnixStream::connect_addr(&address()).unwrap();
        starter.write_all(&request).unwrap();
        let pid = number(&mut starter).unwrap();
        assert!(pid > 0, "no fork");
        Self { pid, starter, has_ended: false }
    }

    pub(crate) fn id(&self) -> i32 {
        self.pid
    }

    /// Waits for its end, but no longer than so.
    pub(crate) fn wait(&mut self, most: Duration) -> Option<ExitStatus> {
        self.starter.set_read_timeout(Some(most)).unwrap();
        match number(&mut self.starter) {
            Ok(status) => {
                self.has_ended = true;
                Some(ExitStatus::from_raw(status))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("the starter is gone: {error}"),
        }
    }

    pub(crate) fn kill(&self) {
        kill(self.pid);
    }
}

/// Ends a process, which may have ended.
pub(crate) fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

/// Runs what `command` says of the binary to its end.
pub(crate) fn output(command: &Command) -> Output {
    let [out, err] = [(); 2].map(|()| NamedTempFile::new().unwrap());
    let mut fork = Fork::of(command, [out.path(), err.path()], 0);
    let Some(status) = fork.wait(PATIENCE) else {
        fork.kill();
        panic!("{command:?} does not end: {}", String::from_utf8_lossy(&fs::read(err.path()).unwrap()));
    };
    Output { status, stdout: fs::read(out.path()).unwrap(), stderr: fs::read(err.path()).unwrap() }
}

fn number(starter: &mut UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    starter.read_exact(&mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// Where the starter listens; no file is there.
fn address() -> SocketAddr {
    SocketAddr::from_abstract_name(name()).unwrap()
}

fn name() -> &'static str {
    static STARTER: OnceLock<(String, Child)> = OnceLock::new();
    let (name, _) = STARTER.get_or_init(|| {
        let name = format!("kvtune-starter-{}", process::id());
        let starter = started(&name);
        (name, starter)
    });
    name
}

/// A program in whose place a fork runs, for code that starts programs by itself.
pub(crate) fn in_place() -> PathBuf {
    name();
    compiled("in_place", &[])
}

/// The variable by which that program finds the starter where others stand between them.
pub(crate) fn variable() -> (&'static str, &'static str) {
    (VARIABLE, name())
}

fn compiled(name: &str, more: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/starter").join(name).with_extension("c");
    let made = NamedTempFile::new_in(folder).unwrap().into_temp_path();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-O1"]).args(more).arg("-o").arg(&made).arg(source);
    let compiled = command.output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    // At once, as other tests may be using the one before.
    let path = folder.join(name);
    made.persist(&path).unwrap();
    path
}

/// Ends with these tests, as its input is closed then.
fn started(name: &str) -> Child {
    let library = compiled("starter", &["-shared", "-fPIC"]);
    let mut command = kvtune();
    command.env("LD_PRELOAD", library).env(VARIABLE, name);
    let mut starter = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(starter.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    starter
}

/// Words and codes are those of a start, and so are the name, the limit and the end by a signal.
#[test]
fn a_fork_is_what_a_start_is() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("answers.jsonl"), "{\"prediction\": \"a b\", \"references\": [\"a\"]}\n").unwrap();
    let score = ["score", "answers.jsonl", "--metrics", "f1"];
    for arguments in [&["--version"][..], &score, &["score", "absent.jsonl", "--metrics", "f1"], &["verify", "--hlep"]] {
        let mut command = kvtune();
        command.args(arguments).current_dir(place.path());
        let (fork, start) = (output(&command), command.stdin(Stdio::null()).output().unwrap());
        assert_eq!(fork, start, "{arguments:?}");
    }
    let mut command = kvtune();
    command.arg("serve").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2")).args(["--port", "0"]);
    let [out, err] = [(); 2].map(|()| NamedTempFile::new().unwrap());
    let mut fork = Fork::of(&command, [out.path(), err.path()], 8 << 30);
    let began = Instant::now();
    while fs::read(out.path()).unwrap().is_empty() {
        assert!(began.elapsed() < PATIENCE, "it serves nothing");
        assert_eq!(fork.wait(Duration::from_millis(5)), None);
    }
    let of_process = |what: &str| fs::read_to_string(format!("/proc/{}/{what}", fork.id())).unwrap();
    assert!(of_process("status").starts_with("Name:\tkvtune\n"));
    let limits = of_process("limits");
    let addresses = limits.lines().find(|line| line.starts_with("Max address space")).unwrap();
    assert_eq!(addresses.matches(&(8_u64 << 30).to_string()).count(), 2, "{addresses}");
    fork.kill();
    assert_eq!(fork.wait(PATIENCE).unwrap().signal(), Some(9));
}
