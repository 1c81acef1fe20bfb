//! The process: arguments in, words and an exit code out.

use std::io::{self, Write};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use signal_hook::low_level::exit;

use super::command::{Arguments, Format};
use super::{Verb, command, device, launch, limits, panics, shell, world};
use crate::recipe::{Weights, check_policies_by};
use crate::report::console::{self, Speech};
use crate::units::Fault;
use crate::{cache, data};

/// Variables of profilers that write what they have seen when the process ends in the ordinary way: CUPTI's, of Nsight, and LLVM's.
const PROFILERS: [&str; 3] = ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "LLVM_PROFILE_FILE"];

/// The argument with which the binary renders chat templates for another process of it.
const RENDERER: &str = "render-chat-templates";

pub fn main() -> ! {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == RENDERER) {
        exit(i32::from(data::become_renderer().is_err()));
    }
    data::render_in_children_of("/proc/self/exe", RENDERER);
    check_policies_by(cache::check_policy);
    launch::follow_launcher();
    let code = command::parse(std::env::args_os()).map_or_else(|error| refused(&error), |arguments| code_of(&arguments));
    let _ = io::stdout().flush();
    if PROFILERS.iter().any(|name| std::env::var_os(name).is_some()) {
        std::process::exit(code);
    }
    // At once: destructors of libtorch's thousands of operations would take as long as some verbs do, and everything of ours is gone.
    exit(code)
}

/// Says what is wrong with the arguments, or what was asked of the parser itself, as `--help`; returns the exit code.
fn refused(error: &clap::Error) -> i32 {
    // To a terminal that is gone nothing can be said.
    let _ = error.print();
    let is_empty = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(text)) if text.is_empty());
    if error.kind() == ErrorKind::InvalidValue && is_empty {
        console::note("\nhint: an empty text names nothing: write a value, or leave the argument out");
    }
    if error.kind() == ErrorKind::UnknownArgument {
        console::note(
            "hint: keys of a recipe are set by `--set`, as `--set optimizer.learning_rate=1e-4`, where a command has it",
        );
    }
    error.exit_code()
}

/// Does what is asked, and returns the exit code.
fn run(arguments: &Arguments) -> Result<i32, Fault> {
    let Arguments { quiet: is_quiet, verbose: is_verbose, .. } = *arguments;
    console::speak(Speech { is_quiet, is_verbose, is_json: arguments.format == Format::Json });
    // Before ranks meet: they do so by libtorch, which would remember that there is no CUDA.
    let on = || world::device(arguments.device, arguments.threads);
    let done = |()| 0;
    if !is_shared(&arguments.verb_name) {
        world::refuse_further_ranks(&arguments.verb_name)?;
    }
    match &arguments.verb {
        Verb::Init(verb) => verb.run(on()?).map(done),
        Verb::FinetuneLora(verb) => {
            world::with_ranks(on()?, verb.joining, |device, world| verb.run(Weights::Adapter, device, world))
        }
        Verb::FinetuneFull(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(Weights::All, device, world)),
        Verb::Resume(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(device, world)),
        Verb::Launch(verb) => verb.run(arguments.options(), refused_by_all),
        Verb::Evaluate(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(device, world).map(done)),
        Verb::Calibrate(verb) => verb.run(on()?).map(done),
        Verb::Score(verb) => verb.run().map(done),
        Verb::Generate(verb) => verb.run(on()?),
        Verb::Serve(verb) => verb.run(on()?).map(done),
        Verb::Export(verb) => verb.run(),
        Verb::Inspect(verb) => verb.run().map(done),
        Verb::Report(verb) => verb.run().map(done),
        Verb::Verify(verb) => verb.run(on()?).map(done),
        Verb::Check(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(device, world).map(done)),
        Verb::Data(verb) => verb.run().map(done),
        Verb::Plan(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(device, world).map(done)),
        Verb::Bench(verb) => world::with_ranks(on()?, verb.joining, |device, world| verb.run(device, world).map(done)),
        Verb::Doctor(verb) => verb.run(arguments.device, arguments.threads).map(done),
        Verb::InitModel(verb) => verb.run().map(done),
        Verb::Completions { shell } => shell::completions(*shell, command::command()).map(done),
        Verb::Man { dir } => shell::manual(dir, command::command()).map(done),
    }
}

/// Whether ranks may begin a command: they share its work, or start others to do so.
fn is_shared(verb_name: &str) -> bool {
    verb_name == "launch" || launch::SHARED.contains(&verb_name)
}

/// Why each of several ranks would refuse a command.
fn refused_by_all(words: &[String]) -> Option<String> {
    match command::parse(std::iter::once("kvtune").chain(words.iter().map(String::as_str))) {
        Ok(Arguments { verb: Verb::Launch(_), .. }) => Some("a launched rank can't launch ranks".to_owned()),
        Ok(Arguments { verb_name, .. }) if !is_shared(&verb_name) => Some(world::alone(&verb_name)),
        Err(error) if error.use_stderr() => {
            // What is missing stands on lines of its own, up to an empty one.
            let text = error.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            Some(lines.join(" ").trim_start_matches("error: ").to_owned())
        }
        _ => None,
    }
}

fn code_of(arguments: &Arguments) -> i32 {
    panics::silence();
    match device::telling_missing_kernels(|| panics::caught(|| limits::check().and_then(|()| run(arguments)))) {
        Ok(code) => code,
        Err(error) => {
            console::error(&error, error.hint().as_deref());
            for error in error.further() {
                console::note("");
                console::error(error, error.hint().as_deref());
            }
            error.exit() as i32
        }
    }
}
