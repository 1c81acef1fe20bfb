//! Child processes in which chat templates run: a stranger's template can overflow the stack of its process, or take all its memory.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use serde_json::{Map, Value as Json};
use signal_hook::consts::SIGXCPU;

use super::jinja::{CompiledTemplate, MAX_RENDERING, TemplateText};
use crate::native::{ProcessLimits, locked};

/// The program that renders, as it is called, and the argument with which it does.
static PROGRAM: OnceLock<(OsString, OsString)> = OnceLock::new();

/// What a rendering may take that is given next to nothing, and for each byte that it is given.
const BASE_MEMORY: usize = 128 << 20;
const BYTES_PER_BYTE: usize = 24;
const BASE_TIME: Duration = Duration::from_secs(1);
const MICROS_PER_BYTE: u32 = 20;
/// A child that waits for a CPU as long is taken for dead.
const PATIENCE: Duration = Duration::from_secs(120);
const TOO_SLOW: &str = "it takes too much time";
/// Stack of a rendering, as much as the main thread of a process mostly has.
const STACK: usize = 8 << 20;

/// From now on templates run in children of this program, which calls [`become_renderer`] when it is started with `argument`.
pub fn render_in_children_of(program: impl Into<OsString>, argument: impl Into<OsString>) {
    let _ = PROGRAM.set((program.into(), argument.into()));
}

/// Renders for the process that has started this one, until that closes its end of the socket, which is the standard input here.
pub fn become_renderer() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let renderer = thread::Builder::new().stack_size(STACK).spawn(move || answer_all(socket))?;
    renderer.join().unwrap_or_else(|_| Err(io::Error::other("the renderer has failed")))
}

fn answer_all(mut socket: UnixStream) -> io::Result<()> {
    let mut limits = ProcessLimits::from_here()?;
    let fault = |error: serde_json::Error| format!("the conversation can not be passed on: {error}");
    let text = serde_json::from_slice(&asked(&mut socket, &mut limits)?)?;
    let compiled = CompiledTemplate::new(&text);
    answer(&mut socket, compiled.as_ref().map(|_| String::new()).map_err(Clone::clone))?;
    let Ok(compiled) = compiled else { return Ok(()) };
    loop {
        let context = serde_json::from_slice(&asked(&mut socket, &mut limits)?).map_err(fault);
        answer(&mut socket, context.and_then(|context| compiled.render(context)))?;
    }
}

/// The next request; it is within limits from here on.
fn asked(socket: &mut UnixStream, limits: &mut ProcessLimits) -> io::Result<Vec<u8>> {
    let [given, length] = read_numbers(socket)?;
    let bytes = BASE_MEMORY.saturating_add(given.saturating_mul(BYTES_PER_BYTE)).saturating_add(length.saturating_mul(2));
    limits.set(bytes, allowed_time(given))?;
    read_bytes(socket, length)
}

fn answer(socket: &mut UnixStream, text: Result<String, String>) -> io::Result<()> {
    let (is_fault, text) = text.map_or_else(|words| (1, words), |text| (0, text));
    write(socket, [is_fault, text.len()], text.as_bytes())
}

fn allowed_time(given: usize) -> Duration {
    BASE_TIME + Duration::from_micros(u64::from(MICROS_PER_BYTE).saturating_mul(given as u64))
}

fn read_numbers(socket: &mut UnixStream) -> io::Result<[usize; 2]> {
    let mut numbers = [[0; 8]; 2];
    socket.read_exact(numbers.as_flattened_mut())?;
    Ok(numbers.map(usize::from_le_bytes))
}

fn read_bytes(socket: &mut UnixStream, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Writes both at once: each write wakes the other side.
fn write(socket: &mut UnixStream, numbers: [usize; 2], bytes: &[u8]) -> io::Result<()> {
    socket.write_all(&[numbers.map(usize::to_le_bytes).as_flattened(), bytes].concat())
}

/// The children of one template: as many as there are threads that render at the same time. They end with it.
#[derive(Debug)]
pub(super) struct Renderers {
    text: Arc<TemplateText>,
    program: &'static (OsString, OsString),
    idle: Mutex<Vec<RendererProcess>>,
}

impl Renderers {
    /// Compiles the template in a first child. `None` where no program is known that renders.
    pub(super) fn of(text: &Arc<TemplateText>) -> Option<Result<Self, String>> {
        let all = Self { text: Arc::clone(text), program: PROGRAM.get()?, idle: Mutex::default() };
        Some(all.start().map(|first| Self { idle: vec![first].into(), ..all }))
    }

    pub(super) fn render(&self, context: &Map<String, Json>, size: usize) -> Result<String, String> {
        let request = serde_json::to_vec(context).map_err(|error| error.to_string())?;
        // The lock goes before the rendering.
        let idle = || locked(&self.idle).pop();
        loop {
            let found = idle();
            let is_new = found.is_none();
            let mut process = found.map_or_else(|| self.start(), Ok)?;
            if let Ok(answer) = process.ask(size, &request) {
                locked(&self.idle).push(process);
                return answer;
            }
            // A child that has ended while it was idle, or has too little memory left of what others took, decides nothing.
            let why = process.end();
            if is_new || why == TOO_SLOW {
                return Err(why.to_owned());
            }
        }
    }

    /// A further child, in which the template is compiled.
    fn start(&self) -> Result<RendererProcess, String> {
        let unstarted = |error: io::Error| format!("no process can be started for it: {error}");
        let mut process = RendererProcess::start(&self.program.0, &self.program.1).map_err(unstarted)?;
        let text = serde_json::to_vec(&*self.text).map_err(|error| error.to_string())?;
        match process.ask(self.text.source.len(), &text) {
            Ok(answer) => answer.map(|_| process),
            Err(_) => Err(process.end().to_owned()),
        }
    }
}

/// A child. It ends by itself as soon as this process has, as its socket is closed then; a rendering has little time.
#[derive(Debug)]
struct RendererProcess {
    process: Child,
    socket: UnixStream,
}

impl RendererProcess {
    fn start(program: &OsStr, argument: &OsStr) -> io::Result<Self> {
        let (socket, own) = UnixStream::pair()?;
        let mut command = Command::new(program);
        command.arg(argument).stdin(OwnedFd::from(own)).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { process: command.spawn()?, socket })
    }

    fn ask(&mut self, given: usize, request: &[u8]) -> io::Result<Result<String, String>> {
        let patience = Some(PATIENCE + 4 * allowed_time(given));
        self.socket.set_read_timeout(patience)?;
        self.socket.set_write_timeout(patience)?;
        write(&mut self.socket, [given, request.len()], request)?;
        let [is_fault, length] = read_numbers(&mut self.socket)?;
        if length > MAX_RENDERING {
            return Ok(Err(format!("it says more than {} MiB", MAX_RENDERING >> 20)));
        }
        let text = String::from_utf8(read_bytes(&mut self.socket, length)?).map_err(io::Error::other)?;
        Ok(if is_fault == 0 { Ok(text) } else { Err(text) })
    }

    /// Waits for a child that has broken off, or does not answer; says why. One that has not ended has gone on for too long.
    fn end(mut self) -> &'static str {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let waited = (0..200).find_map(|_| match self.process.try_wait() {
            Ok(None) => {
                thread::sleep(Duration::from_millis(5));
                None
            }
            status => status.ok().flatten(),
        });
        match waited.map(|status| (status.signal(), status.code())) {
            None | Some((Some(SIGXCPU), _)) => TOO_SLOW,
            Some((_, Some(_))) => "it takes too much memory",
            Some(_) => "it is nested too deep, or its process was killed",
        }
    }
}

impl Drop for RendererProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
